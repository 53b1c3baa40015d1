cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef enum Kind:
    TEXT                        # UTF-8
    BINARY
    INT32
    INT64
    MOMENT                      # unix milliseconds, kept as microseconds
    ULID                        # the moment in a ULID
    SKIPPED                     # known, so no extra, but not wanted


cdef struct Block:
    char* data                  # on the heap; NULL until the first reserve
    Py_ssize_t size             # bytes in use
    Py_ssize_t room             # bytes that fit


@cython.final
cdef class Column:
    cdef readonly str name
    cdef int kind               # one of Kind
    cdef bytes field            # the field of the entry that it is filled from; None: made from something else
    cdef Py_ssize_t rows        # rows that it has
    cdef Py_ssize_t nulls       # and how many of them hold nothing
    cdef Block values           # numbers of one width, or the bytes of all texts
    cdef Block ends             # of texts: where each ends in `values`, int32
    cdef Block is_there         # a byte per row

    cdef int put_text(self, const char* text, Py_ssize_t size) except -1
    cdef int put_bytes(self, const char* data, Py_ssize_t size) except -1
    cdef int put_number(self, int64_t number) except -1
    cdef int put_null(self) except -1
    cdef int cut(self, Py_ssize_t rows) except -1
    cdef int _put_end(self) except -1
    cdef object take(self)


cdef char* reserve(Block* block, Py_ssize_t size) except NULL
cdef bytes take_block(Block* block)
cdef bytes mended(const char* text, Py_ssize_t size)


cdef inline bint is_ascii(const char* text, Py_ssize_t size) noexcept nogil:
    cdef uint64_t word, seen = 0
    cdef Py_ssize_t i = 0
    while i + 8 <= size:
        memcpy(&word, text + i, 8)
        seen |= word
        i += 8
    while i < size:
        seen |= <unsigned char>text[i]
        i += 1
    return seen & <uint64_t>0x8080808080808080 == 0


cdef inline bint read_number(const char* text, Py_ssize_t size, int64_t* number) noexcept nogil:
    """Whether a text is a decimal of 64 bits, and which."""
    cdef Py_ssize_t i = 0
    cdef uint64_t value = 0
    cdef bint is_negative = size > 1 and text[0] == c'-'
    if is_negative:
        i = 1
    if size - i < 1 or size - i > 19:
        return False
    while i < size:
        if not c'0' <= text[i] <= c'9':
            return False
        value = value * 10 + <uint64_t>(text[i] - c'0')
        i += 1
    if value > <uint64_t>0x7FFFFFFFFFFFFFFF + is_negative:
        return False
    number[0] = <int64_t>(<uint64_t>0 - value if is_negative else value)     # the lowest has no positive twin
    return True
