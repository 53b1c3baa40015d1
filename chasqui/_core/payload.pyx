"""User data to msgpack and back, for the plain types that nearly all of it is made of.

Whoever finds a value here that is not plain takes it to the msgpack library: so its rules, and what is said of a
value that is refused, have one home outside.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_CheckExact
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_CheckExact, PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from chasqui._core.buffer cimport CommandBuffer
from chasqui._core.envelope cimport MAX_DEPTH, fault_text
from chasqui._core.msgpack cimport (
    Fault, big_endian, put_array_header, put_bin_header, put_float, put_int, put_map_header, put_nil, put_str_header,
    skip_value,
)
from chasqui._core.envelope import EnvelopeError


cdef extern from "Python.h":
    bint PyLong_CheckExact(object number)
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    bint PyUnicode_IS_COMPACT_ASCII(object text)

cdef enum:
    WIDEST = 9                  # the most that a number or a header takes
    LARGE = 1 << 16             # a buffer that has grown beyond it is not kept
    LONGEST_NAME = 64           # a name of at most so many ASCII characters needs no further look


# Buffers that nobody uses right now. One that is being written is not among them, so another thread gets its own.
cdef list idle = []


# ── Packing ──────────────────────────────────────────────────────────────────────────────────────


def pack(value, Py_ssize_t max_bytes):
    """The value as msgpack; None unless it is plain, and of at most `max_bytes`.

    Plain are None, bool, float, str and bytes, an int of 64 bits with its sign, and lists and dicts of those with
    keys that are str or bytes: by their exact types, 128 levels deep.
    """
    cdef CommandBuffer out
    try:
        out = idle.pop()
    except IndexError:
        out = CommandBuffer()
    out._len = 0
    cdef bint is_plain = put_value(out, value, 0) and out._len <= max_bytes
    cdef object packed = PyBytes_FromStringAndSize(out._data, out._len) if is_plain else None
    if out._cap <= LARGE:
        idle.append(out)
    return packed


@cython.boundscheck(True)          # a key's __eq__ is anybody's code, and may change the lists
def pack_rows(list entries not None, Py_ssize_t start, Py_ssize_t max_bytes, list payloads not None, list names not None,
              list data not None, list special not None):
    """Pack `data` of the entries from `start` on, as long as they are plain; the index of the first that is not.

    A plain entry is a dict with a short ASCII `name` and plain `data`. Its columns are appended to the lists, and
    the index of one that has more than these two to `special`.
    """
    cdef CommandBuffer out = CommandBuffer()
    cdef Py_ssize_t i = start
    while i < len(entries):
        entry = entries[i]
        if not PyDict_CheckExact(entry):
            break
        name, value = (<dict>entry).get("name"), (<dict>entry).get("data", entry)
        if value is entry or not PyUnicode_CheckExact(name):
            break
        if not PyUnicode_IS_COMPACT_ASCII(name) or len(<str>name) > LONGEST_NAME:
            break
        out._len = 0
        if not put_value(out, value, 0) or out._len > max_bytes:
            break
        payloads.append(PyBytes_FromStringAndSize(out._data, out._len))
        names.append(name)
        data.append(value)
        if len(<dict>entry) != 2:
            special.append(i)
        i += 1
    return i


cdef bint put_value(CommandBuffer out, object value, int depth) except -1:
    """Append the value; False, with some of it written, if it is not plain."""
    cdef const char* text
    cdef Py_ssize_t size
    cdef long long number
    cdef int overflow
    if PyUnicode_CheckExact(value):
        try:
            text = PyUnicode_AsUTF8AndSize(value, &size)
        except UnicodeEncodeError:
            return False
        return put_run(out, put_str_header(out.reserve(WIDEST + size), size), text, size)
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        out.advance(put_int(out.reserve(WIDEST), number))
        return True
    if PyDict_CheckExact(value):
        if depth == MAX_DEPTH:
            return False
        out.advance(put_map_header(out.reserve(WIDEST), len(<dict>value)))
        for key, item in (<dict>value).items():
            if not PyUnicode_CheckExact(key) and not PyBytes_CheckExact(key):
                return False
            if not put_value(out, key, 0) or not put_value(out, item, depth + 1):
                return False
        return True
    if PyList_CheckExact(value):
        if depth == MAX_DEPTH:
            return False
        size = len(<list>value)
        out.advance(put_array_header(out.reserve(WIDEST), size))
        for item in <list>value:
            if not put_value(out, item, depth + 1):
                return False
        return len(<list>value) == size         # another thread may have changed it
    if value is None:
        out.advance(put_nil(out.reserve(1)))
        return True
    if value is True or value is False:
        text = b"\xc3" if value is True else b"\xc2"
        return put_run(out, out.reserve(1), text, 1)
    if PyFloat_CheckExact(value):
        out.advance(put_float(out.reserve(WIDEST), PyFloat_AS_DOUBLE(value)))
        return True
    if PyBytes_CheckExact(value):
        size = PyBytes_GET_SIZE(value)
        return put_run(out, put_bin_header(out.reserve(WIDEST + size), size), PyBytes_AS_STRING(value), size)
    return False


cdef bint put_run(CommandBuffer out, char* at, const char* data, Py_ssize_t size) except -1:
    memcpy(at, data, size)
    out.advance(at + size)
    return size <= <Py_ssize_t>0xFFFFFFFF


# ── Unpacking ────────────────────────────────────────────────────────────────────────────────────


def unpack(bytes data not None):
    """The value in msgpack bytes; ValueError unless they are exactly one, of types that `pack` takes.

    Lengths, nesting and types are checked in a pass that allocates nothing, before anything is built.
    """
    return unpack_run(<const unsigned char*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


cdef object unpack_run(const unsigned char* data, Py_ssize_t size):
    cdef Fault fault
    cdef Py_ssize_t at
    fault.what = NULL
    at = skip_value(data, 0, size, MAX_DEPTH, False, &fault)
    if at >= 0 and at != size:
        fault.what = "bytes after the value"
        fault.at = at
    if fault.what != NULL:
        raise EnvelopeError(fault_text(&fault))
    at = 0
    return value_at(data, &at)


cdef object value_at(const unsigned char* data, Py_ssize_t* at):
    """Build the value at `at`, which was found whole, and move behind it."""
    cdef unsigned char kind = data[at[0]]
    cdef uint64_t number
    cdef double real
    cdef float short_real
    cdef unsigned int bits
    cdef int width
    at[0] += 1
    if kind < 0x80:
        return <int>kind
    if kind >= 0xE0:
        return <int><int8_t>kind
    if kind & 0xE0 == 0xA0:
        return text_at(data, at, kind & 0x1F)
    if kind & 0xF0 == 0x80:
        return dict_at(data, at, kind & 0x0F)
    if kind & 0xF0 == 0x90:
        return list_at(data, at, kind & 0x0F)
    if kind == 0xC0:
        return None
    if kind <= 0xC3:
        return kind == 0xC3
    if kind == 0xCA:
        bits = <unsigned int>take(data, at, 4)
        memcpy(&short_real, &bits, 4)
        return <double>short_real
    if kind == 0xCB:
        number = take(data, at, 8)
        memcpy(&real, &number, 8)
        return real
    if kind <= 0xC6:
        number = take(data, at, 1 << (kind - 0xC4))
        at[0] += <Py_ssize_t>number
        return PyBytes_FromStringAndSize(<const char*>data + at[0] - <Py_ssize_t>number, <Py_ssize_t>number)
    if kind <= 0xCF:
        return take(data, at, 1 << (kind - 0xCC))
    if kind <= 0xD3:
        width = 1 << (kind - 0xD0)
        number = take(data, at, width)
        if width == 1:
            return <int><int8_t>number
        if width == 2:
            return <int><int16_t>number
        return <long long><int32_t>number if width == 4 else <long long>number
    if kind <= 0xDB:
        return text_at(data, at, <Py_ssize_t>take(data, at, 1 << (kind - 0xD9)))
    if kind <= 0xDD:
        return list_at(data, at, <Py_ssize_t>take(data, at, 2 if kind == 0xDC else 4))
    return dict_at(data, at, <Py_ssize_t>take(data, at, 2 if kind == 0xDE else 4))


cdef uint64_t take(const unsigned char* data, Py_ssize_t* at, int width) noexcept nogil:
    at[0] += width
    return big_endian(data + at[0] - width, width)


cdef str text_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t size):
    at[0] += size
    return PyUnicode_DecodeUTF8(<const char*>data + at[0] - size, size, NULL)


cdef list list_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t count):
    cdef list found = PyList_New(count)
    cdef Py_ssize_t i
    for i in range(count):
        item = value_at(data, at)
        Py_INCREF(item)                         # the list takes it over
        PyList_SET_ITEM(found, i, item)
    return found


cdef dict dict_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t count):
    cdef dict found = {}
    for _ in range(count):
        key = value_at(data, at)
        if not PyUnicode_CheckExact(key) and not PyBytes_CheckExact(key):
            raise ValueError(f"{type(key).__name__} is not allowed for map key")
        found[key] = value_at(data, at)
    return found
