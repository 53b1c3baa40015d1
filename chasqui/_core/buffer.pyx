"""RESP commands, written into one growing block of memory."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc


cdef extern from "Python.h":
    bint PyLong_CheckExact(object number)
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


@cython.final
cdef class CommandBuffer:
    """A growable run of RESP commands. Owned by one thread at a time. `bytes(buffer)` copies it."""

    def __cinit__(self):
        self._data = self._inline
        self._cap = INLINE_BYTES

    def __dealloc__(self):
        if self._data != self._inline:
            PyMem_RawFree(self._data)

    def __len__(self):
        return self._len

    def __bool__(self):
        return self._len > 0

    def __bytes__(self):
        return PyBytes_FromStringAndSize(self._data, self._len)

    @property
    def capacity(self):
        """Bytes that fit before the next allocation."""
        return self._cap

    def clear(self):
        """Forget what was written; the memory is kept for the next run."""
        self._len = 0
        self.commands = 0

    def command(self, *arguments):
        """Append one command. Arguments are bytes-like, str (UTF-8), int or float."""
        if not arguments:
            raise ValueError("a command needs at least its name")
        cdef Py_ssize_t start = self._len
        try:
            self.write_header(c'*', len(arguments))
            for argument in arguments:
                self.write_argument(argument)
        except BaseException:
            self._len = start
            raise
        self.commands += 1

    cdef char* grow(self, Py_ssize_t size) except NULL:
        """What `reserve` does when there is no room."""
        cdef Py_ssize_t wanted
        cdef char* grown
        if size > (<Py_ssize_t>1 << 62) - self._len:
            raise MemoryError("the CommandBuffer cannot grow that far")
        wanted = max(self._len + size, self._cap + (self._cap >> 1))
        if self._data == self._inline:
            grown = <char*>PyMem_RawMalloc(wanted)
            if grown != NULL:
                memcpy(grown, self._inline, self._len)
        else:
            grown = <char*>PyMem_RawRealloc(self._data, wanted)
        if grown == NULL:
            raise MemoryError("no memory for the CommandBuffer")
        self._data = grown
        self._cap = wanted
        return grown + self._len

    cdef int write_header(self, char kind, uint64_t number) except -1:
        """`*3` or `$12` with its line end."""
        return self.advance(put_header(self.reserve(HEADER_BYTES), kind, number))

    cdef int write_bulk(self, const char* data, Py_ssize_t size) except -1:
        """One argument from raw memory."""
        return self.advance(put_bulk(self.reserve(HEADER_BYTES + size + 2), data, size))

    cdef int write_number(self, uint64_t number) except -1:
        """One argument: a decimal."""
        cdef char digits[HEADER_BYTES]
        return self.write_bulk(digits, put_decimal(digits, number) - digits)

    cdef int write_argument(self, object argument) except -1:
        """One argument from a Python value; TypeError names a type that has no clear form."""
        cdef Py_buffer view
        cdef Py_ssize_t size
        cdef const char* text
        cdef long long number
        cdef int overflow
        if PyBytes_CheckExact(argument):
            return self.write_bulk(PyBytes_AS_STRING(argument), PyBytes_GET_SIZE(argument))
        if isinstance(argument, str):
            text = PyUnicode_AsUTF8AndSize(argument, &size)
            return self.write_bulk(text, size)
        if PyLong_CheckExact(argument):         # counts and times: no text in between
            number = PyLong_AsLongLongAndOverflow(argument, &overflow)
            if number >= 0 and not overflow:
                return self.write_number(number)
        if isinstance(argument, bool):
            raise TypeError("a command argument cannot be a bool; say 0 or 1")
        if isinstance(argument, (int, float)):
            argument = (int if isinstance(argument, int) else float).__repr__(argument).encode()
            return self.write_bulk(PyBytes_AS_STRING(argument), PyBytes_GET_SIZE(argument))
        if isinstance(argument, (bytes, bytearray, memoryview)):
            PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE)
            try:
                return self.write_bulk(<const char*>view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
        raise TypeError(f"a command argument must be bytes, str, int or float, not {type(argument).__name__}")


cdef char* put_header(char* out, char kind, uint64_t number) noexcept nogil:
    out[0] = kind
    out = put_decimal(out + 1, number)
    out[0] = c'\r'
    out[1] = c'\n'
    return out + 2


cdef char* put_bulk(char* out, const char* data, Py_ssize_t size) noexcept nogil:
    out = put_header(out, c'$', size)
    if size:                    # an empty view may have no address at all
        memcpy(out, data, size)
        out += size
    out[0] = c'\r'
    out[1] = c'\n'
    return out + 2


cdef char* put_decimal(char* out, uint64_t number) noexcept nogil:
    cdef char* end = out + decimal_width(number)
    cdef char* at = end
    while True:
        at -= 1
        at[0] = <char>(c'0' + number % 10)
        number //= 10
        if number == 0:
            return end


cdef int decimal_width(uint64_t number) noexcept nogil:
    cdef int width = 1
    while number >= 10:
        number //= 10
        width += 1
    return width
