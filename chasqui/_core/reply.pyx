"""Bytes from the server into Python objects: RESP2 and RESP3, incremental, over hiredis's parser.

hiredis's callbacks build the final objects while it parses, so there is no tree in between. Whatever
a server may send, a header alone allocates nothing: containers grow as their members arrive, and
lengths beyond the limits end the stream before a byte of them is kept.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_Append
from cpython.exc cimport PyErr_Occurred
from cpython.dict cimport PyDict_SetItem
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memchr

from chasqui._core.hiredis cimport (
    CreateArray, CreateBool, CreateDouble, CreateInteger, CreateNil, CreateString,
    REDIS_OK, REDIS_REPLY_ATTR, REDIS_REPLY_BIGNUM, REDIS_REPLY_ERROR, REDIS_REPLY_MAP,
    REDIS_REPLY_PUSH, REDIS_REPLY_STRING, REDIS_REPLY_VERB, redisReader, redisReaderCreateWithFunctions,
    redisReaderFeed, redisReaderFree, redisReaderGetReply, redisReadTask, redisReplyObjectFunctions,
)


cdef enum:
    MAX_NESTING = 16            # deeper than any reply of Redis
    # hiredis moves what is left of its buffer once per kilobyte parsed: small slices keep that linear.
    SLICE_BYTES = 16384
    MAX_LINE_BYTES = 65536      # a status, error or number line
    MAX_LENGTH_DIGITS = 20
    MAX_BIGNUM_DIGITS = 4000    # int() of more is refused by Python itself

#: The most members that one array, map or set of a reply may have.
MAX_ELEMENTS = 1 << 24
#: The largest string Redis can hold.
MAX_BULK_BYTES = 512 * 1024 * 1024


class ProtocolError(Exception):
    """The server sent what is not RESP, or beyond the limits. The stream cannot be read further."""


class Push(list):
    """An out-of-band message of RESP3: `[kind, …]`. It answers no command."""


class _Incomplete:
    __slots__ = ()

    def __repr__(self):
        return "INCOMPLETE"

    def __bool__(self):
        return False


#: What `read` gives while the next reply has not arrived whole.
INCOMPLETE = _Incomplete()

cdef str LONG_LINE = f"Protocol error, a line of more than {MAX_LINE_BYTES} bytes"
cdef object _ATTRIBUTE = object()       # stands for an attribute of RESP3, which is read and dropped


@cython.final
cdef class ReplyError:
    """An error reply, as an object: the connection decides what becomes of it."""

    def __init__(self, str message not None):
        self.message = message

    @property
    def code(self):
        """The first word: `NOGROUP`, `MOVED`, `ERR`."""
        return self.message.partition(" ")[0]

    def __eq__(self, other):
        return isinstance(other, ReplyError) and self.message == (<ReplyError>other).message

    def __hash__(self):
        return hash(self.message)

    def __repr__(self):
        return f"ReplyError({self.message!r})"


@cython.final
@cython.no_gc_clear             # __dealloc__ needs the builder
cdef class ReplyReader:
    """Feed it chunks as they come from the network, read replies as they become whole.

    Strings come as bytes, maps as dicts, sets as lists, verbatim strings as bytes without their format.
    Protocol errors are final: the reader raises the same error ever after. Owned by one thread at a time.
    """

    def __cinit__(self, long long max_elements=1 << 24, long long max_bulk_bytes=512 * 1024 * 1024):
        if not 1 <= max_elements <= 1 << 30:    # hiredis counts members in an int, and a map's twice
            raise ValueError("max_elements must be 1..2^30")
        if max_bulk_bytes < 1:
            raise ValueError("max_bulk_bytes must be positive")
        self._plain = Builder()
        self.max_bulk_bytes = max_bulk_bytes
        self._reader = redisReaderCreateWithFunctions(&PLAIN_FUNCTIONS)
        if self._reader == NULL:
            raise MemoryError("no memory for a reply reader")
        self._reader.maxelements = max_elements
        self._reader.maxdepth = MAX_NESTING

    def __dealloc__(self):
        self._unbind()                          # a builder outlives the readers it serves
        self._release()
        redisReaderFree(self._reader)

    def feed(self, chunk not None):
        """Take one network chunk. Its bytes are used until `read` has gone through them."""
        self._enter()
        try:
            while self._has_view:               # a chunk that nobody read to its end
                self._feed_more()
            PyObject_GetBuffer(chunk, &self._view, PyBUF_SIMPLE)
            self._has_view = True
            self._fed = 0
        finally:
            self._is_busy = False

    def read(self, Builder builder=None):
        """The next reply, or INCOMPLETE. `builder` shapes the reply that begins now; one that is under way
        keeps the builder it began with. Out-of-band messages come as Push whatever was asked for."""
        self._enter()
        try:
            return self._read(self._plain if builder is None else builder)
        finally:
            self._is_busy = False

    cdef int _enter(self) except -1:
        """Building objects can run a finalizer or another thread: neither may come in here meanwhile."""
        if self._is_busy:
            raise RuntimeError("the reader is in use: it takes one call at a time")
        if self._broken is not None:
            raise ProtocolError(self._broken)
        self._is_busy = True
        return 0

    cdef object _read(self, Builder builder):
        cdef void* root = NULL
        cdef object reply
        while True:
            if self._current is None:
                self._bind(builder)
            if redisReaderGetReply(self._reader, &root) != REDIS_OK:
                self._fail_parse()
            if root != NULL:
                reply = <object>root
                Py_DECREF(reply)                # hiredis's reference is ours now
                if reply is _ATTRIBUTE:
                    self._unbind()
                    continue
                reply = self._current.finish(reply)
                self._unbind()
                return reply
            self._check_header()
            if not self._feed_more():
                if self._reader.ridx <= 0 and self._reader.pos == self._reader.len:
                    # Nothing of the next reply is here: it may still get another builder.
                    if self._reader.ridx < 0 or self._reader.task[0].type < 0:
                        self._unbind()
                return INCOMPLETE

    cdef int _bind(self, Builder builder) except -1:
        """Have the reply that begins now built by `builder`."""
        if builder._source != NULL:
            raise RuntimeError("the builder is in the middle of another reader's reply")
        self._current = builder
        builder._source = self._reader
        builder._max_bulk_bytes = self.max_bulk_bytes
        self._reader.fn = builder._functions
        self._reader.privdata = <void*>builder
        if self._reader.ridx == 0:              # hiredis began a reply before its first byte came
            self._reader.task[0].privdata = <void*>builder
        return 0

    cdef int _unbind(self) except -1:
        """Between replies no builder is ours, and none keeps anything of the last one."""
        if self._current is not None:
            self._current.reset()
            self._current._source = NULL
            self._current = None
        return 0

    cdef bint _feed_more(self) except -1:
        """Hand hiredis the next slice of the chunk in hand; False when there is none."""
        cdef Py_ssize_t size
        if not self._has_view:
            return False
        size = min(self._view.len - self._fed, <Py_ssize_t>SLICE_BYTES)
        if redisReaderFeed(self._reader, <const char*>self._view.buf + self._fed, size) != REDIS_OK:
            self._release()
            raise MemoryError("no memory for a reply")
        self._fed += size
        if self._fed == self._view.len:
            self._release()
        return True

    cdef int _release(self) except -1:
        """Let go of the chunk in hand."""
        if self._has_view:
            self._has_view = False
            PyBuffer_Release(&self._view)
        return 0

    cdef int _check_header(self) except -1:
        """The reply stops in the middle of a value: refuse it now if it can only get too long."""
        cdef redisReader* reader = self._reader
        cdef const char* at = reader.buf + reader.pos
        cdef size_t size = reader.len - reader.pos
        cdef const char* end
        cdef long long length = 0
        cdef int kind
        if reader.ridx < 0 or size == 0:
            return 0
        kind = reader.task[reader.ridx].type
        if kind != REDIS_REPLY_STRING and kind != REDIS_REPLY_VERB:
            if size > MAX_LINE_BYTES + 1:       # the line and half of its end
                self._fail(LONG_LINE)
            return 0
        end = <const char*>memchr(at, c'\r', min(size, <size_t>MAX_LENGTH_DIGITS))
        if end == NULL:
            if size >= MAX_LENGTH_DIGITS:
                self._fail("Protocol error, a bulk length that does not end")
            return 0
        if end + 1 < at + size and end[1] != c'\n':
            self._fail("Protocol error, a bulk length that does not end")
        while at < end and c'0' <= at[0] <= c'9':
            length = length * 10 + (at[0] - c'0')
            if length > self.max_bulk_bytes:
                self._fail(long_bulk(self.max_bulk_bytes))
            at += 1
        return 0

    cdef int _fail_parse(self) except -1:
        """hiredis stopped: because of an exception in a callback, or in its own words."""
        if PyErr_Occurred() == NULL:
            return self._fail(self._reader.errstr.decode("ascii", "replace"))
        try:
            _reraise()
        except ProtocolError as error:
            why = str(error)
        except BaseException as error:
            try:
                self._fail(f"Protocol error, a reply was lost to {type(error).__name__}")
            except ProtocolError:
                pass
            raise
        self._fail(why)

    cdef int _fail(self, str why) except -1:
        """Break the stream for good."""
        self._release()
        self._unbind()
        self._broken = why
        raise ProtocolError(why)


# ── Building plain replies ───────────────────────────────────────────────────────────────────────
# Each callback makes one value and puts it into its parent. hiredis owns the root; parents own the rest.


cdef int _reraise() except -1:
    """Let the exception that a callback left behind take its course."""
    return -1


cdef class Builder:
    """Builds replies as plain Python objects. Subclasses give them another shape."""

    def __cinit__(self):
        self._functions = &PLAIN_FUNCTIONS
        self._keys = [None] * (MAX_NESTING + 2)

    cdef object finish(self, object root):
        """The whole reply is here: what the caller gets for it."""
        return root

    cdef int reset(self) except -1:
        """Forget the reply, whether whole or not."""
        return 0


# A callback that fails leaves its exception set and answers NULL, which makes hiredis stop; `read` takes it up.

cdef redisReplyObjectFunctions PLAIN_FUNCTIONS
PLAIN_FUNCTIONS.createString = <CreateString>plain_string
PLAIN_FUNCTIONS.createArray = <CreateArray>plain_array
PLAIN_FUNCTIONS.createInteger = <CreateInteger>plain_integer
PLAIN_FUNCTIONS.createDouble = <CreateDouble>plain_double
PLAIN_FUNCTIONS.createNil = <CreateNil>plain_nil
PLAIN_FUNCTIONS.createBool = <CreateBool>plain_bool
PLAIN_FUNCTIONS.freeObject = free_object


cdef int check_text(const redisReadTask* task, const char* text, size_t size) except -1:
    """What hiredis does not check. Lengths, however the text came: `_check_header` sees only what a chunk
    cut in two. And that a bulk string ends where it said: else the stream is out of step for good."""
    cdef Builder builder = <Builder>task.privdata
    if task.type != REDIS_REPLY_STRING and task.type != REDIS_REPLY_VERB:
        if size > MAX_LINE_BYTES:
            raise ProtocolError(LONG_LINE)
    elif <long long>size > builder._max_bulk_bytes:
        raise ProtocolError(long_bulk(builder._max_bulk_bytes))
    elif text[size] != c'\r' or text[size + 1] != c'\n':
        raise ProtocolError("Protocol error, a bulk string that does not end where it said")
    return 0


cdef void* plain_string(const redisReadTask* task, char* text, size_t size) except NULL:
    check_text(task, text, size)
    if task.type == REDIS_REPLY_ERROR:
        return give(task, ReplyError(text[:size].decode("utf-8", "replace")))
    if task.type == REDIS_REPLY_VERB:
        return give(task, PyBytes_FromStringAndSize(text + 4, size - 4))
    if task.type == REDIS_REPLY_BIGNUM:
        if size == 0 or size > MAX_BIGNUM_DIGITS or (size == 1 and text[0] == c'-'):
            raise ProtocolError("Protocol error, a big number without or with too many digits")
        return give(task, int(text[:size]))
    return give(task, PyBytes_FromStringAndSize(text, size))


cdef str long_bulk(long long most):
    return f"Protocol error, a bulk string of more than {most} bytes"


cdef void* plain_array(const redisReadTask* task, size_t size) except NULL:
    if task.type == REDIS_REPLY_ATTR:
        if task.parent != NULL:
            raise ProtocolError("Protocol error, an attribute inside a reply")
        return give(task, _ATTRIBUTE)
    if task.type == REDIS_REPLY_MAP:
        return give(task, {})
    if task.type == REDIS_REPLY_PUSH:
        if task.parent != NULL:
            raise ProtocolError("Protocol error, a push inside a reply")
        return give(task, Push())
    return give(task, [])


cdef void* plain_integer(const redisReadTask* task, long long number) except NULL:
    return give(task, number)


cdef void* plain_double(const redisReadTask* task, double number, char* text, size_t size) except NULL:
    return give(task, number)


cdef void* plain_nil(const redisReadTask* task) except NULL:
    return give(task, None)


cdef void* plain_bool(const redisReadTask* task, int truth) except NULL:
    return give(task, True if truth else False)


cdef void free_object(void* root) noexcept:
    Py_DECREF(<object>root)


cdef void* give(const redisReadTask* task, object value) except NULL:
    """Put a value where it belongs. The root's reference goes to hiredis; others are only told apart from NULL."""
    cdef Builder builder
    cdef object parent
    if task.parent == NULL:
        Py_INCREF(value)
        return <void*>value
    parent = <object>task.parent.obj
    if type(parent) is dict:
        builder = <Builder>task.privdata
        if task.idx & 1:
            PyDict_SetItem(parent, builder._keys[builder._source.ridx], value)
            builder._keys[builder._source.ridx] = None
        elif isinstance(value, (list, dict)):
            raise ProtocolError("Protocol error, a map key that is an aggregate")
        else:
            builder._keys[builder._source.ridx] = value
    elif parent is _ATTRIBUTE:          # nobody keeps what is inside an attribute
        return <void*>_ATTRIBUTE
    else:
        PyList_Append(parent, value)
    return <void*>value
