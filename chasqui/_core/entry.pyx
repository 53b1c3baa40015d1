"""Turns stream replies into entries: no nested lists in between, nothing decoded twice.

An Entry holds its envelope's bytes once and knows where the parts are; the payload is copied out and
decoded when its handler runs, not before.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint32_t
from libc.string cimport memcmp, memset

from chasqui._core.envelope cimport EnvelopeView, fault_text, read_envelope, retry_tuple, text_at, with_attempt
from chasqui._core.hiredis cimport (
    CreateArray, CreateBool, CreateDouble, CreateInteger, CreateNil, CreateString, REDIS_REPLY_ARRAY,
    REDIS_REPLY_MAP, REDIS_REPLY_STRING, redisReadTask, redisReplyObjectFunctions,
)
from chasqui._core.msgpack cimport Fault
from chasqui._core.payload cimport unpack_run
from chasqui._core.reply cimport (
    Builder, check_text, free_object, plain_array, plain_bool, plain_double, plain_integer, plain_nil, plain_string,
)
from chasqui._core.ulid cimport ulid_ms

from chasqui._core.reply import ProtocolError


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef enum Shape:
    STREAMS                     # XREADGROUP of one stream: [[key, entries]] or {key: entries}
    RANGE                       # XRANGE, XCLAIM, our scripts: entries

cdef enum Field:
    ENVELOPE_FIELD
    NAME_FIELD
    OTHER_FIELD

cdef dict SHAPES = {"streams": STREAMS, "range": RANGE}

cdef str MALFORMED = "malformed"
cdef str OVERSIZE = "oversize_payload"
cdef str UNDECODABLE = "decode_failed"
cdef str GONE = "gone"
cdef str LEFT = "left"
cdef str NO_ENVELOPE = "missing or non-bytes payload field"


@cython.final
@cython.no_gc                   # nothing it holds can hold it
@cython.freelist(1024)
cdef class Entry:
    """One stream record. While `fault` is None the envelope's parts can be read."""

    @property
    def job_id(self):
        """The job's id; empty where the envelope was not decoded."""
        return text_at(self.envelope, self._view.id_at, self._view.id_size) if self._view.id_size else ""

    @property
    def payload(self):
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self._decoded()) + self._view.payload_at,
                                         self._view.payload_size)

    def unpack(self):
        """The value in the payload; ValueError as of `payload.unpack`."""
        return unpack_run(<const unsigned char*>PyBytes_AS_STRING(self._decoded()) + self._view.payload_at,
                          self._view.payload_size)

    @property
    def is_new(self):
        """True for a readable entry that was never delivered nor run before, and may run."""
        # An entry that was given back counts no delivery, but it has been idle.
        return (self.fault is None and self.deliveries == 0 and self.idle_ms == 0 and self._view.attempt == 0
                and not (self._view.retry.has_max_attempts and self._view.retry.max_attempts == 0))

    @property
    def created_at_ms(self):
        return self._view.created_at_ms

    @property
    def untold_created_ms(self):
        """When the job was created, if its id does not hold that (a ULID does); else None."""
        return self._view.created_at_ms if self.has_untold_created() else None

    cdef bint has_untold_created(self) noexcept:
        return (self._view.id_size > 0
                and ulid_ms(PyBytes_AS_STRING(self.envelope) + self._view.id_at, self._view.id_size) < 0)

    @property
    def attempt(self):
        """Finished runs; 0 where the envelope was not decoded."""
        return self._view.attempt

    @property
    def retry(self):
        """`(max_attempts | None, backoff | None)`, or None where the job overrides nothing."""
        return retry_tuple(self.envelope, &self._view.retry)

    @property
    def max_attempts(self):
        """The job's own limit of runs, or None."""
        return self._view.retry.max_attempts if self._view.retry.has_max_attempts else None

    def with_attempt(self, uint32_t attempt):
        """The envelope with another attempt count, every other byte kept."""
        return with_attempt(self._decoded(), &self._view, attempt)

    cdef bytes _decoded(self):
        if self.fault is not None or self.envelope is None:
            raise ValueError(f"entry {self.id!r} has no readable envelope: {self.fault}")
        return self.envelope

    def __repr__(self):
        return f"Entry(id={self.id!r}, name={self.name!r}, job_id={self.job_id!r}, fault={self.fault!r})"


