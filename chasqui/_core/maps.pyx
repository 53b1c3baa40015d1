"""Columns in Arrow's layout into msgpack, a value per row: no Python object per value, however deep it is."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from chasqui._core.buffer cimport CommandBuffer, decimal_width, put_decimal as put_number
from chasqui._core.forms cimport (
    DAY_S, DECIMAL_CHARS, FIRST_DAY, LAST_DAY, day_of, put_clock, put_date, put_decimal, put_moment,
)
from chasqui._core.msgpack cimport (
    bin_header_size, put_array_header, put_bin_header, put_float, put_int, put_map_header, put_nil, put_str_header,
    str_header_size,
)


cdef enum:
    NUMBER_BYTES = 9            # the most that a number or a header takes
    INTEGER_CHARS = 20          # the most that a number of 64 bits takes as text

cdef dict KINDS = {"nothing": NOTHING, "bool": BOOL, "int8": INT8, "int16": INT16, "int32": INT32, "int64": INT64,
                   "float": FLOAT, "double": DOUBLE, "text": TEXT, "binary": BINARY, "date": DATE, "moment": MOMENT,
                   "local": LOCAL, "clock": CLOCK, "decimal": DECIMAL, "list": LIST, "map": MAP, "struct": STRUCT}
cdef dict WIDTHS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "float": 4, "double": 8, "date": 4, "moment": 8,
                    "local": 8, "clock": 8, "decimal": 16}
#: How many columns are inside one.
cdef dict INSIDE = {"list": 1, "map": 2}


cdef struct Source:
    int kind
    int scale                   # of decimals
    Py_ssize_t rows
    Py_ssize_t offset           # the first row, in the buffers
    bint has_bitmap, has_values, has_ends
    Py_buffer bitmap            # a bit per row: is it there?
    Py_buffer values
    Py_buffer ends              # of texts, lists and maps: int32
    const char* name            # as msgpack
    Py_ssize_t name_size
    Py_ssize_t count            # columns inside
    Source* inside


class Unkeepable(ValueError):
    """A value that no payload can hold; the text is what it is, in the column `column`."""

    def __init__(self, column, what):
        super().__init__(what)
        self.column = column


def pack_maps(Py_ssize_t rows, list columns not None):
    """Per row a msgpack map of all columns, as bytes.

    A column is `(name, kind, offset, bitmap, values, ends)`: three buffers as Arrow has them, None where it has
    none. A seventh element is the scale of a decimal, or `(rows, columns)` of what is inside: the element of a list,
    key and value of a map, the fields of a struct, which begin at its first row.
    """
    return pack_values(rows, ("", "struct", 0, None, None, None, (rows, columns)))


def pack_values(Py_ssize_t rows, tuple column not None):
    """Per row the msgpack of a column's value, as bytes."""
    cdef CommandBuffer buffer = CommandBuffer()
    cdef list names = [], answer = []
    cdef Py_ssize_t row, place = -1
    cdef Source* source = <Source*>PyMem_Calloc(1, sizeof(Source))
    if source == NULL:
        raise MemoryError("no memory for the columns")
    try:
        _open(source, rows, column, names)
        for row in range(rows):
            buffer._len = 0
            _put(buffer, source, row, &place)
            answer.append(PyBytes_FromStringAndSize(buffer._data, buffer._len))
    except OverflowError as error:              # as `_put_form` raises it
        raise Unkeepable(column[6][1][place][0] if place >= 0 else column[0], str(error)) from None
    finally:
        _close(source)
        PyMem_Free(source)
    return answer


# ── Taking hold of buffers ───────────────────────────────────────────────────────────────────────


