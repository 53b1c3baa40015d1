"""`python -m tests.chaos.garbage`: a server that answers with anything at all, into connections
that live. The call behind each broken answer must get its own, and nothing may be left."""

import asyncio
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import uvloop

from chasqui._core.entry import EntryBuilder
from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyReader
from chasqui.errors import ChasquiError
from chasqui.model.config import Endpoint
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.recovery import DialPacing
from chasqui.transport.request import Effect, Request, commands
from tests.chaos.figure import Figure, Say, silent
from tests.core.memory import rss_bytes
from tests.faults.fake import usual
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutate import RESP, mutate
from tests.proxy import split

#: What a client may hold more after any number of bad answers.
GROWTH_MB = 64
#: How long a client waits for an answer. The server lets none wait.
TIMEOUT_S = 10.0
START_S = 60.0
#: How replies with entries are read, as the corpus numbers it.
SHAPES: tuple[Literal["streams", "range"], ...] = ("streams", "range")
#: How the next broken answer is read: half of them as plain values.
DRAWN = ("plain", "plain", "plain", *SHAPES)
#: Longer ones might come in two pieces, and then what is too much answers the next call.
MOST_BYTES = 32 * 1024
POOL = 300
#: Calls are told apart by their number, modulo this.
TAGS = 8
SAY_EVERY = 1_000

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, Loop] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
#: Of the broken answers, how many in a hundred each kind of connection gets: on two processors, the
#: first and the last of them take as long as the second.
SHARES = {"asyncio": 5, "uvloop": 50, "blocking": 45}

# ── The server ──────────────────────────────────────────────────────────────────────────────────


