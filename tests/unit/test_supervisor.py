"""The supervisor of a worker's processes, without any."""

import subprocess
import sys

#: The main thread waits, and the kernel gives the signal to another one.
PROGRAM = """
import os, signal, sys, threading
from chasqui.supervisor import Supervisor

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