cdef int _open(Source* source, Py_ssize_t rows, tuple column, list names) except -1:
    """Take hold of a column's buffers, all of which must be long enough, and of those inside it.

    `names` keeps alive what the sources point to.
    """
    cdef Py_ssize_t last
    cdef bytes packed
    name, kind, offset, bitmap, values, ends, *more = column
    last = <Py_ssize_t>offset + rows
    if offset < 0 or rows < 0:
        raise ValueError("rows and offset must not be negative")
    source.kind = KINDS[kind]
    source.rows = rows
    source.offset = offset
    packed = packed_text(name)
    names.append(packed)
    source.name = PyBytes_AS_STRING(packed)
    source.name_size = PyBytes_GET_SIZE(packed)
    if bitmap is not None:
        PyObject_GetBuffer(bitmap, &source.bitmap, PyBUF_SIMPLE)
        source.has_bitmap = True
        _check(&source.bitmap, (last + 7) // 8)
    if source.kind == TEXT or source.kind == BINARY or source.kind == LIST or source.kind == MAP:
        if rows:
            PyObject_GetBuffer(ends, &source.ends, PyBUF_SIMPLE)
            source.has_ends = True
            _check(&source.ends, 4 * (last + 1))
    if values is not None:
        PyObject_GetBuffer(values, &source.values, PyBUF_SIMPLE)
        source.has_values = True
    if source.kind == LIST or source.kind == MAP or source.kind == STRUCT:
        return _open_inside(source, kind, more[0], names)
    if source.kind == DECIMAL:
        source.scale = more[0]
        if not 0 <= source.scale <= 38:
            raise ValueError(f"a decimal of scale {source.scale}")
    if rows and (source.kind == BOOL or kind in WIDTHS):
        if not source.has_values:
            raise ValueError("a column of numbers needs its values")
        _check(&source.values, (last + 7) // 8 if source.kind == BOOL else last * <Py_ssize_t>WIDTHS[kind])
    return 0


cdef int _open_inside(Source* source, str kind, tuple inside, list names) except -1:
    cdef Py_ssize_t rows = inside[0], i
    cdef list columns = inside[1]
    if len(columns) != INSIDE.get(kind, len(columns)):
        raise ValueError(f"{len(columns)} columns in a {kind}")
    if source.kind == STRUCT and rows != source.rows:
        raise ValueError(f"a struct of {rows} rows where {source.rows} were promised")
    source.inside = <Source*>PyMem_Calloc(len(columns) + 1, sizeof(Source))
    if source.inside == NULL:
        raise MemoryError("no memory for the columns")
    source.count = len(columns)
    for i in range(source.count):
        _open(&source.inside[i], rows, columns[i], names)
    return 0


cdef int _check(Py_buffer* buffer, Py_ssize_t size) except -1:
    if buffer.len < size:
        raise ValueError(f"a buffer of {buffer.len} bytes where {size} were promised")
    return 0


cdef void _close(Source* source) noexcept:
    cdef Py_ssize_t i
    for i in range(source.count):
        _close(&source.inside[i])
    PyMem_Free(source.inside)
    if source.has_bitmap:
        PyBuffer_Release(&source.bitmap)
    if source.has_values:
        PyBuffer_Release(&source.values)
    if source.has_ends:
        PyBuffer_Release(&source.ends)


cdef bytes packed_text(str text):
    cdef bytes data = text.encode()
    cdef char out[5]
    return PyBytes_FromStringAndSize(out, put_str_header(out, PyBytes_GET_SIZE(data)) - out) + data


# ── Values ───────────────────────────────────────────────────────────────────────────────────────


cdef int _put(CommandBuffer buffer, Source* source, Py_ssize_t row, Py_ssize_t* place=NULL) except -1:
    """One value. Of a struct, `place` is the column inside that it is at."""
    cdef Py_ssize_t at = source.offset + row
    cdef int32_t bounds[2]
    cdef char* out
    if source.has_bitmap and not (<const uint8_t*>source.bitmap.buf)[at >> 3] >> (at & 7) & 1:
        return buffer.advance(put_nil(buffer.reserve(1)))
    if source.kind <= DOUBLE:
        out = buffer.reserve(NUMBER_BYTES)
        if source.kind >= FLOAT:
            return buffer.advance(put_float(out, _real(source, at)))
        if source.kind >= INT8:
            return buffer.advance(put_int(out, _integer(source, at)))
        if source.kind == NOTHING:
            return buffer.advance(put_nil(out))
        out[0] = <char>(0xC2 | ((<const uint8_t*>source.values.buf)[at >> 3] >> (at & 7) & 1))
        return buffer.advance(out + 1)
    if source.kind <= BINARY:
        memcpy(bounds, <const char*>source.ends.buf + 4 * at, 8)
        return _put_run(buffer, source, bounds[0], bounds[1])
    if source.kind <= DECIMAL:
        return _put_form(buffer, source, at)
    if source.kind == STRUCT:
        return _put_struct(buffer, source, row, place)
    memcpy(bounds, <const char*>source.ends.buf + 4 * at, 8)
    return _put_many(buffer, source, bounds[0], bounds[1])


cdef inline int64_t _integer(Source* source, Py_ssize_t at) noexcept:
    cdef const char* values = <const char*>source.values.buf
    cdef int16_t short
    cdef int32_t whole
    cdef int64_t number
    if source.kind == INT64 or source.kind >= MOMENT:
        memcpy(&number, values + 8 * at, 8)
        return number
    if source.kind == INT16:
        memcpy(&short, values + 2 * at, 2)
        return short
    if source.kind == INT8:
        return (<const int8_t*>values)[at]
    memcpy(&whole, values + 4 * at, 4)          # INT32 and DATE
    return whole


cdef inline double _real(Source* source, Py_ssize_t at) noexcept:
    cdef const char* values = <const char*>source.values.buf
    cdef float small
    cdef double real
    if source.kind == FLOAT:
        memcpy(&small, values + 4 * at, 4)
        return small
    memcpy(&real, values + 8 * at, 8)
    return real


cdef int _put_struct(CommandBuffer buffer, Source* source, Py_ssize_t row, Py_ssize_t* place) except -1:
    cdef Source* field
    cdef Py_ssize_t i
    cdef char* out
    buffer.advance(put_map_header(buffer.reserve(NUMBER_BYTES), source.count))
    for i in range(source.count):
        if place != NULL:
            place[0] = i
        field = &source.inside[i]
        out = buffer.reserve(field.name_size)
        memcpy(out, field.name, field.name_size)
        buffer.advance(out + field.name_size)
        _put(buffer, field, row)
    return 0


cdef int _put_many(CommandBuffer buffer, Source* source, Py_ssize_t start, Py_ssize_t end) except -1:
    """A list or a map."""
    cdef Py_ssize_t i
    if not 0 <= start <= end or end > source.inside.rows:
        raise ValueError("a column of lists whose ends do not rise")
    if source.kind == LIST:
        buffer.advance(put_array_header(buffer.reserve(NUMBER_BYTES), end - start))
        for i in range(start, end):
            _put(buffer, source.inside, i)
        return 0
    buffer.advance(put_map_header(buffer.reserve(NUMBER_BYTES), end - start))
    for i in range(start, end):
        _put_key(buffer, source.inside, i)
        _put(buffer, source.inside + 1, i)
    return 0


cdef int _put_key(CommandBuffer buffer, Source* source, Py_ssize_t row) except -1:
    """The key of a map: text or bytes, so that a number is written as text."""
    cdef int64_t number
    cdef uint64_t size
    cdef char* out
    if not INT8 <= source.kind <= INT64:
        return _put(buffer, source, row)
    number = _integer(source, source.offset + row)
    size = -<uint64_t>number if number < 0 else <uint64_t>number
    out = put_str_header(buffer.reserve(1 + INTEGER_CHARS), decimal_width(size) + (number < 0))
    if number < 0:
        out[0] = c'-'
        out += 1
    return buffer.advance(put_number(out, size))


cdef int _put_run(CommandBuffer buffer, Source* source, Py_ssize_t start, Py_ssize_t end) except -1:
    """A text or some bytes."""
    cdef Py_ssize_t size = end - start
    cdef char* out
    if not 0 <= start <= end or end > (source.values.len if source.has_values else 0):
        raise ValueError("a column of texts whose ends do not rise")
    if source.kind == TEXT:
        out = put_str_header(buffer.reserve(str_header_size(size) + size), size)
    else:
        out = put_bin_header(buffer.reserve(bin_header_size(size) + size), size)
    if size:
        memcpy(out, <const char*>source.values.buf + start, size)
    return buffer.advance(out + size)


cdef int _put_form(CommandBuffer buffer, Source* source, Py_ssize_t at) except -1:
    """A date, a time or a decimal, as a short text."""
    cdef char* head = buffer.reserve(2 + DECIMAL_CHARS)
    cdef char text[DECIMAL_CHARS]
    cdef char* end
    cdef int64_t number
    if source.kind == DECIMAL:
        end = put_decimal(text, <const char*>source.values.buf + 16 * at, source.scale)
    else:
        number = _integer(source, at)
        if source.kind == CLOCK:
            number //= 1000
            if not 0 <= number < <int64_t>DAY_S * 1_000_000:
                raise OverflowError("a time beyond 24 hours")
            end = put_clock(text, number)
        elif not FIRST_DAY <= (number if source.kind == DATE else day_of(number)) <= LAST_DAY:
            raise OverflowError("a date outside of the years 1 to 9999")
        elif source.kind == DATE:
            end = put_date(text, number)
        else:
            end = put_moment(text, number, source.kind == MOMENT)
    head = put_str_header(head, end - text)
    memcpy(head, text, end - text)
    return buffer.advance(head + (end - text))
