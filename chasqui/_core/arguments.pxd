cimport cython


@cython.final
cdef class Arguments:
    cdef tuple names
    cdef tuple types            # of each parameter, the exact type of a plain value; None takes any
    cdef tuple required
    cdef Py_ssize_t count
    cdef Py_ssize_t positional

    cdef inline bint is_plain(self, Py_ssize_t i, object value) noexcept


cdef class BoundCall:
    cdef readonly object task
    cdef readonly object data
