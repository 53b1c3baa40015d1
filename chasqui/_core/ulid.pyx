"""Job ids: ULIDs that rise within a process, unique across threads and forks.

No lock: only the entropy source lets other threads run, so it is asked before anything is decided.
A lock would be worse than none, a child forked while another thread holds it could never take it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset
from posix.unistd cimport getpid

from os import urandom


cdef enum:
    TIME_BITS = 48
    HALF_BITS = 40              # the 80 random bits are kept as two halves
    DRAW_BYTES = 10
    TIME_CHARS = 10

cdef uint64_t MAX_TIME = ((<uint64_t>1) << TIME_BITS) - 1
cdef uint64_t HALF_MASK = ((<uint64_t>1) << HALF_BITS) - 1
cdef const char* CROCKFORD = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"

cdef signed char DIGITS[256]
cdef int _digit, _char
memset(DIGITS, -1, sizeof(DIGITS))
for _digit, _char in enumerate(CROCKFORD[:32]):
    DIGITS[_char] = _digit
    DIGITS[_char | 32] = _digit             # lower case; of a digit, itself


cdef int64_t ulid_ms(const char* text, Py_ssize_t size) noexcept nogil:
    """When a ULID was drawn; -1 if it is none. Its first digit is at most 7: its time has 48 bits."""
    cdef int64_t ms = 0
    cdef signed char digit
    cdef int i
    if size != ULID_CHARS or DIGITS[<unsigned char>text[0]] > 7:
        return -1
    for i in range(ULID_CHARS):
        digit = DIGITS[<unsigned char>text[i]]
        if digit < 0:
            return -1
        if i < TIME_CHARS:
            ms = (ms << 5) | digit
    return ms


@cython.final
cdef class UlidFactory:
    """Makes ULIDs from the caller's clock. Each is greater than the one before, even when
    the clock stands still or goes back; a forked child starts from fresh randomness."""

    def __cinit__(self, entropy=urandom):
        self._entropy = entropy
        self._pool = b""
        self._pid = -1

    def next(self, uint64_t now_ms):
        """One id, as a str of 26 characters."""
        self.begin()
        return self.take(now_ms)

    cdef int begin(self) except -1:
        """Before a run of steps: notice a fork."""
        cdef long pid = getpid()
        cdef bytes fresh
        if pid == self._pid:
            return 0
        fresh = self._fresh()
        if pid != self._pid:    # and no other thread was here meanwhile
            self._pid = pid
            self._pool = fresh
            self._pool_at = 0
            self._ms = 0
            self._draw()
        return 0

    cdef int step(self, uint64_t now_ms) except -1:
        """Move to the next id; take its `text` before any Python code can run."""
        cdef int i = ULID_CHARS - 1
        if now_ms > MAX_TIME:
            raise OverflowError(f"the time {now_ms} ms does not fit into a ULID")
        if self._pool_at + DRAW_BYTES > PyBytes_GET_SIZE(self._pool):
            self._pool = self._fresh()
            self._pool_at = 0
        if now_ms > self._ms:
            self._ms = now_ms
            self._draw()
        elif self._low < HALF_MASK:
            self._low += 1
            self.text[i] = CROCKFORD[self._low & 31]
            while self._low >> (5 * (ULID_CHARS - 1 - i)) & 31 == 0:     # it went from Z to 0, and carries
                i -= 1
                self.text[i] = CROCKFORD[self._low >> (5 * (ULID_CHARS - 1 - i)) & 31]
        elif self._high < HALF_MASK:
            self._low = 0
            self._high += 1
            self._write()
        elif self._ms < MAX_TIME:
            self._ms += 1       # 2^80 ids in a millisecond: borrow from the next one
            self._draw()
        else:
            raise OverflowError("no ULID is left")
        return 0

    cdef str take(self, uint64_t now_ms):
        """Move to the next id; it."""
        self.step(now_ms)
        return self.text[:ULID_CHARS].decode("ascii")

    cdef bytes _fresh(self):
        """Random bytes for the pool. Other threads may run meanwhile."""
        fresh = self._entropy(ENTROPY_BYTES)
        if not PyBytes_CheckExact(fresh) or PyBytes_GET_SIZE(fresh) != ENTROPY_BYTES:
            raise ValueError(f"the entropy source must give {ENTROPY_BYTES} bytes")
        return fresh

    cdef void _draw(self) noexcept:
        """Take the random part from the pool, which has enough."""
        cdef const unsigned char* random
        cdef int i
        random = <const unsigned char*>PyBytes_AS_STRING(self._pool) + self._pool_at
        self._pool_at += DRAW_BYTES
        self._high = 0
        self._low = 0
        for i in range(5):
            self._high = (self._high << 8) | random[i]
            self._low = (self._low << 8) | random[i + 5]
        self._write()

    cdef void _write(self) noexcept:
        """Write the whole of the current id."""
        cdef int i
        for i in range(10):
            self.text[i] = CROCKFORD[(self._ms >> (45 - 5 * i)) & 31]
        for i in range(8):
            self.text[10 + i] = CROCKFORD[(self._high >> (35 - 5 * i)) & 31]
            self.text[18 + i] = CROCKFORD[(self._low >> (35 - 5 * i)) & 31]