@cython.final
cdef class EntryBuilder(Builder):
    """Shapes a stream reply: `reader.read(builder)` gives a list of entries.

    `streams` is XREADGROUP of one stream, `range` is XRANGE, XCLAIM or a script that answers like them.
    An entry may be `[id, fields]` or `[id, fields, idle_ms, deliveries]`; a nil entry comes as None. Errors,
    nil and out-of-band messages come as they are. An envelope longer than `max_envelope_bytes` is kept but
    not decoded. Once the values of a reply have reached `max_bytes`, only the ids of further entries are kept.
    """

    def __cinit__(self, str shape not None, Py_ssize_t max_envelope_bytes=1 << 20,
                  Py_ssize_t max_bytes=PY_SSIZE_T_MAX):
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
        self.shape = shape
        self._shape = SHAPES[shape]
        self._max_envelope_bytes = max_envelope_bytes
        self._max_bytes = max_bytes
        self._functions = &ENTRY_FUNCTIONS

    cdef object finish(self, object root):
        return root if self._base == 0 else self._entries

    cdef int reset(self) except -1:
        self._base = 0
        self._entries = None
        self._entry = None
        return 0

    cdef int _begin(self, int kind) except -1:
        """The root of a reply is an aggregate: note the depth of its entries."""
        if self._shape == STREAMS and kind == REDIS_REPLY_ARRAY:
            self._base = 3
        elif self._shape == STREAMS and kind == REDIS_REPLY_MAP:
            self._base = 2
        elif self._shape == RANGE and kind == REDIS_REPLY_ARRAY:
            self._base = 1
        self._entries = []
        self._bytes = self.left = self.largest = 0
        return 0

    cdef int _open(self, int depth, int kind, int place, Py_ssize_t size) except -1:
        """An aggregate inside the reply begins."""
        cdef Entry entry
        if kind != REDIS_REPLY_ARRAY:
            raise misshapen(depth)
        if depth < self._base:
            if self._base == 3 and depth == 1 and size == 2:
                return 0                        # [key, entries]
            if depth == self._base - 1 and place & 1:
                return 0                        # entries
        elif depth == self._base:
            if size == 2 or size == 4:
                entry = Entry.__new__(Entry)
                entry.name = ""
                if self._bytes < self._max_bytes:
                    entry.fault = MALFORMED
                    entry.detail = NO_ENVELOPE
                else:
                    entry.fault = LEFT
                    self.left += 1
                self._entries.append(entry)
                self._entry = entry
                return 0
        elif depth == self._base + 1 and place == 1 and size & 1 == 0:
            return 0                            # fields
        raise misshapen(depth)

    cdef int _text(self, int depth, int place, const char* text, Py_ssize_t size) except -1:
        """A string inside the reply."""
        if depth == self._base + 2:
            if place & 1:
                return self._value(text, size)
            if size == 1 and text[0] == c'd' and self._entry.envelope is None:
                self._field = ENVELOPE_FIELD
            elif size == 1 and text[0] == c'n':
                self._field = NAME_FIELD
            else:
                self._field = OTHER_FIELD
                self._field_name = PyBytes_FromStringAndSize(text, size)
            return 0
        if depth == self._base + 1 and place == 0:
            self._entry.id = PyBytes_FromStringAndSize(text, size)
            return 0
        if self._shape == STREAMS and depth == self._base - 1 and place & 1 == 0:
            return 0                            # the stream's key
        raise misshapen(depth)

    cdef int _value(self, const char* text, Py_ssize_t size) except -1:
        cdef Entry entry = self._entry
        cdef Fault fault
        if size > self.largest:
            self.largest = size
        if entry.fault is LEFT:
            return 0
        self._bytes += size
        if self._field == ENVELOPE_FIELD:
            entry.envelope = PyBytes_FromStringAndSize(text, size)
            entry.detail = None
            if size > self._max_envelope_bytes:
                entry.fault = OVERSIZE
            elif read_envelope(<const unsigned char*>text, size, &entry._view, &fault) == 0:
                entry.fault = None
            else:
                memset(&entry._view, 0, sizeof(EnvelopeView))
                entry.fault = UNDECODABLE
                entry.detail = fault_text(&fault)
        elif self._field == NAME_FIELD:
            if self._name_bytes is None or PyBytes_GET_SIZE(self._name_bytes) != size \
                    or memcmp(PyBytes_AS_STRING(self._name_bytes), text, size) != 0:
                self._name = text[:size].decode("utf-8", "replace")
                self._name_bytes = PyBytes_FromStringAndSize(text, size)
            entry.name = self._name
        else:
            if entry.extra is None:
                entry.extra = {}
            entry.extra[self._field_name] = PyBytes_FromStringAndSize(text, size)
        return 0


