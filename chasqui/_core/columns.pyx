"""Replies of XRANGE straight into columns: filled while hiredis parses, nothing in between.

A column comes from one field of the entries, from their ids or from their envelopes. Only what is
asked for is kept. What is no UTF-8 gets replacement characters, what is no number is null: one odd
value costs itself and not the page.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree
from cpython.ref cimport Py_INCREF
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memcpy

from chasqui._core.column cimport SKIPPED, Block, Column, mended, reserve, take_block
from chasqui._core.envelope cimport EnvelopeView, read_envelope, retry_tuple
from chasqui._core.hiredis cimport (
    CreateArray, CreateBool, CreateDouble, CreateInteger, CreateNil, CreateString, REDIS_REPLY_ARRAY,
    REDIS_REPLY_STRING, redisReadTask, redisReplyObjectFunctions,
)
from chasqui._core.msgpack cimport Fault
from chasqui._core.reply cimport (
    Builder, check_text, free_object, plain_array, plain_bool, plain_double, plain_integer, plain_nil, plain_string,
)

from chasqui._core.reply import ProtocolError


cdef enum Target:
    TO_ENVELOPE = -1
    TO_EXTRA = -2
    TO_NOTHING = -3

cdef enum Depth:                # of what is inside a reply: [[id, [field, value, …]], …]
    OF_ENTRY = 1
    OF_PARTS = 2
    OF_FIELDS = 3

cdef frozenset OF_ENVELOPES = frozenset(("job_id", "payload", "created_at", "attempt", "envelope"))


class Columns:
    """Rows as columns.

    A column of texts is `(bitmap, ends, bytes)`, one of numbers `(bitmap, numbers)`, as Arrow lays them
    out; the bitmap is None where no row is null.
    """

    __slots__ = ("columns", "corrupt", "extras", "retries", "rows")

    def __init__(self, rows, columns, extras, retries, corrupt):
        self.rows = rows
        self.columns = columns
        self.extras = extras
        self.retries = retries
        self.corrupt = corrupt


@cython.final
cdef class ColumnBuilder(Builder):
    """Gathers the entries of XRANGE: `reader.read(builder)` gives how many and the last id, and `take`
    what was gathered since the last time.

    `fields` are columns as `(name, kind, field)`; a field may have several. Made from other parts of an
    entry, where `parts` has their names: `entry_id`, `entry_ts`, and with any of `job_id`, `payload`,
    `created_at`, `attempt`, `envelope` field `d` is decoded. `extra` in `parts` keeps all other fields.
    """

    def __cinit__(self, fields, parts=()):
        cdef dict same = {}                     # one object for each field: they are told apart by `is`
        self._columns = [Column(name, kind, same.setdefault(field, field)) for name, kind, field in fields]
        self._fields = len(self._columns)
        self._entry_id = self._part("entry_id", "text", parts)
        self._entry_ms = self._part("entry_ts", "moment", parts)
        self._job_id = self._part("job_id", "text", parts)
        self._payload = self._part("payload", "binary", parts)
        self._created_ms = self._part("created_at", "moment", parts)
        self._attempt = self._part("attempt", "int32", parts)
        self._envelope = self._part("envelope", "binary", parts)
        self._has_envelopes = not OF_ENVELOPES.isdisjoint(parts)
        if "extra" in parts:
            self._extra_names = Column("extra", "text")
            self._extra_values = Column("extra", "text")
        self._retries = {}
        self._corrupt = {}
        self._functions = &COLUMN_FUNCTIONS

    def __dealloc__(self):
        PyMem_RawFree(self._extra_ends.data)

    def _part(self, str name, str kind, parts):
        if name not in parts:
            return None
        column = Column(name, kind)
        self._columns.append(column)
        return column

    @property
    def rows(self):
        """Entries gathered so far."""
        return self._rows

    @property
    def size(self):
        """Their bytes as they came, about: also those of fields that nobody wants."""
        return self._size

    def take(self):
        """What was gathered, as Columns."""
        cdef Column column
        if self._source != NULL:
            raise RuntimeError("the builder is in the middle of a reply")
        columns = {column.name: column.take() for column in self._columns if column.kind != SKIPPED}
        extras = None
        if self._extra_names is not None:
            ends = bytes(4) + take_block(&self._extra_ends)
            extras = ends, self._extra_names.take(), self._extra_values.take()
        answer = Columns(self._rows, columns, extras, self._retries, self._corrupt)
        self._rows = self._row = self._size = 0
        self._retries, self._corrupt = {}, {}
        return answer

    cdef object finish(self, object root):
        cdef Py_ssize_t known = self._rows
        if not self._is_page:
            return root
        self._close_entry()
        self._rows = self._row
        return self._rows - known, self._last_id

    cdef int reset(self) except -1:
        """Forget a reply that is not whole: it is read again."""
        self._is_page = False
        self._last_id = self._extra_name = None
        if self._is_open or self._row > self._rows:
            self._is_open = False
            self._row = self._rows
            self._cut(self._rows)
        return 0

    cdef int _open(self, int depth, int kind, int place, Py_ssize_t size) except -1:
        """An array inside the reply begins."""
        if kind == REDIS_REPLY_ARRAY and depth == OF_ENTRY and size == 2:
            self._close_entry()
            self._is_open = True
            self._was_decoded = False
            self._next = 0
            return 0
        if kind == REDIS_REPLY_ARRAY and depth == OF_PARTS and place == 1 and size & 1 == 0:
            return 0                            # fields
        raise misshapen(depth)

    cdef int _close_entry(self) except -1:
        """All of an entry was seen: what it does not have is null."""
        cdef Column column
        cdef int32_t end
        if not self._is_open:
            return 0
        self._is_open = False
        if self._has_envelopes and not self._was_decoded:
            self._corrupt[self._row] = b""
        self._row += 1
        for column in self._columns:
            if column.rows < self._row and column.kind != SKIPPED:
                column.put_null()
        if self._extra_names is not None:
            end = <int32_t>self._extra_names.rows
            memcpy(reserve(&self._extra_ends, 4), &end, 4)
            self._extra_ends.size += 4
        return 0

    cdef int _cut(self, Py_ssize_t rows) except -1:
        cdef Column column
        cdef int32_t end = 0
        for column in self._columns:
            if column.kind != SKIPPED:
                column.cut(rows)
        if self._extra_names is not None:
            self._extra_ends.size = 4 * rows
            if rows:
                memcpy(&end, self._extra_ends.data + 4 * (rows - 1), 4)
            self._extra_names.cut(end)
            self._extra_values.cut(end)
        for kept in (self._retries, self._corrupt):
            for row in [row for row in kept if row >= rows]:
                del kept[row]
        return 0

    cdef int _text(self, int depth, int place, const char* text, Py_ssize_t size) except -1:
        """A string inside the reply."""
        cdef Py_ssize_t dash = 0
        if depth == OF_FIELDS:
            return self._value(text, size) if place & 1 else self._choose(text, size)
        if depth == OF_PARTS and place == 0:
            self._last_id = PyBytes_FromStringAndSize(text, size)
            if self._entry_id is not None:
                self._entry_id.put_bytes(text, size)
            if self._entry_ms is not None:
                while dash < size and text[dash] != c'-':
                    dash += 1
                self._entry_ms.put_text(text, dash)
            return 0
        raise misshapen(depth)

    cdef int _choose(self, const char* text, Py_ssize_t size) except -1:
        """Where does the value of this field go?"""
        cdef Py_ssize_t i, place
        cdef bytes field
        for i in range(self._fields):
            place = self._next + i
            if place >= self._fields:
                place -= self._fields
            field = (<Column>self._columns[place]).field
            if PyBytes_GET_SIZE(field) == size and memcmp(PyBytes_AS_STRING(field), text, size) == 0:
                # The first of those that share a field: `_value` looks for the others behind it.
                while place and (<Column>self._columns[place - 1]).field is field:
                    place -= 1
                self._slot = place
                return 0
        if size == 1 and text[0] == c'd' and self._has_envelopes:
            self._slot = TO_ENVELOPE
        elif self._extra_names is not None:
            self._slot = TO_EXTRA
            self._extra_name = mended(text, size)
        else:
            self._slot = TO_NOTHING
        return 0

    cdef int _value(self, const char* text, Py_ssize_t size) except -1:
        cdef Column column
        cdef Py_ssize_t place = self._slot
        cdef bytes field
        self._size += size
        if self._slot == TO_ENVELOPE:
            return 0 if self._was_decoded else self._decode(text, size)
        if self._slot == TO_EXTRA:
            return self._put_extra(text, size)
        if self._slot == TO_NOTHING:
            return 0
        column = <Column>self._columns[place]
        field = column.field
        while True:
            if column.kind != SKIPPED and column.rows == self._row:     # the first of its name counts
                column.put_text(text, size)
            place += 1
            if place == self._fields:
                self._next = 0
                return 0
            column = <Column>self._columns[place]
            if column.field is not field:
                self._next = place
                return 0

    cdef int _decode(self, const char* text, Py_ssize_t size) except -1:
        """The envelope of the entry under way."""
        cdef EnvelopeView view
        cdef Fault fault
        self._was_decoded = True
        if self._envelope is not None:
            self._envelope.put_bytes(text, size)
        if read_envelope(<const unsigned char*>text, size, &view, &fault) < 0:
            self._corrupt[self._row] = PyBytes_FromStringAndSize(text, size)
            return 0
        if self._job_id is not None and view.id_size:
            self._job_id.put_text(text + view.id_at, view.id_size)
        if self._payload is not None:
            self._payload.put_bytes(text + view.payload_at, view.payload_size)
        if self._created_ms is not None:
            self._created_ms.put_number(<int64_t>min(view.created_at_ms, <uint64_t>INT64_MAX))
        if self._attempt is not None:
            self._attempt.put_number(min(<int64_t>view.attempt, <int64_t>0x7FFFFFFF))
        if view.retry.has_max_attempts or view.retry.has_backoff:
            self._retries[self._row] = retry_tuple(PyBytes_FromStringAndSize(text, size), &view.retry)
        return 0

    cdef int _put_extra(self, const char* text, Py_ssize_t size) except -1:
        """A field that is no column of its own; the first of its name counts."""
        cdef int32_t first = 0
        cdef int32_t at[2]
        cdef Py_ssize_t i
        cdef Column names = self._extra_names
        cdef bytes name = self._extra_name
        if self._row:
            memcpy(&first, self._extra_ends.data + 4 * (self._row - 1), 4)
        for i in range(first, names.rows):
            memcpy(at, names.ends.data + 4 * i, 8)
            if at[1] - at[0] == PyBytes_GET_SIZE(name) \
                    and memcmp(names.values.data + at[0], PyBytes_AS_STRING(name), at[1] - at[0]) == 0:
                return 0
        names.put_bytes(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        self._extra_values.put_text(text, size)
        return 0


cdef object misshapen(int depth):
    return ProtocolError(f"Protocol error, not a reply of stream entries at depth {depth}")


# ── What hiredis calls ───────────────────────────────────────────────────────────────────────────

cdef redisReplyObjectFunctions COLUMN_FUNCTIONS
COLUMN_FUNCTIONS.createString = <CreateString>column_string
COLUMN_FUNCTIONS.createArray = <CreateArray>column_array
COLUMN_FUNCTIONS.createInteger = <CreateInteger>column_integer
COLUMN_FUNCTIONS.createDouble = <CreateDouble>column_double
COLUMN_FUNCTIONS.createNil = <CreateNil>column_nil
COLUMN_FUNCTIONS.createBool = <CreateBool>column_bool
COLUMN_FUNCTIONS.freeObject = free_object


cdef inline bint is_plain(const redisReadTask* task) noexcept:
    """A root that is no array, or anything inside a reply that holds no entries."""
    return task.parent == NULL or not (<ColumnBuilder>task.privdata)._is_page


cdef void* column_string(const redisReadTask* task, char* text, size_t size) except NULL:
    cdef ColumnBuilder builder = <ColumnBuilder>task.privdata
    if is_plain(task):
        return plain_string(task, text, size)
    if task.type != REDIS_REPLY_STRING:
        raise misshapen(builder._source.ridx)
    check_text(task, text, size)
    builder._text(builder._source.ridx, task.idx, text, size)
    return <void*>builder


cdef void* column_array(const redisReadTask* task, size_t size) except NULL:
    cdef ColumnBuilder builder = <ColumnBuilder>task.privdata
    if task.parent == NULL:
        builder._is_page = task.type == REDIS_REPLY_ARRAY
        builder._row = builder._rows
        if builder._is_page:
            Py_INCREF(builder)                  # hiredis owns the root until the reply is whole
            return <void*>builder
    if not builder._is_page:
        return plain_array(task, size)
    builder._open(builder._source.ridx, task.type, task.idx, size)
    return <void*>builder


cdef void* column_integer(const redisReadTask* task, long long number) except NULL:
    if is_plain(task):
        return plain_integer(task, number)
    raise misshapen((<ColumnBuilder>task.privdata)._source.ridx)


cdef void* column_nil(const redisReadTask* task) except NULL:
    if is_plain(task):
        return plain_nil(task)
    raise misshapen((<ColumnBuilder>task.privdata)._source.ridx)


cdef void* column_double(const redisReadTask* task, double number, char* text, size_t size) except NULL:
    if is_plain(task):
        return plain_double(task, number, text, size)
    raise misshapen((<ColumnBuilder>task.privdata)._source.ridx)


cdef void* column_bool(const redisReadTask* task, int truth) except NULL:
    if is_plain(task):
        return plain_bool(task, truth)
    raise misshapen((<ColumnBuilder>task.privdata)._source.ridx)