class Garbage:
    """Answers each DIRTY with broken bytes, or a part of the handshake that comes behind it, and
    all else as a server does."""

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        corpus = Corpus(luck)
        self._pools: dict[str, list[bytes]] = {shape: [] for shape in SHAPES}
        for _ in range(len(SHAPES) * POOL):
            number, reply = (told := corpus.entries())[0], told[1:]
            self._pools[SHAPES[number % len(SHAPES)]].append(reply)
        entries = [reply for pool in self._pools.values() for reply in pool[: POOL // len(SHAPES)]]
        self._pools["plain"] = [corpus.reply() for _ in range(POOL)] + entries
        #: The last call that was answered so: it may be sent again.
        self._last = b""
        #: In whose place the next handshake meets what, and whether the link ends behind it.
        self._next: tuple[bytes, bytes, bool] | None = None
        self.given = 0

    def answer(self, calls: list[list[bytes]]) -> tuple[bytes, bool]:
        """What is sent to some commands, and whether the link ends behind it."""
        out = []
        for words in calls:
            name = words[0]
            if name == b"GIVEN":
                out.append(b":%d\r\n" % self.given)
                continue
            if name == b"DIRTY" and words[2] != self._last:
                self._last = words[2]
                chance = self._luck.random()
                if chance < 0.1:
                    place = b"HELLO" if chance < 0.05 else b"COMMAND"
                    self._next = place, *self._draw("plain", place)
                    return b"".join(out), True
                data, is_cut = self._draw(words[1].decode(), name)
            elif self._next is not None and name == self._next[0]:
                _, data, is_cut = self._next
                self._next = None
            else:
                out.append(usual(words))
                continue
            out.append(data)
            self.given += 1
            if is_cut:
                return b"".join(out), True
        return b"".join(out), False

    def _draw(self, shape: str, place: bytes) -> tuple[bytes, bool]:
        """Broken bytes, and whether a client would wait for more.

        An answer with a part of another behind it comes in the place of HELLO only. Elsewhere the
        next call might go out before the end of the link is seen, and never get here.
        """
        while True:
            pool = self._pools[shape if self._luck.random() < 0.75 else "plain"]
            data = mutate(RESP, pool, self._luck)[:MOST_BYTES]
            replies, is_cut = read(data, builder_of(shape))
            if place == b"HELLO" or not (replies and is_cut):
                return data, is_cut


def builder_of(shape: str) -> EntryBuilder | None:
    return next((EntryBuilder(one) for one in SHAPES if one == shape), None)


def read(data: bytes, builder: EntryBuilder | None) -> tuple[int, bool]:
    """How many replies this is, and whether it ends in the middle of one, so that a client waits
    for the rest. Of all else it must find out by itself whether the link is of use."""
    reader = ReplyReader()
    replies = 0
    try:
        reader.feed(data)
        while (reply := reader.read(None if replies else builder)) is not INCOMPLETE:
            replies += type(reply) is not Push
    except ProtocolError:
        return replies, False
    with contextlib.suppress(ProtocolError):
        reader.feed(b":7\r\n")
        return replies, not replies or reader.read() != 7
    return replies, True


@functools.cache
def _calls(data: bytes) -> list[list[bytes]]:
    """The commands that came at once, as words. There are few different ones."""
    frames, rest = split(data)
    assert not rest
    return [frame.split(b"\r\n")[2::2] for frame in frames]


def serve(listener: socket.socket, seed: int, is_ready: Event) -> None:
    """Take one link after the other until killed."""
    source = Garbage(random.Random(seed))
    is_ready.set()
    while True:
        link, _ = listener.accept()
        with contextlib.suppress(OSError), link:
            while data := link.recv(1 << 16):
                told, is_last = source.answer(_calls(data))
                link.sendall(told)
                if is_last:
                    break


@contextlib.contextmanager
def server(seed: int) -> Iterator[str]:
    """The URL of such a server: a process of its own, so that it takes no time from its client."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()
        context = multiprocessing.get_context("spawn")
        is_ready = context.Event()
        process = context.Process(target=serve, args=(listener, seed, is_ready), daemon=True)
        process.start()
        try:
            assert is_ready.wait(START_S)
            yield f"unix://{path}"
        finally:
            process.kill()
            process.join()


# ── The client ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Tally:
    """What became of the calls of one connection."""

    #: Broken answers that the server gave.
    given: int = 0
    #: Of the calls that met one: could make something of it.
    answered: int = 0
    #: Raised an error of ours.
    refused: int = 0
    #: Calls behind a broken answer: got another one's, or none.
    mismatched: int = 0
    failed: int = 0
    grown_mb: int = 0
    descriptors_left: int = 0
    seconds: int = 0

    @contextlib.contextmanager
    def what_is_left(self) -> Iterator[None]:
        """Notes what this process has more than before. Both times it has a link."""
        gc.collect()  # what others left behind is not to be freed meanwhile
        grown, files, began_s = rss_bytes(), _descriptors(), time.monotonic()
        yield
        self.seconds = round(time.monotonic() - began_s)
        self.grown_mb = (rss_bytes() - grown) >> 20
        self.descriptors_left = _descriptors() - files

    @property
    def is_right(self) -> bool:
        return not (self.mismatched or self.failed)

    def note(self, clean: Any, tag: int, dirty: Any) -> None:
        """A call that must be answered, and one that may be."""
        if isinstance(clean, Exception):
            self.failed += 1
        elif clean != b"%d" % tag:
            self.mismatched += 1
        if not isinstance(dirty, Exception):
            self.answered += 1
        elif isinstance(dirty, ChasquiError):
            self.refused += 1
        else:
            raise dirty


def rounds(inputs: int, luck: random.Random) -> Iterator[tuple[int, Request, Request]]:
    """For each broken answer, the call behind the one before, and the call that meets it."""
    for number in range(inputs):
        tag, shape = number % TAGS, luck.choice(DRAWN)
        effect = Effect.READ if luck.random() < 0.25 else Effect.ONCE
        dirty = commands(("DIRTY", shape, tag), effect=effect, builder=builder_of(shape))
        yield tag, echo(tag), dirty


def echo(tag: int) -> Request:
    return commands(("ECHO", tag), effect=Effect.READ)


def given() -> Request:
    return commands(("GIVEN",), effect=Effect.READ)


async def into_asyncio(
    connection: Connection, tally: Tally, inputs: int, luck: random.Random, say: Say = silent
) -> None:
    """Let a connection meet so many broken answers, as long as all is right."""

    async def outcome(future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except Exception as error:
            return error

    await connection.connect()
    with tally.what_is_left():
        for number, (tag, clean, dirty) in enumerate(rounds(inputs, luck)):
            first, second = connection.submit(clean), connection.submit(dirty)
            tally.note(await outcome(first), tag, await outcome(second))
            if not tally.is_right:
                return
            if number % SAY_EVERY == 0:
                say(number)
        tally.failed += await outcome(connection.submit(echo(1))) != b"1"
        tally.given = await connection.submit(given())


def into_blocking(
    connection: BlockingConnection,
    tally: Tally,
    inputs: int,
    luck: random.Random,
    say: Say = silent,
) -> None:
    """The same for a blocking one."""
    connection.connect()
    with tally.what_is_left():
        for number, (tag, clean, dirty) in enumerate(rounds(inputs, luck)):
            first, second = connection.call_each((clean, dirty), ahead=2)
            tally.note(first, tag, second)
            if not tally.is_right:
                return
            if number % SAY_EVERY == 0:
                say(number)
        tally.failed += connection.call_each((echo(1),), ahead=1) != [b"1"]
        tally.given = connection.call(given())


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Dials are not spaced out, and links that are dropped are not told of: there are too many."""
    logger = logging.getLogger("chasqui")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with mock.patch.object(DialPacing, "wait_s", _no_wait_s):
            yield
    finally:
        logger.setLevel(level)


def _no_wait_s(redial: DialPacing, now_s: float) -> float:
    return 0.0


def measure(kind: str, inputs: int, seed: int, *, say: Say = silent) -> dict[str, Any]:
    """Let one kind of connection meet so many broken answers, and look for what is left of them."""
    tally, luck = Tally(), random.Random(seed)
    with server(seed) as url, at_once():
        endpoint = Endpoint.parse(url)
        options: dict[str, Any] = {"key": b"q", "request_timeout_s": TIMEOUT_S}
        if kind == "blocking":
            with contextlib.closing(BlockingConnection(endpoint, **options)) as blocking:
                into_blocking(blocking, tally, inputs, luck, say)
        else:

            async def run() -> None:
                connection = Connection(endpoint, **options)
                try:
                    await into_asyncio(connection, tally, inputs, luck, say)
                finally:
                    await connection.close()

            with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
                runner.run(run())
    return {"inputs": inputs, **asdict(tally)}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be, of one connection."""
    names = ("mismatched", "failed", "descriptors_left")
    found = [f"{told[name]:,} {name}" for name in names if told[name]]
    if told["given"] != told["inputs"]:
        found.append(f"{told['given']:,} broken answers given, not {told['inputs']:,}")
    if told["grown_mb"] > GROWTH_MB:
        found.append(f"{told['grown_mb']} MB grown")
    return found


def lane(kind: str, inputs: int, seed: int, found: "SimpleQueue[Any]") -> None:
    """Measure one kind, in a process of its own and on one processor: to wake a process on another
    one takes longer than all that it then does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[list(SHARES).index(kind) % len(processors)]})
    say = functools.partial(Figure("garbage", None).say, of=f"{kind}: ")
    found.put((kind, measure(kind, inputs, seed, say=say)))


def main() -> int:
    figure = Figure("garbage", __doc__)
    figure.parser.add_argument(
        "--inputs", type=int, default=10_000_000, help="broken answers for all connections together"
    )
    asked = figure.arguments()
    context = multiprocessing.get_context("spawn")
    found: SimpleQueue[Any] = context.SimpleQueue()
    lanes = [
        context.Process(target=lane, args=(kind, asked.inputs * share // 100, asked.seed, found))
        for kind, share in SHARES.items()
    ]
    try:
        for one in lanes:
            one.start()
        for one in lanes:
            one.join()
    finally:
        for one in lanes:
            if one.is_alive():
                one.terminate()
    each = dict(found.get() for one in lanes if one.exitcode == 0)
    failures = [f"{kind}: {line}" for kind, told in each.items() for line in wrong(told)]
    failures += [f"{kind}: ended in the middle" for kind in SHARES if kind not in each]
    each = {kind: each[kind] for kind in SHARES if kind in each}
    return figure.end(asked.json, {"seed": asked.seed, "connections": each}, failures)


if __name__ == "__main__":
    sys.exit(main())
