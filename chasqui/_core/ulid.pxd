cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    ULID_CHARS = 26             # 10 of time, 16 of randomness
    ENTROPY_BYTES = 1000        # one call to the operating system serves a hundred milliseconds

cdef int64_t ulid_ms(const char* text, Py_ssize_t size) noexcept nogil


@cython.final
cdef class UlidFactory:
    cdef object _entropy        # asks the operating system for random bytes
    cdef bytes _pool            # random bytes not used yet ...
    cdef Py_ssize_t _pool_at    # ... from here on
    cdef long _pid              # whose state this is: a forked child must not go on with it
    cdef uint64_t _ms           # the time part of the last id
    cdef uint64_t _high         # its upper 40 random bits
    cdef uint64_t _low          # its lower 40 random bits
    cdef char[ULID_CHARS] text  # all of it, as it is written

    cdef int begin(self) except -1
    cdef int step(self, uint64_t now_ms) except -1
    cdef str take(self, uint64_t now_ms)
    cdef bytes _fresh(self)
    cdef void _draw(self) noexcept
    cdef void _write(self) noexcept
