cimport cython
from libc.stdint cimport int64_t

from chasqui._core.fields cimport Field


@cython.final
cdef class Unpacker:
    cdef Typed root
    cdef const unsigned char* data
    cdef Py_ssize_t size
    cdef str reason
    cdef str place

    cdef str row(self, const unsigned char* data, Py_ssize_t size)
    cdef Py_ssize_t refuse(self, Typed field, str got) except -2
    cdef Py_ssize_t step_out(self, str step) except -2
    cdef Py_ssize_t skip(self, Py_ssize_t at) noexcept


@cython.final
cdef class Typed(Field):
    cdef Py_ssize_t put(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Py_ssize_t put_bool(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Py_ssize_t put_run(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Py_ssize_t put_number(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef bint holds(self, int64_t number) noexcept
    cdef Py_ssize_t put_form(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Py_ssize_t put_odd(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef object odd(self, given)
    cdef Py_ssize_t put_struct(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Typed field_of(self, const char* name, Py_ssize_t size, Py_ssize_t* following)
    cdef Py_ssize_t put_many(self, Unpacker unpacker, Py_ssize_t at) except -2
    cdef Py_ssize_t put_key(self, Unpacker unpacker, Py_ssize_t at) except -2
