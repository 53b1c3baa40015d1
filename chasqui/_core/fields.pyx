"""Columns in Arrow's layout that are filled value by value, however deep they are; typed.pyx reads the values.

A row that turns out to be wrong half way is cut off again, in all columns inside.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from chasqui._core.column cimport Block, reserve, take_block
from chasqui._core.maps cimport BINARY, BOOL, KINDS, LIST, MAP, STRUCT, TEXT, WIDTHS

cdef bytes NO_ENDS = bytes(4)


cdef class Field:
    """A column under way, and those inside it, made by `(name, kind, expected, is_nullable, precision, scale, shapes)`."""

    def __cinit__(self, tuple shape not None):
        self.name, kind, self.expected, self.is_nullable, self.precision, self.scale, inside = shape
        self.key = self.name.encode()
        self.kind = KINDS[kind]
        self.width = 1 if self.kind == BOOL else WIDTHS.get(kind, 0)
        self.inside = [type(self)(one) for one in inside]
        if self.kind == LIST and len(self.inside) != 1 or self.kind == MAP and len(self.inside) != 2:
            raise ValueError(f"{len(self.inside)} columns in a {kind}")

    def __dealloc__(self):
        PyMem_RawFree(self.values.data)
        PyMem_RawFree(self.ends.data)
        PyMem_RawFree(self.is_there.data)

    cdef int close_row(self, bint is_there) except -1:
        """A row is whole."""
        cdef int32_t end = 0
        if has_ends(self.kind):
            if self.ends.size == 0:
                memcpy(reserve(&self.ends, 4), &end, 4)
                self.ends.size += 4
            end = <int32_t>(self.values.size if self.kind <= BINARY else (<Field>self.inside[0]).rows)
            memcpy(reserve(&self.ends, 4), &end, 4)
            self.ends.size += 4
        reserve(&self.is_there, 1)[0] = is_there
        self.is_there.size += 1
        self.rows += 1
        self.nulls += not is_there
        return 0

    cdef int put_null(self) except -1:
        cdef Field field
        if self.width:
            memset(reserve(&self.values, self.width), 0, self.width)
            self.values.size += self.width
        elif self.kind == STRUCT:
            for field in self.inside:
                field.put_null()
        return self.close_row(False)

    cdef int put_bytes(self, const void* data, Py_ssize_t size) except -1:
        """A value: a number in its width, or a text."""
        memcpy(reserve(&self.values, size + 1), data, size)
        self.values.size += size
        return self.close_row(True)

    cdef int cut(self, Py_ssize_t rows) except -1:
        """Forget the rows behind these, and one under way."""
        cdef Field field
        cdef int32_t end = 0
        cdef Py_ssize_t i
        for i in range(rows, self.rows):
            self.nulls -= not self.is_there.data[i]
        self.is_there.size = self.rows = rows
        if has_ends(self.kind) and self.ends.size:
            memcpy(&end, self.ends.data + 4 * rows, 4)
            self.ends.size = 4 * (rows + 1)
        self.values.size = self.width * rows if self.width else end
        for field in self.inside:
            field.cut(rows if self.kind == STRUCT else end)
        return 0

    cdef tuple take(self):
        """Its buffers as Arrow lays them out, and those of the columns inside."""
        cdef Field field
        cdef object there = None
        if self.nulls and self.is_nullable:
            there = bits_of(&self.is_there)
        buffers = [there]
        if has_ends(self.kind):
            buffers.append(take_block(&self.ends) or NO_ENDS)
        if self.kind == BOOL:
            buffers.append(bits_of(&self.values))
        elif self.width or self.kind == TEXT or self.kind == BINARY:
            buffers.append(take_block(&self.values))
        return self.rows, buffers, [field.take() for field in self.inside]


cdef class Lent:
    """A buffer of somebody else, given back with this object; None is an empty one."""

    def __cinit__(self, source):
        PyObject_GetBuffer(b"" if source is None else source, &self.buffer, PyBUF_SIMPLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


cdef inline bint has_ends(int kind) noexcept:
    return kind == TEXT or kind == BINARY or kind == LIST or kind == MAP


cdef object bits_of(Block* flags):
    """Bytes that are 0 or 1 as a bitmap."""
    cdef Py_ssize_t i
    cdef bytes bitmap = PyBytes_FromStringAndSize(NULL, (flags.size + 7) // 8)
    cdef char* bits = PyBytes_AS_STRING(bitmap)
    memset(bits, 0, (flags.size + 7) // 8)
    for i in range(flags.size):
        bits[i >> 3] |= <char>(flags.data[i] << (i & 7))
    return bitmap