cdef object misshapen(int depth):
    return ProtocolError(f"Protocol error, not a reply of stream entries at depth {depth}")


# ── What hiredis calls ───────────────────────────────────────────────────────────────────────────

cdef redisReplyObjectFunctions ENTRY_FUNCTIONS
ENTRY_FUNCTIONS.createString = <CreateString>entry_string
ENTRY_FUNCTIONS.createArray = <CreateArray>entry_array
ENTRY_FUNCTIONS.createInteger = <CreateInteger>entry_integer
ENTRY_FUNCTIONS.createDouble = <CreateDouble>entry_double
ENTRY_FUNCTIONS.createNil = <CreateNil>entry_nil
ENTRY_FUNCTIONS.createBool = <CreateBool>entry_bool
ENTRY_FUNCTIONS.freeObject = free_object


cdef inline bint is_plain(const redisReadTask* task) noexcept:
    """A root that is no aggregate, or anything inside a reply that holds no entries."""
    return task.parent == NULL or (<EntryBuilder>task.privdata)._base == 0


cdef void* entry_string(const redisReadTask* task, char* text, size_t size) except NULL:
    cdef EntryBuilder builder = <EntryBuilder>task.privdata
    if is_plain(task):
        return plain_string(task, text, size)
    if task.type != REDIS_REPLY_STRING:
        raise misshapen(builder._source.ridx)
    check_text(task, text, size)
    builder._text(builder._source.ridx, task.idx, text, size)
    return <void*>builder


cdef void* entry_array(const redisReadTask* task, size_t size) except NULL:
    cdef EntryBuilder builder = <EntryBuilder>task.privdata
    if task.parent == NULL:
        builder._begin(task.type)
        if builder._base:
            Py_INCREF(builder._entries)         # hiredis owns the root until the reply is whole
            return <void*>builder._entries
    if builder._base == 0:
        return plain_array(task, size)
    builder._open(builder._source.ridx, task.type, task.idx, size)
    return <void*>builder


cdef void* entry_integer(const redisReadTask* task, long long number) except NULL:
    cdef EntryBuilder builder = <EntryBuilder>task.privdata
    if is_plain(task):
        return plain_integer(task, number)
    if builder._source.ridx != builder._base + 1 or not 2 <= task.idx <= 3:
        raise misshapen(builder._source.ridx)
    if task.idx == 2:
        builder._entry.idle_ms = number
    else:
        builder._entry.deliveries = number
    return <void*>builder


cdef void* entry_nil(const redisReadTask* task) except NULL:
    cdef EntryBuilder builder = <EntryBuilder>task.privdata
    if is_plain(task):
        return plain_nil(task)
    if builder._source.ridx == builder._base:
        builder._entries.append(None)           # Redis 6.2 answers nil for what was deleted while pending
    elif builder._source.ridx == builder._base + 1 and task.idx == 1:
        builder._entry.fault = GONE
        builder._entry.detail = None
    else:
        raise misshapen(builder._source.ridx)
    return <void*>builder


cdef void* entry_double(const redisReadTask* task, double number, char* text, size_t size) except NULL:
    if is_plain(task):
        return plain_double(task, number, text, size)
    raise misshapen((<EntryBuilder>task.privdata)._source.ridx)


cdef void* entry_bool(const redisReadTask* task, int truth) except NULL:
    if is_plain(task):
        return plain_bool(task, truth)
    raise misshapen((<EntryBuilder>task.privdata)._source.ridx)
