"""User data to msgpack and back: exactly the types that come back as they went in.

The caller learns what is refused and where inside the value; it chooses the words.
"""

cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.dict cimport PyDict_Check, PyDict_CheckExact, PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_Check, PyFloat_CheckExact
from cpython.list cimport PyList_Check, PyList_CheckExact, PyList_New, PyList_SET_ITEM
from cpython.ref cimport PyObject, Py_INCREF
from cpython.unicode cimport PyUnicode_Check, PyUnicode_CheckExact, PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from chasqui._core.arguments cimport BoundCall
from chasqui._core.buffer cimport CommandBuffer
from chasqui._core.envelope cimport MAX_DEPTH, fault_text
from chasqui._core.msgpack cimport (
    Fault, big_endian, bin_header_size, put_array_header, put_bin_header, put_float, put_int, put_map_header, put_nil,
    put_str_header, put_uint, skip_value, str_header_size,
)
from chasqui._core.envelope import EnvelopeError


cdef extern from "Python.h":
    bint PyLong_Check(object number)
    bint PyLong_CheckExact(object number)
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    unsigned long long PyLong_AsUnsignedLongLong(object number) except? -1
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    void* PyUnicode_1BYTE_DATA(object text)

cdef enum:
    WIDEST = 9                  # the most that a number or a header takes
    LARGE = 1 << 16             # a buffer that has grown beyond it is not kept
    SHORT_TEXT = 32             # a text of fewer bytes has a header of one
    LONGEST_NAME = 64           # a name of at most so many ASCII characters needs no further look


# Packers that nobody uses right now. One that is at work is not among them, so another thread gets its own.
cdef list idle = []


# ── Packing ──────────────────────────────────────────────────────────────────────────────────────


class Refused(ValueError):
    """A value that was not packed: `why`, the keys and indexes on the way to it, and itself.

    `why` is "type", "depth", "int" (beyond 64 bits), "surrogate", "key", "key surrogate", "changed" (by another
    thread, meanwhile) or "size": then the value would have come to `size` bytes with this one, or to more.
    """

    def __init__(self, why, path, value, size):
        super().__init__(why)
        self.why, self.path, self.value, self.size = why, path, value, size


def pack(value, Py_ssize_t max_bytes):
    """The value as msgpack of at most `max_bytes`; raises Refused.

    Taken are None, bool, float, str and bytes, an int of 64 bits, bytearray and memoryview, and lists and dicts of
    those with keys that are str or bytes, 128 levels deep; subclasses, as what they are made of.
    """
    cdef Packer packer
    try:
        packer = idle.pop()
    except IndexError:
        packer = Packer()
    packer.begin(max_bytes)
    cdef bint is_packed = packer.put(packer.out, value, 0)
    cdef CommandBuffer out = packer.out
    cdef object packed = PyBytes_FromStringAndSize(out._data, out._len) if is_packed else packer.refused()
    if out._cap <= LARGE:
        idle.append(packer)
    if not is_packed:
        raise packed
    return packed


@cython.boundscheck(True)          # a key's __eq__ is anybody's code, and may change the lists
def pack_rows(list entries not None, Py_ssize_t start, Py_ssize_t max_bytes, list payloads not None, list names not None,
              list data not None, list special not None):
    """Pack `data` of the entries from `start` on, as long as they are plain; the index of the first that is not.

    A plain entry is a dict with a short ASCII `name` and `data` that `pack` takes. Its columns are appended to the
    lists, and the index of one that has more than these two to `special`.
    """
    cdef Packer packer = Packer()
    cdef CommandBuffer out = packer.out
    cdef Py_ssize_t i = start, at
    cdef PyObject* first
    cdef PyObject* second
    cdef PyObject* name_at
    cdef PyObject* data_at
    while i < len(entries):
        entry = entries[i]
        if not PyDict_CheckExact(entry):
            break
        at = 0
        if (
            PyDict_Next(entry, &at, &first, &name_at) and <object>first is "name"
            and PyDict_Next(entry, &at, &second, &data_at) and <object>second is "data"
        ):                                      # as most write it: nothing is looked up
            name, value = <object>name_at, <object>data_at
        else:
            name, value = (<dict>entry).get("name"), (<dict>entry).get("data", entry)
        if value is entry or not PyUnicode_CheckExact(name):
            break
        if not PyUnicode_IS_COMPACT_ASCII(name) or len(<str>name) > LONGEST_NAME:
            break
        packer.begin(max_bytes)
        if not packer.put(out, value, 0):
            break
        payloads.append(PyBytes_FromStringAndSize(out._data, out._len))
        names.append(name)
        data.append(value)
        if len(<dict>entry) != 2:
            special.append(i)
        i += 1
    return i


