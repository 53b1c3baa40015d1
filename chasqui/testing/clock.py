"""The clock of a test. It moves by making delayed jobs due earlier, all of them by as much, so that
their order stays, also among jobs that are delayed later."""

import asyncio
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from chasqui.events.writer import EventWriter
from chasqui.managing.state import Counts, counts
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.scripts import timing
from chasqui.scripts.timing import Promoted
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import time_us

#: Makes all delayed jobs due earlier; its header says how.
_MOVE: Final = files("chasqui.testing").joinpath("move.lua").read_text()


class Moves:
    """How far the clock of a test was moved, and when."""

    def __init__(self) -> None:
        #: Each move: the time of this machine, and how far; both in ms.
        self._moves: list[tuple[int, int]] = []

    async def note(self, at_ms: int, by_ms: int) -> None:
        """Add a move that began at `at_ms`. Returns in a later millisecond, so that the jobs that
        are created from now on are known by their time."""
        self._moves.append((at_ms, by_ms))
        while now_ms() == at_ms:  # noqa: ASYNC110 - it is the clock that is waited for
            await asyncio.sleep(0)

    def since(self, created_at_ms: int) -> int:
        """How far it was moved after a job was created, in ms."""
        return sum(by_ms for at_ms, by_ms in self._moves if at_ms >= created_at_ms)


@dataclass(frozen=True, slots=True)
class Look:
    """What a queue holds, at one moment."""

    counts: Counts
    #: How long until its first delayed job is due, in ms; None if there is none.
    next_due_ms: int | None

    @property
    def is_busy(self) -> bool:
        """Whether jobs wait or run."""
        return bool(self.counts.waiting or self.counts.pending)


class QueueClock:
    """One queue of a test, seen by its clock."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._events = EventWriter(connection, keys)

    async def look(self) -> Look:
        first = commands(
            ("TIME",), ("ZRANGE", self._keys.delayed, 0, 0, "WITHSCORES"), effect=Effect.READ
        )
        # One after the other: a job that is to be retried leaves the stream for the delayed ones,
        # and must not be overlooked in both.
        found = await self._connection.run(counts(self._keys, DEFAULT_GROUP))
        time_now, scores = await self._connection.submit(first)
        return Look(found, _due_in_ms(time_now, scores))

    async def move(self, by_ms: int) -> int:
        """Make every delayed job due so much earlier; how many are due first, at the same time."""
        move = ("EVAL", _MOVE, 1, self._keys.delayed, by_ms)
        first: int = await self._connection.execute(*move, effect=Effect.ONCE)
        return first

    async def promote(self, most: int) -> None:
        """Promote so many of the jobs that are due: later ones stay, though they may be due."""
        reply = await self._connection.submit(timing.promote(self._keys, most, None))
        promoted = Promoted.parse(reply)
        self._events.promoted(promoted.jobs, promoted.malformed, promoted.now_ms)


def now_ms() -> int:
    """The time by which jobs are created here."""
    return time.time_ns() // 1_000_000


def pairs(reply: list[Any]) -> list[tuple[bytes, float]]:
    """Members with their scores, in RESP3's pairs or RESP2's flat list."""
    if reply and not isinstance(reply[0], list):
        reply = list(zip(reply[::2], reply[1::2], strict=True))
    return [(member, float(score)) for member, score in reply]


def _due_in_ms(now: list[bytes], scores: list[Any]) -> int | None:
    if not scores:
        return None
    return max(0, int(pairs(scores)[0][1]) - time_us(now) // 1000)
