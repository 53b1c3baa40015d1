"""How much memory a process holds, for tests that must not lose any."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

_STATM = Path("/proc/self/statm")

#: What an allocator may keep or move between two looks at it.
SLACK_BYTES = 3 << 20
SLACK_BLOCKS = 60


def rss_bytes() -> int:
    """Memory of this process that is resident; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """Lets this process reserve at most so much more, touched or not: beyond it is MemoryError."""
    size = int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def takes_at_most(more_bytes: int) -> Iterator[None]:
    """Fails if Python held so much more at any moment, given back or not."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert taken <= more_bytes, f"{taken} bytes were taken"


class _Mallinfo2(ctypes.Structure):
    """What glibc tells of its heap; `uordblks` and `hblkhd` are in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def used_bytes() -> int:
    """Bytes of the C allocator that are in use, without what it keeps for later; 0 where it does
    not say. Python's own allocator takes its arenas elsewhere: see `sys.getallocatedblocks`."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    told = mallinfo2()
    return int(told.uordblks + told.hblkhd)


def lost_by(work: Callable[[], object], calls: int) -> tuple[int, int]:
    """Blocks of Python's allocator and resident bytes that `calls` calls leave behind."""
    for _ in range(calls // 10 + 1):  # caches and free lists fill up
        work()
    gc.collect()
    blocks, resident = sys.getallocatedblocks(), rss_bytes()
    for _ in range(calls):
        work()
    gc.collect()
    return sys.getallocatedblocks() - blocks, rss_bytes() - resident


def assert_keeps_nothing(work: Callable[[], object], calls: int) -> None:
    """Fail if calling `work` again and again leaves memory behind."""
    blocks, resident = lost_by(work, calls)
    assert blocks < SLACK_BLOCKS, f"{blocks} blocks lost in {calls} calls"
    assert resident < SLACK_BYTES, f"{resident} bytes lost in {calls} calls"
