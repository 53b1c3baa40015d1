"""A lock for one `with` block that waits no longer than it is told.

`lock.acquire(timeout=…)` in Python cannot be made safe. A signal's handler may raise as soon as the
call has returned, before the `try` that follows: the lock then belongs to a thread that is in no
call. Python runs handlers between instructions and never in compiled code, so the block below is
entered when the lock is taken, and the lock is given back when the block is left.
"""

cimport cython


@cython.final
cdef class Hold:
    """`with Hold(lock, timeout_s) as is_held:` takes the lock, or False after `timeout_s`."""

    cdef object _lock
    cdef object _timeout_s
    cdef bint _is_held

    def __init__(self, lock not None, timeout_s):
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self):
        self._is_held = self._lock.acquire(True, self._timeout_s)
        return self._is_held

    def __exit__(self, kind, error, trace):
        if self._is_held:
            self._is_held = False
            self._lock.release()
