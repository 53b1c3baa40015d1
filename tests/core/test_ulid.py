"""Job ids: format, order, uniqueness under threads and forks."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha_jobs
from chasqui._core.ulid import UlidFactory

NOW_MS = 1_794_797_194_811
MAX_TIME_MS = 2**48 - 1
LAST = 2**80 - 1


def entropy_of(*randomness: int):
    """A source of entropy whose draws are these numbers, then zeros."""

    def entropy(size: int) -> bytes:
        drawn = b"".join(number.to_bytes(10, "big") for number in randomness)
        return drawn.ljust(size, b"\0")

    return entropy


@given(st.integers(0, MAX_TIME_MS), st.binary(min_size=10, max_size=10))
def test_format_is_that_of_python_ulid(now_ms: int, randomness: bytes):
    # The first draw makes the factory's state, the second the id; time 0 counts on the first.
    id = UlidFactory(lambda size: (randomness * 2).ljust(size, b"\0")).next(now_ms)
    drawn = ULID.from_str(id)
    assert drawn.milliseconds == now_ms
    expected = int.from_bytes(randomness, "big") + (now_ms == 0)
    if expected <= LAST:
        assert id == str(ULID(now_ms.to_bytes(6, "big") + expected.to_bytes(10, "big")))


def test_ids_rise_while_the_clock_stands_still_or_goes_back():
    ulids = UlidFactory()
    times = [NOW_MS] * 1000 + [NOW_MS - 5000] * 1000 + [NOW_MS + 1, NOW_MS, 0, NOW_MS + 2]
    ids = [ulids.next(now_ms) for now_ms in times]
    assert ids == sorted(set(ids))
    assert ULID.from_str(ids[1999]).milliseconds == NOW_MS


def test_within_a_millisecond_the_random_part_is_counted_up():
    ulids = UlidFactory(entropy_of(0, 2**40 - 1))
    ids = [ULID.from_str(ulids.next(NOW_MS)) for _ in range(3)]
    assert [int(id) & LAST for id in ids] == [2**40 - 1, 2**40, 2**40 + 1]


@given(st.integers(0, 79), st.integers(0, 2**80 - 1), st.integers(1, 70))
def test_counting_up_carries_as_far_as_it_must(ones: int, randomness: int, count: int):
    start = min(randomness | ((1 << ones) - 1), LAST - count)
    ulids = UlidFactory(entropy_of(0, start))
    for step in range(count):
        assert int(ULID.from_str(ulids.next(NOW_MS))) == (NOW_MS << 80) + start + step


def test_a_millisecond_that_is_used_up_borrows_from_the_next():
    ulids = UlidFactory(entropy_of(0, LAST, 7))
    first, second = ulids.next(NOW_MS), ulids.next(NOW_MS)
    assert int(ULID.from_str(first)) == NOW_MS << 80 | LAST
    assert int(ULID.from_str(second)) == (NOW_MS + 1) << 80 | 7


def test_the_end_of_time_is_an_error_and_not_a_wrong_id():
    ulids = UlidFactory(entropy_of(0, LAST))
    ulids.next(MAX_TIME_MS)
    with pytest.raises(OverflowError, match="no ULID is left"):
        ulids.next(MAX_TIME_MS)


@pytest.mark.parametrize("now_ms", [-1, MAX_TIME_MS + 1, 2**64])
def test_a_time_that_does_not_fit_is_refused(now_ms: int):
    with pytest.raises(OverflowError):
        UlidFactory().next(now_ms)


@pytest.mark.parametrize("answer", [None, b"", b"x" * 999, "x" * 1000, bytearray(1000)])
def test_an_entropy_source_that_gives_the_wrong_thing_is_refused(answer: object):
    ulids = UlidFactory(lambda size: answer)
    for _ in range(2):
        with pytest.raises(ValueError, match="must give 1000 bytes"):
            ulids.next(NOW_MS)


def test_threads_never_share_an_id_and_each_sees_its_own_rise():
    ulids = UlidFactory()
    drawn: list[list[str]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def draw(ids: list[str]) -> None:
        start.wait()
        for i in range(10_000):
            ids.append(ulids.next(NOW_MS + i // 100))
        for i in range(100):
            ids += evalsha_jobs(CommandBuffer(), b"5", [], [], ulids, NOW_MS + i, [b"\xc0"] * 100)

    threads = [threading.Thread(target=draw, args=(ids,)) for ids in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id for ids in drawn for id in ids}) == 8 * 20_000
    for ids in drawn:
        assert ids == sorted(ids)


def test_a_thread_let_in_by_the_entropy_source_gets_an_id_of_its_own():
    """The source is asked in the middle of a draw: whoever comes in must not repeat it."""
    inside: list[str] = []

    def entropy(size: int) -> bytes:
        if len(inside) < 3:
            inside.append("")
            inside[inside.index("")] = ulids.next(NOW_MS)
        return os.urandom(size)

    ulids = UlidFactory(entropy)
    ids = [ulids.next(NOW_MS + i // 3) for i in range(1000)]
    assert ids == sorted(set(ids))
    assert not set(ids) & set(inside)


def test_a_forked_child_draws_other_ids_than_its_parent():
    ulids = UlidFactory()
    ulids.next(NOW_MS)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, "\n".join(ulids.next(NOW_MS) for _ in range(1000)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    ours = {ulids.next(NOW_MS) for _ in range(1000)}
    with open(read_end) as pipe:
        theirs = set(pipe.read().split("\n"))
    os.waitpid(child, 0)
    assert len(theirs) == len(ours) == 1000
    assert not theirs & ours


def test_a_child_forked_while_another_thread_draws_can_draw():
    asked, go_on = threading.Event(), threading.Event()

    def entropy(size: int) -> bytes:
        if threading.current_thread() is drawer:
            asked.set()
            go_on.wait(30)
        return os.urandom(size)

    ulids = UlidFactory(entropy)
    drawer = threading.Thread(target=ulids.next, args=(NOW_MS,))
    drawer.start()
    assert asked.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if len(ulids.next(NOW_MS)) == 26 else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    drawer.join()
    assert os.waitstatus_to_exitcode(status) == 0