def pack_calls(list calls not None, type kind not None, task, Py_ssize_t max_bytes, list payloads not None, list data not None):
    """Pack the data of calls of one task, as long as they are that and plain; the index of the first that is not.

    `kind` is the exact type of a call, which must be a BoundCall.
    """
    cdef Packer packer = Packer()
    cdef CommandBuffer out = packer.out
    cdef Py_ssize_t i = 0
    if not issubclass(kind, BoundCall):
        raise TypeError(f"{kind.__name__} must be a BoundCall")
    while i < len(calls):
        call = calls[i]
        if type(call) is not kind or (<BoundCall>call).task is not task:
            break
        value = (<BoundCall>call).data
        packer.begin(max_bytes)
        if not packer.put(out, value, 0):
            break
        payloads.append(PyBytes_FromStringAndSize(out._data, out._len))
        data.append(value)
        i += 1
    return i


@cython.final
cdef class Packer:
    """One value on its way into msgpack, and what stands in its way."""

    cdef CommandBuffer out
    cdef Py_ssize_t max_bytes
    cdef str why                # None while all is well
    cdef object culprit         # what is refused
    cdef list path              # the way to it, innermost first
    cdef Py_ssize_t size        # what it would come to, if that is why

    def __cinit__(self):
        self.out = CommandBuffer()

    cdef int begin(self, Py_ssize_t max_bytes) except -1:
        """Get ready for a new value."""
        self.out._len = 0
        self.max_bytes = min(max_bytes, <Py_ssize_t>0xFFFFFFFF)
        return 0

    cdef object refused(self):
        """What `put` came upon; it is forgotten here."""
        error = Refused(self.why, self.path[::-1], self.culprit, self.size)
        self.why = self.culprit = self.path = None
        return error

    cdef bint put(self, CommandBuffer out, object value, int depth) except -1:
        """Append the value; False, with some of it written, if it is refused."""
        cdef Py_ssize_t size
        cdef long long number
        cdef int overflow
        if PyUnicode_CheckExact(value):
            return self.put_text(out, value)
        if PyLong_CheckExact(value):
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow:
                return self.put_long(out, value)
            out.advance(put_int(out.reserve(WIDEST), number))
            return self.fits(out, value)
        if PyDict_CheckExact(value):
            return self.put_dict(out, value, depth)
        if PyList_CheckExact(value):
            if depth == MAX_DEPTH:
                return self.refuse("depth", value)
            size = len(<list>value)
            out.advance(put_array_header(out.reserve(WIDEST), size))
            number = 0
            for item in <list>value:
                if not self.put(out, item, depth + 1):
                    return self.step_out(number)
                number += 1
            if number != size:
                return self.refuse("changed", value)
            return self.fits(out, value)
        if value is None:
            out.advance(put_nil(out.reserve(1)))
            return self.fits(out, value)
        if value is True or value is False:
            out.reserve(1)[0] = <char>(0xC3 if value is True else 0xC2)
            out._len += 1
            return self.fits(out, value)
        if PyFloat_CheckExact(value):
            out.advance(put_float(out.reserve(WIDEST), PyFloat_AS_DOUBLE(value)))
            return self.fits(out, value)
        if PyBytes_CheckExact(value):
            return self.put_bytes(out, value)
        return self.put_other(out, value, depth)

    cdef bint put_other(self, CommandBuffer out, object value, int depth) except -1:
        """What is of no plain type itself but may be made of one. Of a subclass, what it overrides does not count,
        except how a list or a dict is gone through."""
        cdef Py_ssize_t size
        if PyUnicode_Check(value):
            return self.put_text(out, value)
        if PyLong_Check(value):
            return self.put_long(out, value)
        if PyFloat_Check(value):
            return self.put(out, PyFloat_AS_DOUBLE(value), depth)
        if PyDict_Check(value) or PyList_Check(value):
            try:
                plain = dict(value) if PyDict_Check(value) else list(value)
            except RuntimeError:                # it is gone through by code of its own
                return self.refuse("changed", value)
            return self.put(out, plain, depth)
        if PyBytes_Check(value):
            return self.put_bytes(out, value)
        if isinstance(value, (bytearray, memoryview)):
            try:
                size = memoryview(value).nbytes
                if size > self.max_bytes:       # before it is copied
                    return self.outgrow(size, value)
                return self.put_bytes(out, bytes(value))
            except ValueError:                  # a view that was released
                pass
        return self.refuse("type", value)

    cdef bint put_dict(self, CommandBuffer out, dict value, int depth) except -1:
        if depth == MAX_DEPTH:
            return self.refuse("depth", value)
        cdef Py_ssize_t left = len(value), at = 0
        cdef PyObject* next_key
        cdef PyObject* next_item
        out.advance(put_map_header(out.reserve(WIDEST), left))
        while PyDict_Next(value, &at, &next_key, &next_item):
            key, item = <object>next_key, <object>next_item
            left -= 1
            if PyUnicode_Check(key):
                if not self.put_text(out, key):
                    if self.why == "surrogate":
                        self.why = "key surrogate"
                    return False
            elif not PyBytes_Check(key):
                return self.refuse("key", key)
            elif not self.put_bytes(out, key):
                return False
            if not self.put(out, item, depth + 1):
                return self.step_out(key)
        if left:                                # what it is made of ran code, and maybe another thread
            return self.refuse("changed", value)
        return self.fits(out, value)

    cdef inline bint put_text(self, CommandBuffer out, object value) except -1:
        cdef Py_ssize_t size
        cdef char* at
        if PyUnicode_IS_COMPACT_ASCII(value):   # most are, and short
            size = len(<str>value)
            if size < SHORT_TEXT and size < self.max_bytes - out._len:
                at = out.reserve(SHORT_TEXT)
                at[0] = <char>(0xA0 | size)
                memcpy(at + 1, PyUnicode_1BYTE_DATA(value), size)
                out._len += size + 1
                return True
        return self.put_any_text(out, value)

    cdef bint put_any_text(self, CommandBuffer out, object value) except -1:
        cdef const char* text
        cdef Py_ssize_t size = len(<str>value)
        if size > self.max_bytes:               # before it is encoded
            return self.outgrow(size, value)
        if PyUnicode_IS_COMPACT_ASCII(value):   # is its own UTF-8
            text = <const char*>PyUnicode_1BYTE_DATA(value)
        else:
            try:
                text = PyUnicode_AsUTF8AndSize(value, &size)
            except UnicodeEncodeError:
                return self.refuse("surrogate", value)
        if size > self.max_bytes - out._len:
            return self.outgrow(str_header_size(size) + size, value)
        cdef char* at = put_str_header(out.reserve(WIDEST + size), size)
        memcpy(at, text, size)
        out.advance(at + size)
        return self.fits(out, value)

    cdef bint put_bytes(self, CommandBuffer out, object value) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(value)
        if size > self.max_bytes - out._len:
            return self.outgrow(bin_header_size(size) + size, value)
        cdef char* at = put_bin_header(out.reserve(WIDEST + size), size)
        memcpy(at, PyBytes_AS_STRING(value), size)
        out.advance(at + size)
        return self.fits(out, value)

    cdef bint put_long(self, CommandBuffer out, object value) except -1:
        """An int of any size or kind."""
        cdef int overflow
        cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
        cdef char* at = out.reserve(WIDEST)
        if overflow == 0:
            out.advance(put_int(at, number))
        elif overflow > 0 and int.bit_length(value) <= 64:
            out.advance(put_uint(at, PyLong_AsUnsignedLongLong(value)))
        else:
            return self.refuse("int", value)
        return self.fits(out, value)

    cdef inline bint fits(self, CommandBuffer out, object value) except -1:
        """Whether what is written so far may be; the value is its end."""
        if out._len <= self.max_bytes:
            return True
        return self.outgrow(0, value)

    cdef bint outgrow(self, Py_ssize_t more, object value) except -1:
        self.size = self.out._len + more
        return self.refuse("size", value)

    cdef bint refuse(self, str why, object value) except -1:
        self.why = why
        self.culprit = value
        self.path = []
        return False

    cdef bint step_out(self, object step) except -1:
        """One level up from what is refused."""
        self.path.append(step)
        return False


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
