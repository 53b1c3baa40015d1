"""Ends an embedded server when its last holder has left.

Run by path, as a process of its own, on the standard library alone: it starts in milliseconds and
shares nothing with the program that started it. `chasqui.transport.embedded` says why it exists.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

#: How long a server may take to write its data before it is ended with SIGKILL.
STOP_TIMEOUT_S = 30.0

#: From the kernel's <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


def main(
    running_fd: int, holders: str, temporary: str, socket_folder: str, command: list[str]
) -> None:
    """Run the server until its end; remove what was made for this run only.

    `running_fd` is locked: it stays so until both this process and the server have ended.
    """
    if os.fork():
        os._exit(0)  # so that our parent need not reap us
    server = subprocess.Popen(command, pass_fds=[running_fd], preexec_fn=_dying_with(os.getpid()))
    all_left = threading.Event()
    threading.Thread(target=_end, args=(server, holders, all_left), daemon=True).start()
    server.wait()
    # After a crash others may start the server of a named directory anew; nobody else can name a
    # temporary one, but its holders may still want to read its log.
    os.close(running_fd)
    if temporary:
        all_left.wait()
    if all_left.is_set():
        for folder in filter(None, (temporary, socket_folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _end(server: subprocess.Popen[bytes], holders: str, all_left: threading.Event) -> None:
    """End the server once nobody holds it; newcomers wait until this process is gone."""
    fcntl.flock(os.open(holders, os.O_RDWR), fcntl.LOCK_EX)
    all_left.set()
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _dying_with(parent: int) -> Callable[[], None] | None:
    """What makes the kernel end the child when this process is killed; None where it cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
