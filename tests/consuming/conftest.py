"""Workers on each server, and a plain connection to see what they left in Redis."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
import redis as redis_py

from chasqui._core.envelope import decode_envelope, encode_envelope
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.metrics.testing import InMemorySink
from chasqui.model import clock
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.model.payload import encode
from chasqui.queue import Queue
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from chasqui.worker import Worker
from tests.servers import RemoteServer, Server

Redis: TypeAlias = Callable[..., Awaitable[Any]]
#: How long a fact may take on a busy machine before the test says that it never came.
WAIT_S = 30.0


class Running:
    """A worker that runs, and what it tells."""

    def __init__(self, worker: Worker, metrics: InMemorySink) -> None:
        self.worker = worker
        self.metrics = metrics
        self.task = asyncio.ensure_future(worker.run())

    async def next(self, kind: Any) -> Any:
        """The next metric of a kind that was not given yet."""
        return await self.fact(self.metrics.next(kind))

    async def completed(self, count: int) -> None:
        await self.fact(self._told(lambda: self.metrics.jobs_completed >= count))

    async def ended(self, count: int) -> None:
        """So many runs are over, whether they count or not."""

        async def are_over() -> bool:
            health = self.worker.health()
            return health is not None and health.finished >= count

        await self.fact(until(are_over, "the runs are over"))

    async def buried(self, count: int) -> None:
        await self.fact(self._told(lambda: self.metrics.dlq_count() >= count))

    async def retried(self, count: int) -> None:
        await self.fact(self._told(lambda: self.metrics.total_retries >= count))

    async def fact(self, waited: Awaitable[Any]) -> Any:
        """What is waited for, unless the worker ends before it."""
        waiting = asyncio.ensure_future(waited)
        done, _ = await asyncio.wait(
            {waiting, self.task}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if waiting in done:
            return waiting.result()
        waiting.cancel()
        if done:
            self.task.result()
        raise AssertionError(f"it never came: {'the worker ended' if done else 'time is up'}")

    async def result(self, queue: Queue, job_id: str) -> Any:
        """What the job's handler returned, as soon as it is stored."""
        return await self.fact(until(lambda: queue.get_job_result(job_id), "the result is stored"))

    async def stop(self) -> None:
        await self.worker.close()
        await asyncio.wait_for(asyncio.shield(self.task), WAIT_S)

    async def _told(self, fact: Callable[[], bool]) -> None:
        """Wait for a fact that only a new record can make true."""
        while not fact():
            waiter = asyncio.get_running_loop().create_future()
            self.metrics._waiters.append(waiter)
            await waiter


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(queue_name)


@pytest.fixture
async def redis_at(keys: Keys) -> AsyncIterator[Callable[[str], Redis]]:
    """Gives what runs plain commands on the server at a URL."""
    made: list[Connection] = []

    def make(url: str) -> Redis:
        connection = Connection(Endpoint.parse(url), key=keys.stream)
        made.append(connection)

        async def run(*arguments: Any) -> Any:
            return await connection.execute(*arguments, effect=Effect.READ)

        return run

    yield make
    for connection in made:
        await connection.close()


@pytest.fixture
def redis(server: Server | RemoteServer, redis_at: Callable[[str], Redis]) -> Redis:
    """Runs plain commands: `await redis("GET", key)`."""
    return redis_at(server.url)


@pytest.fixture
async def queue(server: Server | RemoteServer, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, redis_url=server.url) as queue:
        yield queue


@pytest.fixture
async def start_at(queue_name: str) -> AsyncIterator[Callable[..., Running]]:
    """Starts workers on the server at a URL, and stops them after the test."""
    started: list[Running] = []

    def start(url: str, handler: Any, **options: Any) -> Running:
        metrics = InMemorySink()
        options.setdefault("read_block_ms", 500)
        options.setdefault("shutdown_deadline_s", 2)
        worker = Worker(queue_name, handler, redis_url=url, metrics=metrics, **options)
        started.append(Running(worker, metrics))
        return started[-1]

    yield start
    for running in started:
        await running.worker.close()
    for running in started:
        await asyncio.wait({running.task}, timeout=WAIT_S)


