# What the core calls of hiredis: its incremental reply parser, nothing else.

cdef extern from "read.h" nogil:
    enum:
        REDIS_OK
        REDIS_ERR
        REDIS_ERR_PROTOCOL
        REDIS_REPLY_STRING
        REDIS_REPLY_ARRAY
        REDIS_REPLY_INTEGER
        REDIS_REPLY_NIL
        REDIS_REPLY_STATUS
        REDIS_REPLY_ERROR
        REDIS_REPLY_DOUBLE
        REDIS_REPLY_BOOL
        REDIS_REPLY_MAP
        REDIS_REPLY_SET
        REDIS_REPLY_ATTR
        REDIS_REPLY_PUSH
        REDIS_REPLY_BIGNUM
        REDIS_REPLY_VERB

    ctypedef struct redisReadTask:
        int type                # one of REDIS_REPLY_*
        long long elements      # members of this aggregate
        int idx                 # place in the parent aggregate
        void* obj               # what the callback made for this aggregate
        redisReadTask* parent   # NULL at the root
        void* privdata


# What hiredis calls for each value that it has parsed.
ctypedef void* (*CreateString)(const redisReadTask*, char*, size_t) noexcept
ctypedef void* (*CreateArray)(const redisReadTask*, size_t) noexcept
ctypedef void* (*CreateInteger)(const redisReadTask*, long long) noexcept
ctypedef void* (*CreateDouble)(const redisReadTask*, double, char*, size_t) noexcept
ctypedef void* (*CreateNil)(const redisReadTask*) noexcept
ctypedef void* (*CreateBool)(const redisReadTask*, int) noexcept


cdef extern from "read.h" nogil:
    ctypedef struct redisReplyObjectFunctions:
        CreateString createString
        CreateArray createArray
        CreateInteger createInteger
        CreateDouble createDouble
        CreateNil createNil
        CreateBool createBool
        void (*freeObject)(void*) noexcept

    ctypedef struct redisReader:
        int err                 # 0, or why the reader is dead
        char errstr[128]
        char* buf               # bytes fed and not yet parsed
        size_t pos              # where parsing stands in buf
        size_t len              # bytes in buf
        long long maxelements
        int maxdepth
        redisReadTask** task    # the path from the root to the value being read
        int ridx                # its last index; -1 between replies
        redisReplyObjectFunctions* fn
        void* privdata

    redisReader* redisReaderCreateWithFunctions(redisReplyObjectFunctions* fn)
    void redisReaderFree(redisReader* reader)
    int redisReaderFeed(redisReader* reader, const char* buf, size_t len)
    int redisReaderGetReply(redisReader* reader, void** reply)
