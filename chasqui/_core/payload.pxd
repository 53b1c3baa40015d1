cdef object unpack_run(const unsigned char* data, Py_ssize_t size)
