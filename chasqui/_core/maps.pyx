"""Columns in Arrow's layout into msgpack maps, one per row: no Python object per value."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from chasqui._core.buffer cimport CommandBuffer
from chasqui._core.msgpack cimport (
    bin_header_size, put_bin_header, put_float, put_int, put_map_header, put_nil, put_str_header, str_header_size,
)


cdef enum Kind:
    BOOL
    INT8
    INT16
    INT32
    INT64
    FLOAT
    DOUBLE
    TEXT
    BINARY
    PACKED

cdef enum:
    NUMBER_BYTES = 9            # the most that a number takes

cdef dict KINDS = {"bool": BOOL, "int8": INT8, "int16": INT16, "int32": INT32, "int64": INT64, "float": FLOAT,
                   "double": DOUBLE, "text": TEXT, "binary": BINARY, "packed": PACKED}
cdef dict WIDTHS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "float": 4, "double": 8}


cdef struct Source:
    int kind
    Py_ssize_t offset           # the first row, in the buffers
    bint has_bitmap, has_values, has_ends
    Py_buffer bitmap            # a bit per row: is it there?
    Py_buffer values
    Py_buffer ends              # of texts: int32


def pack_maps(Py_ssize_t rows, list columns not None):
    """Per row a msgpack map of all columns, as bytes.

    A column is `(name, kind, offset, bitmap, values, ends)`: three buffers as Arrow has them, None where
    it has none. Of kind `packed` it is a list of values, one per row, that are msgpack already.
    """
    cdef Py_ssize_t count = len(columns), row, i
    cdef CommandBuffer buffer = CommandBuffer()
    cdef list names = [], lists = [], answer = []
    cdef bytes name
    cdef char* out
    cdef Source* sources = <Source*>PyMem_Calloc(count + 1, sizeof(Source))
    if sources == NULL:
        raise MemoryError("no memory for the columns")
    try:
        for i in range(count):
            text, kind, offset, bitmap, values, ends = columns[i]
            names.append(packed_text(text))
            lists.append(_open(&sources[i], rows, kind, offset, bitmap, values, ends))
        header = packed_header(count)
        for row in range(rows):
            buffer._len = 0
            out = buffer.reserve(PyBytes_GET_SIZE(header))
            memcpy(out, PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header))
            buffer.advance(out + PyBytes_GET_SIZE(header))
            for i in range(count):
                name = <bytes>names[i]
                out = buffer.reserve(PyBytes_GET_SIZE(name))
                memcpy(out, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
                buffer.advance(out + PyBytes_GET_SIZE(name))
                _put(buffer, &sources[i], row, <list>lists[i])
            answer.append(PyBytes_FromStringAndSize(buffer._data, buffer._len))
    finally:
        for i in range(count):
            _close(&sources[i])
        PyMem_Free(sources)
    return answer


cdef bytes packed_header(Py_ssize_t count):
    cdef char out[5]
    return PyBytes_FromStringAndSize(out, put_map_header(out, count) - out)


cdef bytes packed_text(str text):
    cdef bytes data = text.encode()
    cdef char out[5]
    return PyBytes_FromStringAndSize(out, put_str_header(out, PyBytes_GET_SIZE(data)) - out) + data


cdef list _open(Source* source, Py_ssize_t rows, str kind, Py_ssize_t offset, bitmap, values, ends):
    """Take hold of a column's buffers, all of which must be long enough; its list if it is packed."""
    cdef Py_ssize_t last = offset + rows
    source.kind = KINDS[kind]
    source.offset = offset
    if offset < 0 or rows < 0:
        raise ValueError("rows and offset must not be negative")
    if source.kind == PACKED:
        if len(<list?>values) != rows:
            raise ValueError(f"{len(values)} packed values for {rows} rows")
        return values
    if bitmap is not None:
        PyObject_GetBuffer(bitmap, &source.bitmap, PyBUF_SIMPLE)
        source.has_bitmap = True
        _check(&source.bitmap, (last + 7) // 8)
    if values is not None:
        PyObject_GetBuffer(values, &source.values, PyBUF_SIMPLE)
        source.has_values = True
    elif rows and source.kind != TEXT and source.kind != BINARY:
        raise ValueError("a column of numbers needs its values")
    if source.kind == TEXT or source.kind == BINARY:
        if rows:
            PyObject_GetBuffer(ends, &source.ends, PyBUF_SIMPLE)
            source.has_ends = True
            _check(&source.ends, 4 * (last + 1))
    elif rows:
        _check(&source.values, (last + 7) // 8 if source.kind == BOOL else last * <Py_ssize_t>WIDTHS[kind])
    return None


cdef int _check(Py_buffer* buffer, Py_ssize_t size) except -1:
    if buffer.len < size:
        raise ValueError(f"a buffer of {buffer.len} bytes where {size} were promised")
    return 0


cdef void _close(Source* source) noexcept:
    if source.has_bitmap:
        PyBuffer_Release(&source.bitmap)
    if source.has_values:
        PyBuffer_Release(&source.values)
    if source.has_ends:
        PyBuffer_Release(&source.ends)


cdef int _put(CommandBuffer buffer, Source* source, Py_ssize_t row, list packed) except -1:
    """One value."""
    cdef Py_ssize_t at = source.offset + row
    cdef const char* values = <const char*>source.values.buf
    cdef int32_t bounds[2]
    cdef int16_t short
    cdef int32_t whole
    cdef int64_t number
    cdef float small
    cdef double real
    cdef bytes value
    cdef char* out
    if source.kind == PACKED:
        value = <bytes?>packed[row]
        out = buffer.reserve(PyBytes_GET_SIZE(value))
        memcpy(out, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
        return buffer.advance(out + PyBytes_GET_SIZE(value))
    if source.has_bitmap and not (<const uint8_t*>source.bitmap.buf)[at >> 3] >> (at & 7) & 1:
        return buffer.advance(put_nil(buffer.reserve(1)))
    if source.kind == TEXT or source.kind == BINARY:
        memcpy(bounds, <const char*>source.ends.buf + 4 * at, 8)
        return _put_run(buffer, source, bounds[0], bounds[1])
    out = buffer.reserve(NUMBER_BYTES)
    if source.kind == INT64:
        memcpy(&number, values + 8 * at, 8)
    elif source.kind == INT32:
        memcpy(&whole, values + 4 * at, 4)
        number = whole
    elif source.kind == INT16:
        memcpy(&short, values + 2 * at, 2)
        number = short
    elif source.kind == INT8:
        number = (<const int8_t*>values)[at]
    elif source.kind == BOOL:
        out[0] = <char>(0xC2 | ((<const uint8_t*>values)[at >> 3] >> (at & 7) & 1))
        return buffer.advance(out + 1)
    else:
        if source.kind == FLOAT:
            memcpy(&small, values + 4 * at, 4)
            real = small
        else:
            memcpy(&real, values + 8 * at, 8)
        return buffer.advance(put_float(out, real))
    return buffer.advance(put_int(out, number))


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
