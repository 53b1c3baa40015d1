"""A column under way, in Arrow's own layout: growing blocks of memory, no Python object per value."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from chasqui._core.ulid cimport ulid_ms

cdef enum:
    MAX_BLOCK = 0x7FFFFFFF      # Arrow's ends are int32

cdef dict KINDS = {"text": TEXT, "binary": BINARY, "int32": INT32, "int64": INT64, "moment": MOMENT,
                   "ulid": ULID, "skipped": SKIPPED}

#: The last moment that Python can show; beyond it a time is taken for damaged.
MAX_MS = 253_402_300_799_999
cdef int64_t LAST_MS = MAX_MS

cdef bytes NO_ENDS = bytes(4)       # of a column without rows


cdef char* reserve(Block* block, Py_ssize_t size) except NULL:
    """Room for so many more bytes; where they go."""
    cdef Py_ssize_t wanted
    cdef char* grown
    if size > block.room - block.size:
        if size > MAX_BLOCK - block.size:
            raise OverflowError("a page of more than 2 GiB does not fit into a column: read fewer entries at once")
        wanted = max(block.size + size, block.room + (block.room >> 1), <Py_ssize_t>4096)
        grown = <char*>PyMem_RawRealloc(block.data, wanted)
        if grown == NULL:
            raise MemoryError("no memory for a column")
        block.data = grown
        block.room = wanted
    return block.data + block.size


cdef bytes take_block(Block* block):
    """What is in a block, which is empty then and keeps its memory."""
    cdef bytes data = PyBytes_FromStringAndSize(block.data, block.size)
    block.size = 0
    return data


@cython.final
cdef class Column:
    """One column under way."""

    def __cinit__(self, str name not None, str kind not None, bytes field=None):
        self.name = name
        self.kind = KINDS[kind]
        self.field = field

    def __dealloc__(self):
        PyMem_RawFree(self.values.data)
        PyMem_RawFree(self.ends.data)
        PyMem_RawFree(self.is_there.data)

    cdef int put_text(self, const char* text, Py_ssize_t size) except -1:
        """The next value, out of the text that the server sent."""
        cdef int64_t number
        cdef bytes whole
        if self.kind == TEXT:
            if is_ascii(text, size):
                return self.put_bytes(text, size)
            whole = mended(text, size)
            return self.put_bytes(PyBytes_AS_STRING(whole), PyBytes_GET_SIZE(whole))
        if self.kind == BINARY:
            return self.put_bytes(text, size)
        if self.kind == ULID:
            number = ulid_ms(text, size)
            return self.put_null() if number < 0 else self.put_number(number)
        if not read_number(text, size, &number):
            return self.put_null()
        return self.put_number(number)

    cdef int put_bytes(self, const char* data, Py_ssize_t size) except -1:
        memcpy(reserve(&self.values, size + 1), data, size)
        self.values.size += size
        self._put_end()
        reserve(&self.is_there, 1)[0] = 1
        self.is_there.size += 1
        self.rows += 1
        return 0

    cdef int put_number(self, int64_t number) except -1:
        """The next value; null if it is beyond what the column can hold."""
        cdef int32_t short
        if self.kind == INT32:
            if not -0x80000000 <= number <= 0x7FFFFFFF:
                return self.put_null()
            short = <int32_t>number
            memcpy(reserve(&self.values, 4), &short, 4)
            self.values.size += 4
        else:
            if self.kind == MOMENT or self.kind == ULID:
                if not 0 <= number <= LAST_MS:
                    return self.put_null()
                number *= 1000
            memcpy(reserve(&self.values, 8), &number, 8)
            self.values.size += 8
        reserve(&self.is_there, 1)[0] = 1
        self.is_there.size += 1
        self.rows += 1
        return 0

    cdef int put_null(self) except -1:
        cdef Py_ssize_t width
        if self.kind == TEXT or self.kind == BINARY:
            self._put_end()
        else:
            width = 4 if self.kind == INT32 else 8
            memset(reserve(&self.values, width), 0, width)
            self.values.size += width
        reserve(&self.is_there, 1)[0] = 0
        self.is_there.size += 1
        self.rows += 1
        self.nulls += 1
        return 0

    cdef int _put_end(self) except -1:
        cdef int32_t end = 0
        if self.ends.size == 0:
            memcpy(reserve(&self.ends, 4), &end, 4)
            self.ends.size += 4
        end = <int32_t>self.values.size
        memcpy(reserve(&self.ends, 4), &end, 4)
        self.ends.size += 4
        return 0

    cdef int cut(self, Py_ssize_t rows) except -1:
        """Forget the rows behind these."""
        cdef int32_t end = 0
        cdef Py_ssize_t i
        if rows >= self.rows:
            return 0
        for i in range(rows, self.rows):
            self.nulls -= not self.is_there.data[i]
        self.is_there.size = self.rows = rows
        if self.kind == TEXT or self.kind == BINARY:
            memcpy(&end, self.ends.data + 4 * rows, 4)
            self.values.size = end
            self.ends.size = 4 * (rows + 1)
        else:
            self.values.size = rows * (4 if self.kind == INT32 else 8)
        return 0

    cdef object take(self):
        """Its buffers as Arrow lays them out, and an empty column again."""
        cdef object bitmap = None
        cdef Py_ssize_t i, rows = self.rows
        cdef char* bits
        if self.nulls:
            bitmap = PyBytes_FromStringAndSize(NULL, (rows + 7) // 8)
            bits = PyBytes_AS_STRING(bitmap)
            memset(bits, 0, (rows + 7) // 8)
            for i in range(rows):
                bits[i >> 3] |= <char>(self.is_there.data[i] << (i & 7))
        self.rows = self.nulls = self.is_there.size = 0
        if self.kind == TEXT or self.kind == BINARY:
            return bitmap, take_block(&self.ends) or NO_ENDS, take_block(&self.values)
        return bitmap, take_block(&self.values)


cdef bytes mended(const char* text, Py_ssize_t size):
    """A text, with replacement characters for what is no UTF-8."""
    return text[:size].decode("utf-8", "replace").encode()