@pytest.fixture
def start(
    server: Server | RemoteServer, start_at: Callable[..., Running]
) -> Callable[..., Running]:
    """Starts workers of the test's queue, on one server after the other."""
    return lambda handler, **options: start_at(server.url, handler, **options)


@pytest.fixture
def add_raw(redis: Redis, keys: Keys) -> Callable[..., Awaitable[bytes]]:
    """Puts an entry of any kind into the stream; its id."""

    async def add(envelope: bytes | None, name: bytes | None = None) -> bytes:
        fields: list[bytes] = [] if envelope is None else [b"d", envelope]
        fields += [] if name is None else [b"n", name]
        entry_id: bytes = await redis("XADD", keys.stream, "*", *(fields or [b"x", b"y"]))
        return entry_id

    return add


@pytest.fixture
def dead(redis: Redis, keys: Keys) -> Callable[[], Awaitable[list[dict[bytes, bytes]]]]:
    """Gives the entries of the dead-letter queue."""

    async def read() -> list[dict[bytes, bytes]]:
        return [fields_of(entry) for entry in await redis("XRANGE", keys.dlq, "-", "+")]

    return read


@pytest.fixture
def events(redis: Redis, keys: Keys) -> Callable[[], Awaitable[list[dict[bytes, bytes]]]]:
    """Gives the events so far, each with its fields in order."""

    async def read() -> list[dict[bytes, bytes]]:
        return [fields_of(entry) for entry in await redis("XRANGE", keys.events, "-", "+")]

    return read


def fields_of(entry: Any) -> dict[bytes, bytes]:
    pairs = iter(entry[1])
    return dict(zip(pairs, pairs, strict=True))


def envelope(data: Any = None, *, job_id: str = "job", attempt: int = 0, **parts: Any) -> bytes:
    """The bytes of a job's envelope."""
    payload = parts.pop("payload", None)
    return encode_envelope(
        job_id, encode(data) if payload is None else payload, 1_700_000_000_000, attempt, **parts
    )


def attempt_of(data: bytes) -> int:
    return decode_envelope(data).attempt


async def until(fact: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The fact, as soon as what a server says makes it true."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := await fact()):
        assert time.monotonic() < deadline_s, f"it never came true: {what}"
        await asyncio.sleep(0.01)
    return found


async def at_rest(redis: Redis, keys: Keys, group: str = "default") -> bool:
    """Whether nothing waits, runs or is delayed."""
    return not await redis("EVAL", COUNT, 2, keys.stream, keys.delayed, group)


async def told_done(redis: Redis, keys: Keys) -> Counter[str]:
    """How often it was told of each job that it is done."""
    events = await redis("XRANGE", keys.events, "-", "+")
    return Counter(
        fields[fields.index(b"id") + 1].decode()
        for _, fields in events
        if fields[:2] == [b"e", b"completed"]
    )


#: All at one moment: jobs go from one to the other.
COUNT = """
local count = redis.call('XLEN', KEYS[1]) + redis.call('ZCARD', KEYS[2])
return count > 0 and count or redis.call('XPENDING', KEYS[1], ARGV[1])[1]
"""


# ── Leases ──────────────────────────────────────────────────────────────────────────────────────


class Renewals:
    """Sees how often the leases of pending entries begin anew."""

    def __init__(self, client: redis_py.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._idle_ms: dict[bytes, int] = {}
        self._counts: Counter[bytes] = Counter()

    def look(self) -> int:
        """How often it was seen so far, of the entry with the fewest; to be called all the time."""
        held = self._client.xpending_range(self._keys.stream, DEFAULT_GROUP, "-", "+", 100)
        for one in held:
            entry_id, idle_ms = one["message_id"], one["time_since_delivered"]
            self._counts[entry_id] += idle_ms < self._idle_ms.get(entry_id, 0)
            self._idle_ms[entry_id] = idle_ms
        return min((self._counts[one["message_id"]] for one in held), default=0)


#: Heartbeats come at a third of the lease: with so many of them it is over, and a third more.
PAST_LEASE = 5


def renew_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heartbeats say that all is well, and not ask."""

    def pretend(self: Heartbeat) -> int:
        self._held.renewed(clock.boot_s())
        return 0

    monkeypatch.setattr(Heartbeat, "run_once", pretend)
