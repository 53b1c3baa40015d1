from chasqui._core.buffer cimport CommandBuffer

cdef bint put_value(CommandBuffer out, object value, int depth) except -1
cdef object unpack_run(const unsigned char* data, Py_ssize_t size)
cdef object value_at(const unsigned char* data, Py_ssize_t* at)
