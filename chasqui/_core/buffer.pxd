cimport cython
from libc.stdint cimport uint64_t

cdef enum:
    INLINE_BYTES = 1024         # room inside the object: a single command needs no allocation
    HEADER_BYTES = 24           # the most that `$<length>\r\n` can take


@cython.final
cdef class CommandBuffer:
    cdef char* _data            # where the bytes are: _inline or the heap
    cdef Py_ssize_t _len        # bytes written
    cdef Py_ssize_t _cap        # bytes that fit into _data
    cdef readonly Py_ssize_t commands   # commands written since the last clear
    cdef char _inline[INLINE_BYTES]

    cdef char* grow(self, Py_ssize_t size) except NULL

    cdef inline char* reserve(self, Py_ssize_t size) except NULL:
        """Room for `size` more bytes; returns where they go. Nothing counts until `advance`."""
        if size > self._cap - self._len:
            return self.grow(size)
        return self._data + self._len

    cdef inline int advance(self, char* end) except -1:
        """Count the bytes up to `end`, which `reserve` made room for."""
        self._len = end - self._data
        return 0

    cdef int write_header(self, char kind, uint64_t number) except -1
    cdef int write_bulk(self, const char* data, Py_ssize_t size) except -1
    cdef int write_number(self, uint64_t number) except -1
    cdef int write_argument(self, object argument) except -1


cdef char* put_header(char* out, char kind, uint64_t number) noexcept nogil
cdef char* put_bulk(char* out, const char* data, Py_ssize_t size) noexcept nogil
cdef char* put_decimal(char* out, uint64_t number) noexcept nogil
cdef int decimal_width(uint64_t number) noexcept nogil
