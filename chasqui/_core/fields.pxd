cimport cython

from chasqui._core.column cimport Block


cdef class Field:
    cdef readonly str name
    cdef bytes key              # the name in UTF-8
    cdef str expected
    cdef int kind, width, precision, scale
    cdef bint is_nullable
    cdef list inside
    cdef Py_ssize_t rows        # rows that it has
    cdef Py_ssize_t nulls       # and how many of them hold nothing
    cdef Block values           # numbers of one width, or the bytes of all texts
    cdef Block ends             # of texts, lists and maps: where each ends, int32
    cdef Block is_there         # a byte per row

    cdef int close_row(self, bint is_there) except -1
    cdef int put_null(self) except -1
    cdef int put_bytes(self, const void* data, Py_ssize_t size) except -1
    cdef int cut(self, Py_ssize_t rows) except -1
    cdef tuple take(self)


@cython.final
cdef class Lent:
    cdef Py_buffer buffer
