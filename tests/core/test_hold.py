"""A lock that is waited for no longer than told, and given back whatever happens."""

import threading

import pytest

from chasqui._core.hold import Hold


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_it_is_held_inside_and_free_behind(make):
    lock = make()
    with Hold(lock, 1.0) as is_held:
        assert is_held is True
        assert is_free_elsewhere(lock) is False
    assert is_free_elsewhere(lock) is True
    with pytest.raises(ZeroDivisionError), Hold(lock, 1.0):
        raise ZeroDivisionError
    assert is_free_elsewhere(lock) is True


def test_one_that_is_taken_is_not_given_back():
    lock = threading.Lock()
    with lock:
        with Hold(lock, 0.01) as is_held:
            assert is_held is False
        assert lock.locked()


def test_a_lock_for_its_own_thread_is_held_twice():
    lock = threading.RLock()
    with Hold(lock, 1.0) as outer, Hold(lock, 1.0) as inner:
        assert outer is inner is True
    assert is_free_elsewhere(lock) is True


def is_free_elsewhere(lock) -> bool:
    """Whether another thread could have it."""
    found = []

    def look() -> None:
        with Hold(lock, 0) as is_held:
            found.append(is_held)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]
