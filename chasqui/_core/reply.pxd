cimport cython

from chasqui._core.hiredis cimport redisReader, redisReadTask, redisReplyObjectFunctions


cdef class Builder:
    # Turns what hiredis parses into Python objects while it parses. One reply at a time.
    cdef redisReplyObjectFunctions* _functions  # how hiredis hands over each value
    cdef redisReader* _source                   # whose reply is being built; NULL between replies
    cdef long long _max_bulk_bytes              # the limit of the reader whose reply it is
    cdef list _keys                             # per depth, the map key whose value comes next

    cdef object finish(self, object root)
    cdef int reset(self) except -1


@cython.final
cdef class ReplyReader:
    cdef redisReader* _reader
    cdef Builder _plain         # builds what nobody asked for in another shape
    cdef Builder _current       # builds the reply under way; None between replies
    cdef bint _is_busy          # inside feed or read
    cdef Py_buffer _view        # the network chunk in hand ...
    cdef bint _has_view         # ... if there is one ...
    cdef Py_ssize_t _fed        # ... and how much of it hiredis has
    cdef str _broken            # why the stream is lost; None while it is sound
    cdef readonly long long max_bulk_bytes

    cdef object _read(self, Builder builder)
    cdef int _bind(self, Builder builder) except -1
    cdef int _unbind(self) except -1
    cdef int _enter(self) except -1
    cdef bint _feed_more(self) except -1
    cdef int _release(self) except -1
    cdef int _check_header(self) except -1
    cdef int _fail_parse(self) except -1
    cdef int _fail(self, str why) except -1


@cython.final
cdef class ReplyError:
    cdef readonly str message   # the server's words, code included


cdef int check_text(const redisReadTask* task, const char* text, size_t size) except -1
cdef void* plain_string(const redisReadTask* task, char* text, size_t size) except NULL
cdef void* plain_array(const redisReadTask* task, size_t size) except NULL
cdef void* plain_integer(const redisReadTask* task, long long number) except NULL
cdef void* plain_double(const redisReadTask* task, double number, char* text, size_t size) except NULL
cdef void* plain_nil(const redisReadTask* task) except NULL
cdef void* plain_bool(const redisReadTask* task, int truth) except NULL
cdef void free_object(void* root) noexcept
cdef void* give(const redisReadTask* task, object value) except NULL
