"""A server that speaks RESP until a test tells it not to: anything may be its answer."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.proxy import split

_HELLO = (
    b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n8.6.3\r\n$5\r\nproto\r\n:3\r\n"
)
#: What is said to a command that no test has a better answer to.
_ANSWERS = {
    b"HELLO": _HELLO,
    b"COMMAND": b"*2\r\n_\r\n_\r\n",
    b"XREADGROUP": b"-NOGROUP no such group\r\n",
    b"PING": b"+PONG\r\n",
}


class FakeServer:
    """Takes links one after the other or side by side, in threads of its own.

    `answer` gets the words of a command and gives bytes, or None for the usual answer; `hangs_up`
    says whether the link ends with what it gave. ECHO is answered as Redis does.
    """

    def __init__(self, answer: Callable[[list[bytes]], bytes | None] = lambda words: None) -> None:
        self._answer = answer
        self.hangs_up = False
        #: Links so far.
        self.accepted = 0
        #: Of each answer that a test gave, whether the client took all of it.
        self.taken: list[bool] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        rest = b""
        with contextlib.suppress(OSError), link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := link.recv(1 << 16):
                frames, rest = split(rest + data)
                for frame in frames:
                    words = frame.split(b"\r\n")[2::2]
                    told = self._answer(words)
                    if told is None:
                        link.sendall(usual(words))
                        continue
                    is_taken = False
                    try:
                        link.sendall(told)
                        is_taken = True
                    finally:
                        self.taken.append(is_taken)
                    if self.hangs_up:
                        return
        self._links.discard(link)


def usual(words: list[bytes]) -> bytes:
    """What a server says to a command."""
    name = words[0].upper()
    if name == b"ECHO":
        return b"$%d\r\n%b\r\n" % (len(words[1]), words[1])
    return _ANSWERS.get(name, b"+OK\r\n")
