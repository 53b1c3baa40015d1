"""The supervisor of a worker's processes, without any."""

import errno
import subprocess
import sys

import pytest

from chasqui.running.supervisor import RESTART_MAX_S, Supervisor

#: The main thread waits, and the kernel gives the signal to another one.
PROGRAM = """
import os, signal, sys, threading
from chasqui.running.supervisor import Supervisor

main = threading.main_thread().ident

def is_waiting():
    return sys._current_frames()[main].f_code.co_name == "select"

def send():
    while not is_waiting():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
threading.Thread(target=send).start()
sys.exit(Supervisor("nobody:worker", 0).run())
"""


def test_a_signal_that_another_thread_is_given_is_obeyed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=30, check=False)
    assert ended.returncode == 0


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """One of three processes that are gone, on a system that has none to give."""

    def refuse() -> None:
        raise OSError(errno.EAGAIN, "none left")

    supervisor = Supervisor("nobody:worker", 3)
    monkeypatch.setattr(supervisor._spawn, "Pipe", refuse)
    for child in supervisor._children:
        child.consumer_ids = ("was here",)
    return supervisor


def test_one_that_cannot_be_started_keeps_no_other_from_it(supervisor: Supervisor) -> None:
    assert supervisor._start_due() == pytest.approx(0.5, abs=0.5)
    assert [child.deaths for child in supervisor._children] == [1, 1, 1]


def test_starts_are_tried_however_many_failed(supervisor: Supervisor) -> None:
    (child, *_) = supervisor._children
    for deaths in (1_024, 10**6):
        child.deaths, child.start_at_s = deaths, 0.0
        supervisor._start(child)
        assert child.deaths == deaths + 1
        assert supervisor._put_off(child) == RESTART_MAX_S
