"""Destinations that cannot be written: an entry stays until its copy is made, and moves then.

The scene is played twice: as it is, and as a control with the one protection gone that it is about.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from chasqui import Job, Queue
from chasqui.consuming.relocator import Moves, Relocator
from chasqui.model.keys import Keys
from chasqui.scripts import settling
from chasqui.transport.request import Script
from tests.consuming.conftest import Redis, Running, until
from tests.servers import KINDS, Server

USER = ("ACL", "SETUSER", "worker")
JOBS = 4


@dataclass(frozen=True, slots=True)
class Way:
    """One way out of the stream: the script that moves, where to, and with which command."""

    script: str
    destination: str
    command: str
    counts: str
    attempts: int
    #: The same move by one that lets go of an entry before it has made its copy.
    ack_first: bytes = field(repr=False)


WAYS = [
    Way("BURY", "dlq", "xadd", "XLEN", 1, b"""
        local answers, i = {}, 8
        while i <= #ARGV do
          local last = i + 1 + ARGV[i + 1]
          redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
          redis.call('XDEL', KEYS[1], ARGV[i])
          redis.call('XADD', KEYS[2], '*', unpack(ARGV, i + 2, last))
          answers[#answers + 1] = '1'
          i = last + 1
        end
        return table.concat(answers)"""),
    Way("RETRY", "delayed", "zadd", "ZCARD", 5, b"""
        local answers = {}
        for i = 3, #ARGV, 4 do
          redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
          redis.call('XDEL', KEYS[1], ARGV[i])
          redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i + 2])
          answers[#answers + 1] = '1'
        end
        return table.concat(answers)"""),
]  # fmt: skip

# ── Why the server says no, and yes again ───────────────────────────────────────────────────────


async def no_memory(redis: Redis, keys: Keys, way: Way) -> None:
    await redis("SET", "ballast", b"x" * 4_000_000)
    await redis("CONFIG", "SET", "maxmemory", "3mb")


async def wrong_type(redis: Redis, keys: Keys, way: Way) -> None:
    destination = getattr(keys, way.destination)
    await redis("RENAME", destination, destination + b":aside")
    await redis("SET", destination, "of another type")


async def no_command(redis: Redis, keys: Keys, way: Way) -> None:
    """What a script may not do it learns in its middle."""
    await redis(*USER, f"-{way.command}")


async def no_key(redis: Redis, keys: Keys, way: Way) -> None:
    """The script is not even begun."""
    names = {"stream", "events", "paused", "wake", "delayed", "dlq"} - {way.destination}
    await redis(*USER, "resetkeys", *(b"~" + getattr(keys, name) for name in names))


async def relieve(redis: Redis, keys: Keys, way: Way) -> None:
    await redis("CONFIG", "SET", "maxmemory", "0")
    await redis(*USER, "+@all", "-@dangerous", "+info", "~*")
    destination = getattr(keys, way.destination)
    if await redis("EXISTS", destination + b":aside"):
        await redis("RENAME", destination + b":aside", destination)


Refuse = Callable[[Redis, Keys, Way], Awaitable[None]]

# ── The scene ───────────────────────────────────────────────────────────────────────────────────


class Stage:
    """A server of its own with a worker whose moves can be refused."""

    def __init__(
        self, server: Server, redis: Redis, keys: Keys, start_at: Callable[..., Running]
    ) -> None:
        self.server, self.redis, self.keys = server, redis, keys
        self.start_at = start_at
        #: Entries whose move was refused at least once.
        self.refused: set[bytes] = set()

    async def play(self, refuse: Refuse, way: Way) -> None:
        """One job moves; several are refused, stay, and move when they can."""
        redis, keys = self.redis, self.keys
        await relieve(redis, keys, way)
        gate = asyncio.Event()
        begun: set[str] = set()

        async def handler(job: Job) -> None:
            begun.add(job.id)
            if len(begun) > 1:
                await gate.wait()
            raise ValueError

        url = self.server.url.replace("://", "://worker:secret@")
        options = {"delayed_enabled": False, "run_scheduler": False, "events_enabled": False}
        running = self.start_at(url, handler, **options)
        moved = running.buried if way.script == "BURY" else running.retried
        draft = {"name": "n", "data": None, "attempts": way.attempts}
        async with Queue(keys.queue, redis_url=self.server.url) as queue:
            await queue.add_bulk([draft])
            await moved(1)
            await queue.add_bulk([draft] * JOBS)

        async def all_run() -> bool:
            return len(begun) == 1 + JOBS

        async def all_refused() -> bool:
            return len(self.refused) == JOBS

        await until(all_run, "they run")
        await refuse(redis, keys, way)
        gate.set()
        try:
            await until(all_refused, "their moves are refused")
            assert await redis("XLEN", keys.stream) == JOBS, "one left without its copy"
            health = running.worker.health()
            assert health is not None
            assert health.moves_waiting == JOBS, "one was given up"
        finally:
            await relieve(redis, keys, way)
        await moved(1 + JOBS)
        assert await redis("XLEN", keys.stream) == 0
        assert await redis(way.counts, getattr(keys, way.destination)) == 1 + JOBS


@pytest.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest,
    private_server: Callable[..., Server],
    redis_at: Callable[[str], Redis],
    start_at: Callable[..., Running],
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    server = private_server(request.param)
    redis = redis_at(server.url)
    await redis(*USER, "on", ">secret")
    stage = Stage(server, redis, keys, start_at)
    failed = Relocator._failed

    def note(self: Relocator, batch: Moves, error: Exception) -> None:
        failed(self, batch, error)
        stage.refused.update(move.entry.id for move in batch.moves)

    monkeypatch.setattr(Relocator, "_failed", note)
    return stage


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.script.lower())
@pytest.mark.parametrize(
    "refuse",
    [
        pytest.param(no_memory, marks=pytest.mark.fault(21)),
        pytest.param(wrong_type, marks=pytest.mark.fault(28)),
        pytest.param(no_command, marks=pytest.mark.fault(29)),
        pytest.param(no_key, marks=pytest.mark.fault(29)),
    ],
)
async def test_what_cannot_move_stays_and_moves_later(
    stage: Stage, refuse: Refuse, way: Way
) -> None:
    await stage.play(refuse, way)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.script.lower())
@pytest.mark.parametrize(
    "refuse",
    [
        pytest.param(wrong_type, marks=pytest.mark.fault(28, control=True)),
        pytest.param(no_command, marks=pytest.mark.fault(29, control=True)),
    ],
)
async def test_an_ack_before_the_copy_loses_the_job(
    stage: Stage, refuse: Refuse, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = hashlib.sha1(way.ack_first, usedforsecurity=False).hexdigest().encode()
    monkeypatch.setattr(settling, way.script, Script("ack first", way.ack_first, sha))
    with pytest.raises(AssertionError, match="one left without its copy"):
        await stage.play(refuse, way)


@pytest.mark.fault(21, control=True)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.script.lower())
async def test_a_refusal_that_is_taken_for_an_answer_is_a_move_given_up(
    stage: Stage, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory a script that has acknowledged may go on: not its order protects there, but
    that the move is tried again."""
    failed = Relocator._failed

    def give_up(self: Relocator, batch: Moves, error: Exception) -> None:
        failed(self, batch, error)
        self._finished(batch)

    monkeypatch.setattr(Relocator, "_failed", give_up)
    with pytest.raises(AssertionError, match="one was given up"):
        await stage.play(no_memory, way)
