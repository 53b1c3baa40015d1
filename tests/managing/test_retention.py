"""What is kept of the events stream: the queue's own number, and what readers have not read."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue, ServerError, Worker, sync
from chasqui.cli.rights import _CALL
from chasqui.managing import retention
from chasqui.managing.retention import EVENTS_KEPT, TRIM_ENTRIES, Log
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.scripts import managing
from chasqui.transport.blocking import BlockingConnection
from tests.consuming.conftest import WAIT_S, until
from tests.servers import RemoteServer, Server

#: Entries that a server keeps together, and drops together.
NODE = 100


class Stream:
    """An events stream, and what is done to it."""

    def __init__(self, url: str, queue: str) -> None:
        self.keys = Keys(queue)
        self.log = Log.events(self.keys)
        self.connection = BlockingConnection(Endpoint.parse(url), key=self.keys.stream)
        self.redis = redis_py.Redis.from_url(url)
        self.ids: list[str] = []

    def add(self, count: int) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for _ in range(count):
            pipeline.xadd(self.keys.events, {"e": "active", "id": "j", "ts": "1"})
        self.ids += [entry_id.decode() for entry_id in pipeline.execute()]

    def keep(self, max_len: int | None) -> None:
        self.connection.run(retention.set_max_len(self.log, max_len))

    def read(self, reader: str, count: int, *, lease_ms: int = 600_000, hold: int = 10**6) -> bool:
        """A reader has read so many of all entries."""
        position = self.ids[count - 1] if count else "0-0"
        plan = retention.reading(self.log, reader, position, count, lease_ms=lease_ms, hold=hold)
        return self.connection.run(plan)

    def forget(self, reader: str) -> bool:
        return self.connection.run(retention.forget(self.log, reader))

    def look(self) -> retention.Retention:
        return self.connection.run(retention.look(self.log))

    def trim(self) -> int:
        """Trim until there is no more to trim; how many entries are left."""
        left = -1
        while left != (left := self.redis.xlen(self.keys.events)):
            trim = retention.Trimmer(self.log).wrote(1)
            assert trim is not None, "the first is due at once"
            self.connection.call(trim)
        return left

    def close(self) -> None:
        self.connection.close()
        self.redis.close()


@pytest.fixture
def stream_at(queue_name: str) -> Iterator[Callable[[str], Stream]]:
    made: list[Stream] = []

    def make(url: str) -> Stream:
        made.append(Stream(url, queue_name))
        return made[-1]

    yield make
    for stream in made:
        stream.close()


@pytest.fixture
def stream(server: Server | RemoteServer, stream_at: Callable[[str], Stream]) -> Stream:
    return stream_at(server.url)


def _until(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline_s, "it never came true"


# ── The number ──────────────────────────────────────────────────────────────────────────────────


def test_a_queue_keeps_what_it_is_told_to(stream: Stream) -> None:
    stream.add(5000)
    assert stream.trim() == 5000
    stream.keep(1500)
    assert 1500 <= stream.trim() <= 1500 + NODE
    stream.keep(None)
    stream.add(2000)
    assert stream.trim() >= 3500
    assert stream.look().max_len == EVENTS_KEPT


@pytest.mark.parametrize("max_len", ["nan", "inf", "-5", "1e3", "", "many", "9" * 30])
def test_a_setting_that_is_no_number_does_not_stop_the_trimming(
    stream: Stream, max_len: str
) -> None:
    stream.log = dataclasses.replace(stream.log, default=300)
    stream.redis.hset(stream.keys.config, "events_max_len", max_len)
    stream.add(1000)
    assert 300 <= stream.trim() < 300 + NODE
    assert stream.look().max_len == 300


def test_one_trim_drops_a_bounded_number(stream: Stream) -> None:
    """A server that has much to drop serves others between."""
    stream.add(15_000)
    stream.keep(100)
    trim = retention.Trimmer(stream.log).wrote(1)
    assert trim is not None
    stream.connection.call(trim)
    assert 5000 <= stream.redis.xlen(stream.keys.events) < 15_000
    assert stream.trim() <= 100 + NODE


@pytest.mark.parametrize("max_len", [0, -1, 10**16, True, 1.5, "many"])
async def test_a_number_that_makes_no_sense_is_refused(
    redis_86: Server, queue_name: str, max_len: Any
) -> None:
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        with pytest.raises((ValueError, TypeError), match="events_max_len"):
            await queue.set_events_max_len(max_len)
        assert (await queue.get_events_retention()).max_len == EVENTS_KEPT


async def test_workers_take_the_number_from_the_server(
    server: Server | RemoteServer, queue_name: str, stream: Stream
) -> None:
    """Also one that was started before; and two writers trim alike."""

    async def handler(job: Job) -> None:
        pass

    worker = Worker(queue_name, handler, redis_url=server.url)
    running = asyncio.create_task(worker.run())
    async with Queue(queue_name, redis_url=server.url) as queue:
        await queue.set_events_max_len(700)
        for _ in range(3):
            await queue.add_bulk([{"name": "n", "data": i} for i in range(2000)])
        await until(lambda: drained(queue), "all are done")
    await worker.close()
    await running
    # Each run wrote two events; the worker counts one of them.
    assert 700 <= stream.redis.xlen(stream.keys.events) <= 700 + NODE + 2 * (TRIM_ENTRIES + 2000)
    assert stream.trim() <= 700 + NODE


async def drained(queue: Queue) -> bool:
    counts = await queue.counts()
    return counts.waiting + counts.pending == 0


def test_a_deleted_queue_has_no_settings(server: Server | RemoteServer, queue_name: str) -> None:
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        queue.set_events_max_len(7)
        assert queue.get_events_retention().max_len == 7
        assert queue.obliterate() == 1
        assert queue.get_events_retention() == retention.Retention(EVENTS_KEPT, 0, ())


# ── Readers ─────────────────────────────────────────────────────────────────────────────────────


def test_what_a_living_reader_has_not_read_is_kept(stream: Stream) -> None:
    stream.keep(1000)
    assert stream.read("lake", 0) is False
    stream.add(4000)
    assert stream.trim() == 4000
    assert stream.read("lake", 2500) is True
    assert 1500 <= stream.trim() <= 1500 + NODE
    assert stream.read("lake", 4000) is True
    assert 1000 <= stream.trim() <= 1000 + NODE  # the newest stay, read or not


def test_a_reader_holds_no_more_than_it_may(stream: Stream) -> None:
    stream.keep(500)
    stream.read("lake", 0, hold=2000)
    stream.add(6000)
    assert 2000 <= stream.trim() <= 2000 + NODE


def test_the_slowest_reader_decides(stream: Stream) -> None:
    stream.keep(100)
    stream.add(4000)
    stream.read("quick", 3900)
    stream.read("slow", 1000)
    assert 3000 <= stream.trim() <= 3000 + NODE
    assert stream.forget("slow") is True
    assert stream.forget("slow") is False
    assert 100 <= stream.trim() <= 100 + NODE


def test_a_dead_reader_holds_nothing_and_is_still_known(stream: Stream) -> None:
    stream.keep(100)
    stream.add(3000)
    stream.read("lake", 0, lease_ms=1)
    _until(lambda: not stream.look().readers[0].is_alive)
    assert stream.trim() <= 100 + NODE
    (reader,) = stream.look().readers
    assert (reader.name, reader.position, reader.alive_ms) == ("lake", "0-0", 0)


def test_one_that_is_long_dead_is_forgotten(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "FORGET_MS", 1)
    stream.add(1)
    stream.read("gone", 1, lease_ms=1)
    _until(lambda: not stream.look().readers[0].is_alive)

    def is_forgotten() -> bool:
        stream.read("here", 1)
        return [one.name for one in stream.look().readers] == ["here"]

    _until(is_forgotten)


def test_how_far_behind_a_reader_is(server: Server | RemoteServer, stream: Stream) -> None:
    counts = server.name != "redis-6.2"
    stream.add(300)
    stream.read("one with spaces, ü", 100)
    stream.read("second", 300)
    first, second = stream.look().readers
    assert first.name == "one with spaces, ü"
    assert first.position == stream.ids[99]
    assert (first.lag, first.lost) == ((200, 0) if counts else (None, None))
    assert first.lag_ms == int(stream.ids[-1].split("-")[0]) - int(stream.ids[99].split("-")[0])
    assert 0 < first.alive_ms <= 600_000
    assert (second.lag, second.lag_ms) == (0 if counts else None, 0)
    stream.redis.xtrim(stream.keys.events, maxlen=150, approximate=False)
    assert stream.look().readers[0].lost == (50 if counts else None)
    stream.redis.delete(stream.keys.events)  # made anew: what was read is more than there is
    stream.add(5)
    assert stream.look().readers[0].lag is None


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\0", "x" * 257, 7, None])
def test_a_name_that_cannot_be_kept_is_refused(stream_at: Any, redis_86: Server, name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="reader"):
        stream_at(redis_86.url).read(name, 0)


# ── Faults ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9", "redis-6.2"])
def test_a_full_server_is_trimmed(
    private_server: Callable[..., Server], stream_at: Callable[[str], Stream], kind: str
) -> None:
    stream = stream_at(private_server(kind).url)
    stream.keep(100)
    stream.read("lake", 0, hold=2000)
    stream.add(5000)
    stream.redis.config_set("maxmemory", 1)
    with pytest.raises(redis_py.exceptions.OutOfMemoryError):
        stream.add(1)
    assert 2000 <= stream.trim() <= 2000 + NODE
    with pytest.raises(ServerError, match="OOM"):
        stream.read("lake", 5000)
    stream.redis.config_set("maxmemory", 0)
    stream.read("lake", 5000)
    assert stream.trim() <= 100 + NODE


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9", "redis-6.2"])
def test_settings_and_readers_outlive_a_restart(
    private_server: Callable[..., Server], stream_at: Callable[[str], Stream], kind: str
) -> None:
    server = private_server(kind, appendonly="yes")
    stream = stream_at(server.url)
    stream.keep(100)
    stream.add(3000)
    stream.read("lake", 500)
    server.kill()
    server.start()
    assert 2500 <= stream.trim() <= 2500 + NODE  # its scripts are gone, too
    assert stream.look().max_len == 100
    assert [one.name for one in stream.look().readers] == ["lake"]


def test_settings_that_are_no_settings_stop_nobody(stream: Stream) -> None:
    """Whatever somebody else wrote there: the stream does not grow for ever."""
    stream.redis.hset(
        stream.keys.config, mapping={"events_max_len": "many", "events_readers": "x\n1 2"}
    )
    trim = retention.Trimmer(Log("events", stream.keys.events, stream.keys.config, 300)).wrote(1)
    assert trim is not None
    stream.add(1000)
    stream.connection.call(trim)
    assert stream.redis.xlen(stream.keys.events) <= 300 + NODE


def test_trimming_asks_for_no_right_that_workers_lacked() -> None:
    """A user made for an older version would let the stream grow: its trims would be refused."""
    words = {command for command, _ in _CALL.findall(managing.TRIM.source)}
    assert words <= {b"HMGET", b"TIME", b"XTRIM", b"XLEN"}
