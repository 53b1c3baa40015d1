"""The blocking connection when a server refuses one request and hangs up before the next reply."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from chasqui.model.config import Endpoint
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, commands


class Replies(Protocol):
    def __call__(self, command: list[bytes], /) -> bytes | None: ...


class Node:
    """A server of a few words: `replies` gives a command's reply, or None to hang up."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.links = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.links += 1
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as words:
            while line := words.readline():
                sizes = (int(words.readline()[1:]) for _ in range(int(line[1:])))
                reply = self._reply([words.read(size + 2)[:-2] for size in sizes])
                if reply is None:
                    return
                link.sendall(reply)

    def _reply(self, command: list[bytes]) -> bytes | None:
        match command[0]:
            case b"HELLO":
                return b"%1\r\n+version\r\n+99.0.0\r\n"
            case b"GET" | b"ASKING":
                return self._replies(command)
            case b"INFO":
                return b"+redis_version:99.0.0\r\n"
        return b"+OK\r\n"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def right() -> Iterator[Node]:
    """The node that has the keys."""
    with ExitStack() as stack:
        node = Node(lambda command: b"+OK\r\n" if command[0] == b"ASKING" else b"+right\r\n")
        stack.callback(node.close)
        yield node


@pytest.mark.parametrize("refusal", ["ASK", "MOVED"])
def test_a_refusal_is_followed_though_the_link_is_lost_behind_it(right: Node, refusal: str) -> None:
    def replies(command: list[bytes]) -> bytes | None:
        if command[1] == b"one":
            return b"-%b 1 127.0.0.1:%d\r\n" % (refusal.encode(), right.port)
        return None if wrong.links == 1 else b"+wrong\r\n"

    wrong = Node(replies)
    endpoint = Endpoint.parse(f"redis://127.0.0.1:{wrong.port}")
    connection = BlockingConnection(endpoint, key=b"k", request_timeout_s=10)
    gets = [commands(("GET", name), effect=Effect.READ) for name in ("one", "two")]
    try:
        found = connection.call_each(gets, ahead=2)
    finally:
        connection.close()
        wrong.close()
    assert found == ([b"right", b"wrong"] if refusal == "ASK" else [b"right", b"right"])
    assert wrong.links == (2 if refusal == "ASK" else 1)


def test_a_node_that_was_asked_may_name_another(right: Node) -> None:
    def replies(command: list[bytes]) -> bytes | None:
        nonlocal asked
        asked += 1
        place = middle.port if asked == 1 else right.port
        return b"-ASK 1 127.0.0.1:%d\r\n" % place

    def pass_on(command: list[bytes]) -> bytes | None:
        if command[0] == b"ASKING":
            return b"+OK\r\n"
        return b"-ASK 1 127.0.0.1:%d\r\n" % right.port

    asked = 0
    middle, wrong = Node(pass_on), Node(replies)
    endpoint = Endpoint.parse(f"redis://127.0.0.1:{wrong.port}")
    connection = BlockingConnection(endpoint, key=b"k", request_timeout_s=10)
    try:
        assert connection.call(commands(("GET", "one"), effect=Effect.READ)) == b"right"
    finally:
        connection.close()
        wrong.close()
        middle.close()
