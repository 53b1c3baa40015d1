"""The consumers of the group: those of workers that ended, or died, do not stay."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job
from chasqui.cli.facts import mappings
from chasqui.managing import consumers
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from chasqui.timed.promoter import PromoterLoop
from chasqui.transport.connection import Connection
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.proxy import Proxy
from tests.servers import Server

Start = Callable[..., Running]


async def names_of(redis: Redis, keys: Keys) -> list[str]:
    found = await redis("XINFO", "CONSUMERS", keys.stream, DEFAULT_GROUP)
    return sorted(one[b"name"].decode() for one in mappings(found))


async def fine(job: Job) -> None:
    pass


async def stays(job: Job) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds nothing is gone."""
    monkeypatch.setattr(consumers, "SILENCE_MS", 0)


# ── Leaving ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_that_ends_leaves_the_group(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    await queue.add("mail", 1)
    running = start(fine, consumer_id="leaves")
    await running.completed(1)
    assert await names_of(redis, keys) == ["leaves"]
    await running.stop()
    assert await names_of(redis, keys) == []


async def test_a_worker_whose_jobs_went_back_leaves_later(
    queue: Queue, start: Start, redis: Redis, keys: Keys, no_patience: None
) -> None:
    """They are still its own by the server's account, until somebody takes them."""
    await queue.add("mail", 1)
    running = start(stays, consumer_id="first", shutdown_deadline_s=0)
    await until(lambda: redis("XINFO", "GROUPS", keys.stream), "there is a group")
    await until(lambda: _pending(redis, keys), "it has the job")
    await running.stop()
    assert await names_of(redis, keys) == ["first"]
    assert await redis_sweep(redis, keys) == 0
    assert await _pending(redis, keys) == 1
    heir = start(fine, consumer_id="heir")
    await heir.completed(1)
    await heir.stop()
    assert await redis_sweep(redis, keys) == 1
    assert await names_of(redis, keys) == []


async def test_a_worker_without_the_right_to_leave_ends_well(
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = private_server("redis-8.6")
    redis = redis_at(server.url)
    await redis("ACL", "SETUSER", "poor", "on", ">x", "~*", "+@all", "-xgroup|delconsumer")
    url = server.url.replace("://", "://poor:x@")
    async with Queue(queue_name, redis_url=server.url) as queue:
        await queue.add("mail", 1)
        running = start_at(url, fine, consumer_id="poor")
        await running.completed(1)
        await running.stop()
    assert await names_of(redis, keys) == ["poor"]
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == []


@pytest.mark.parametrize("has_group", [False, True])
async def test_a_worker_without_the_right_to_see_groups_works(
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    keys: Keys,
    has_group: bool,
) -> None:
    server = private_server("redis-8.6")
    redis = redis_at(server.url)
    await redis("ACL", "SETUSER", "poor", "on", ">x", "~*", "+@all", "-xinfo")
    url = server.url.replace("://", "://poor:x@")
    async with Queue(queue_name, redis_url=server.url) as queue:
        await queue.add("mail", 1)
        if has_group:
            await redis("XGROUP", "CREATE", keys.stream, "default", "0")
        running = start_at(url, fine)
        await running.completed(1)
        await until(lambda: at_rest(redis, keys), "it is acknowledged")


async def test_a_worker_whose_server_is_gone_ends_as_soon(
    server: Server,
    queue: Queue,
    start_at: Callable[..., Running],
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not even ask to leave."""
    asked: list[str] = []
    monkeypatch.setattr("chasqui.consuming.drain.leave", lambda *names: asked.append(names[-1]))
    proxy = make_proxy(server.url)
    await queue.add("mail", 1)
    running = start_at(proxy.url, fine)
    await running.completed(1)
    proxy.close()
    running.task.cancel()
    await asyncio.wait({running.task}, timeout=30)
    assert running.task.done()
    assert asked == []


# ── Being swept ─────────────────────────────────────────────────────────────────────────────────


async def redis_sweep(redis: Redis, keys: Keys) -> int:
    """What the leader does now and then."""
    script = (settling.SWEEP.source, 2, keys.stream, keys.paused)
    swept: int = await redis("EVAL", *script, consumers.SILENCE_MS, consumers.SWEPT)
    return swept


async def _pending(redis: Redis, keys: Keys) -> int:
    reply = await redis("XPENDING", keys.stream, DEFAULT_GROUP)
    count: int = reply[0]
    return count


async def _names_are(redis: Redis, keys: Keys, wanted: list[str]) -> bool:
    return await names_of(redis, keys) == wanted


async def _read(redis: Redis, keys: Keys, who: str, count: int = 1) -> Any:
    words = ("GROUP", DEFAULT_GROUP, who, "COUNT", count, "STREAMS", keys.stream, ">")
    return await redis("XREADGROUP", *words)


async def test_the_leader_deletes_those_that_are_gone(
    queue: Queue, server: Server, redis: Redis, keys: Keys, no_patience: None
) -> None:
    """In every group; never one that holds an entry, nor while nobody reads since it is paused."""
    await queue.add_bulk([{"name": "mail", "data": i} for i in range(2)])
    for group in (DEFAULT_GROUP, "other"):
        await redis("XGROUP", "CREATE", keys.stream, group, "0")
        await redis("XGROUP", "CREATECONSUMER", keys.stream, group, "gone")
    await _read(redis, keys, "holds")
    await redis("SET", keys.paused, "1")
    assert await redis_sweep(redis, keys) == 0
    await redis("DEL", keys.paused)
    connection = Connection(Endpoint.parse(server.url), key=keys.stream)
    bell = Connection(Endpoint.parse(server.url), key=keys.stream)
    stop = asyncio.Event()
    duty = asyncio.ensure_future(PromoterLoop(keys, connection, bell).run(stop))
    await until(lambda: _names_are(redis, keys, ["holds"]), "it was swept")
    stop.set()
    await duty
    await connection.close()
    assert await redis("XINFO", "CONSUMERS", keys.stream, "other") == []
    assert await _pending(redis, keys) == 1


async def test_one_that_was_seen_lately_stays(queue: Queue, redis: Redis, keys: Keys) -> None:
    await queue.add("mail", 1)
    await redis("XGROUP", "CREATE", keys.stream, DEFAULT_GROUP, "$")
    await redis("XGROUP", "CREATECONSUMER", keys.stream, DEFAULT_GROUP, "lives")
    assert await redis_sweep(redis, keys) == 0
    assert await names_of(redis, keys) == ["lives"]


async def test_a_sweep_of_a_queue_without_stream_does_nothing(redis: Redis, keys: Keys) -> None:
    assert await redis_sweep(redis, keys) == 0


async def test_one_that_is_deleted_in_the_middle_of_a_read_gets_jobs(
    queue: Queue, start: Start, redis: Redis, keys: Keys, no_patience: None
) -> None:
    """A worker that waits for jobs is a consumer again as soon as there is one."""
    running = start(fine, consumer_id="waits", read_block_ms=60_000, delayed_enabled=False)
    await until(lambda: _waits(redis, keys), "it waits in a read")
    assert await redis_sweep(redis, keys) == 1
    assert await names_of(redis, keys) == []
    await queue.add("mail", 1)
    await running.completed(1)
    assert await names_of(redis, keys) == ["waits"]


async def _waits(redis: Redis, keys: Keys) -> bool:
    """Whether a worker is blocked in its read."""
    listed = (await redis("CLIENT", "LIST")).decode()
    ours = [one for one in listed.splitlines() if f"name=chasqui-worker:{keys.queue}" in one]
    return any("cmd=xreadgroup" in one and " flags=b" in one for one in ours)
