"""Servers that answer with anything at all, into clients that live: each next call is answered."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from chasqui._core.reply import Builder, ReplyReader
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.blocking_link import BlockingLink
from chasqui.transport.connection import Connection
from chasqui.transport.link import Link
from chasqui.transport.request import Effect, Request, commands
from tests.chaos import garbage
from tests.core.memory import at_most
from tests.core.replies import recordings, wrong_cuts
from tests.crash.load import Seed
from tests.faults.fake import FakeServer
from tests.fixtures import until

#: What a large one of them would take if it were believed: a string, or 64 Mi pointers.
ANNOUNCED_BYTES = 512 << 20
#: What a client may reserve meanwhile; new links are threads of the other side, and 70 MB each.
LEEWAY_BYTES = 384 << 20
INPUTS = 5_000

#: Headers that announce more than there is or may be.
BOMBS = [
    b"$536870913\r\n",
    b"$9223372036854775807\r\n",
    b"*2147483647\r\n",
    b"%2147483647\r\n",
    b"*16777217\r\n",
    b"*67108864\r\n",
    b"*1\r\n" * 1025,
    b"*-2\r\n",
    b"|1000000\r\n",
    b"+" + b"x" * 100_000,
]


def clean() -> Request:
    return commands(("ECHO", "clean"), effect=Effect.READ)


@pytest.mark.fault(44)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("connection", garbage.SHARES)
def test_garbage_into_a_live_connection(connection: str) -> None:
    """`python -m tests.chaos.garbage` gives millions."""
    assert garbage.wrong(garbage.measure(connection, INPUTS, Seed().seed)) == []


@pytest.mark.fault(44, control=True)
async def test_a_link_that_is_kept_after_garbage_is_caught(
    connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken answer, and all that come behind it, are no use to anybody: mostly nothing comes
    any more, and now and then what was meant for another."""
    monkeypatch.setattr(Link, "abort", lambda self: None)
    seed, tally = Seed(), garbage.Tally()
    with garbage.server(seed.seed) as url, garbage.at_once():
        connection = connect(url)
        await connection.connect()
        connection._flow.timeout_s = 0.3
        await garbage.into_asyncio(connection, tally, INPUTS, seed.random)
    assert tally.failed + tally.mismatched == 1


async def announce(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    bomb: bytes,
) -> list[object]:
    """Both connections are answered with this and have little memory; what they could not bear."""
    wrong: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: wrong.append(context.get("exception")))
    armed: list[bytes] = []

    def answer(words: list[bytes]) -> bytes | None:
        return armed.pop() if armed and words[-1] == b"dirty" else None

    with FakeServer(answer) as server:
        server.hangs_up = True
        connection = connect(server.url)
        blocking = connect_blocking(server.url)
        # What threads and links take is taken before.
        assert await connection.submit(clean()) == b"clean"
        assert await asyncio.to_thread(blocking.call, clean()) == b"clean"
        request = ("ECHO", "dirty")
        with at_most(LEEWAY_BYTES):
            armed.append(bomb)
            assert await connection.execute(*request, effect=Effect.READ) == b"dirty"
            armed.append(bomb)
            try:
                await asyncio.to_thread(blocking.execute, *request, effect=Effect.READ)
            except MemoryError as error:
                wrong.append(error)
            assert await connection.submit(clean()) == b"clean"
            assert await asyncio.to_thread(blocking.call, clean()) == b"clean"
    assert not armed, "each was answered with it"
    return wrong


@pytest.mark.fault(46)
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: repr(bomb[:12]))
async def test_an_announcement_takes_no_memory(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    bomb: bytes,
) -> None:
    assert await announce(connect, connect_blocking, bomb) == []


@pytest.mark.fault(46, control=True)
@pytest.mark.parametrize("link", [Link, BlockingLink])
async def test_memory_that_is_taken_on_a_word_is_caught(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    monkeypatch: pytest.MonkeyPatch,
    link: type[Link] | type[BlockingLink],
) -> None:
    bomb = b"*67108864\r\n"

    class Believing:
        def __init__(self) -> None:
            self._reader = ReplyReader()
            self.read = self._reader.read

        def feed(self, data: bytes) -> None:
            if data == bomb:
                bytes(ANNOUNCED_BYTES)  # of which not one page is touched
            self._reader.feed(data)

    made = link.__init__

    def make(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self._reader = Believing()

    monkeypatch.setattr(link, "__init__", make)
    (error,) = await announce(connect, connect_blocking, bomb)
    assert isinstance(error, MemoryError)


#: More than any buffer between the two holds.
SENT_BYTES = 64 << 20
#: What is beyond the limits of a reader, and what follows for as long as somebody listens.
ENDLESS = {
    "string": (b"$536870913\r\n", b"x" * (1 << 20)),
    "array": (b"*67108864\r\n", b"$1048576\r\n%b\r\n" % (b"x" * (1 << 20))),
}


async def listen(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    kind: str,
) -> list[bool]:
    """Of both connections, whether they listened to all that came after such an announcement."""
    bomb, more = ENDLESS[kind]
    armed: list[bytes] = []

    def answer(words: list[bytes]) -> bytes | None:
        return armed.pop() if armed and words[-1] == b"dirty" else None

    with FakeServer(answer) as server:
        server.hangs_up = True
        request = ("ECHO", "dirty")
        armed.append(bomb + more * (SENT_BYTES // len(more) + 1))
        assert await connect(server.url).execute(*request, effect=Effect.READ) == b"dirty"
        await until(lambda: len(server.taken) == 1)
        armed.append(bomb + more * (SENT_BYTES // len(more) + 1))
        blocking = connect_blocking(server.url)
        ask = functools.partial(blocking.execute, *request, effect=Effect.READ)
        assert await asyncio.to_thread(ask) == b"dirty"
        await until(lambda: len(server.taken) == 2)
        return server.taken


@pytest.mark.fault(46)
@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_is_announced_beyond_the_limits_is_not_listened_to(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    kind: str,
) -> None:
    assert await listen(connect, connect_blocking, kind) == [False, False]


@pytest.mark.fault(46, control=True)
@pytest.mark.parametrize("kind", ENDLESS)
async def test_without_limits_all_that_comes_is_kept(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = functools.partial(ReplyReader, max_elements=1 << 30, max_bulk_bytes=1 << 40)
    monkeypatch.setattr("chasqui.transport.pipeline.ReplyReader", unlimited)
    assert await listen(connect, connect_blocking, kind) == [True, True]


class Forgetful:
    """Reads each chunk as if it were the first one."""

    def __init__(self) -> None:
        self._reader = ReplyReader()

    def feed(self, data: bytes) -> None:
        self._reader = ReplyReader()
        self._reader.feed(data)

    def read(self, builder: Builder | None = None) -> Any:
        return self._reader.read(builder)


@pytest.mark.fault(45, control=True)
@pytest.mark.parametrize("is_shaped", [False, True], ids=["plain", "shaped"])
def test_without_what_came_before_a_reply_in_two_pieces_is_another_one(is_shaped: bool) -> None:
    """Whatever is in it."""
    unseen = [
        recording
        for recording in recordings()[::5]
        if not wrong_cuts(recording, recording.shape if is_shaped else None, Forgetful)
    ]
    assert unseen == []
