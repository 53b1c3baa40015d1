cimport cython

cdef enum:
    MOST = 16                   # slots of a class


@cython.final
cdef class InstanceFactory:
    cdef type cls
    cdef Py_ssize_t count
    cdef Py_ssize_t[MOST] offsets

    cdef inline void put(self, object instance, Py_ssize_t i, object value) noexcept
