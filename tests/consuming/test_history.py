"""Finished jobs are kept with what they carried, where the worker is asked to."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue, UnrecoverableError, Worker
from chasqui._core.envelope import decode_envelope
from chasqui.model.keys import Keys
from chasqui.model.payload import decode
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.servers import Server

Start = Callable[..., Running]


async def kept(redis: Redis, keys: Keys) -> list[dict[bytes, bytes]]:
    """The fields of the history's entries."""
    found = await redis("XRANGE", keys.history, "-", "+")
    return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in found]


async def rest(redis: Redis, keys: Keys) -> None:
    await until(lambda: at_rest(redis, keys), "all is done")


async def handle(job: Job) -> Any:
    if job.data == "bad":
        raise UnrecoverableError("no such customer")
    if job.data == "twice" and job.attempt == 0:
        raise ValueError("not yet")
    return job.data if job.name == "returns" else None


@pytest.mark.parametrize(
    "options", [{}, {"events_enabled": False}, {"store_results": True}], ids=str
)
async def test_finished_jobs_are_kept_with_what_they_carried(
    queue: Queue, redis: Redis, keys: Keys, start: Start, options: dict[str, Any]
) -> None:
    start(handle, history=True, **options)
    added = [
        await queue.add(name, data, backoff={"kind": "fixed", "delay_ms": 1})
        for name, data in (("", "plain"), ("returns", {"a": [1, 2]}), ("n", "twice"), ("n", "bad"))
    ]

    async def all_kept() -> bool:
        return await redis("XLEN", keys.history) == len(added)

    await until(all_kept, "all are kept")
    found = {fields[b"id"].decode(): fields for fields in await kept(redis, keys)}
    assert found.keys() == {job.id for job in added}
    ends = [("completed", 1), ("completed", 1), ("completed", 2), ("dlq", 1)]
    for job, (event, run) in zip(added, ends, strict=True):
        fields = found[job.id]
        assert (fields[b"e"].decode(), int(fields[b"attempt"])) == (event, run)
        assert fields.get(b"n", b"").decode() == job.name
        assert int(fields[b"ts"]) >= job.created_at_ms - 1
        assert int(fields[b"duration_us"]) >= 0
        envelope = decode_envelope(fields[b"d"])
        assert (envelope.id, envelope.attempt) == (job.id, run - 1)
        assert decode(envelope.payload) == job.data
        assert envelope.created_at_ms == job.created_at_ms
    assert found[added[3].id][b"reason"] == b"unrecoverable"
    if options.get("store_results"):
        assert await queue.get_job_result(added[1].id) == added[1].data


async def test_batches_and_processes_are_kept_too(
    queue: Queue, redis: Redis, keys: Keys, start: Start
) -> None:
    async def many(jobs: list[Job]) -> None:
        pass

    running = start(many, history=True, batch=10)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(25)])
    await rest(redis, keys)
    await running.stop()
    start(len_of, history=True, processes=1)
    await queue.add("n", "data")
    await rest(redis, keys)
    found = [decode(decode_envelope(fields[b"d"]).payload) for fields in await kept(redis, keys)]
    assert found == [*range(25), "data"]


def len_of(job: Job) -> None:
    len(job.data)


async def test_nothing_is_written_unless_asked_for(
    queue: Queue, redis: Redis, keys: Keys, start: Start
) -> None:
    start(handle)
    await queue.add("n", "plain")
    await queue.add("n", "bad")
    await rest(redis, keys)
    assert await redis("EXISTS", keys.history) == 0


async def test_what_cannot_be_kept_is_not_acknowledged(
    queue: Queue, redis: Redis, keys: Keys, start: Start
) -> None:
    """A dead job is not copied over and over either."""
    await redis("SET", keys.history, "in the way")
    running = start(handle, history=True)
    await queue.add("n", "plain")
    await queue.add("n", "bad")
    await running.ended(2)
    await until(lambda: refused(running), "both were refused")
    assert await redis("XLEN", keys.stream) == 2
    assert await redis("XLEN", keys.dlq) == 0
    await redis("DEL", keys.history)
    await rest(redis, keys)
    assert {fields[b"e"] for fields in await kept(redis, keys)} == {b"completed", b"dlq"}
    assert await redis("XLEN", keys.dlq) == 1


async def refused(running: Running) -> bool:
    health = running.worker.health()
    assert health is not None
    return health.acks_waiting == 1 and health.moves_waiting == 1


async def test_a_queue_drains_though_memory_is_short(
    queue_name: str, private_server: Callable[..., Server]
) -> None:
    server = private_server("redis-8.6")
    keys = Keys(queue_name)
    async with Queue(queue_name, redis_url=server.url) as queue:
        await queue.add_bulk([{"name": "n", "data": i} for i in range(50)])
        gate = asyncio.Event()

        async def wait(job: Job) -> None:
            await gate.wait()

        worker = Worker(queue_name, wait, redis_url=server.url, history=True, concurrency=50)
        running = asyncio.ensure_future(worker.run())
        client = redis_py.Redis.from_url(server.url)
        await until_true(lambda: (health := worker.health()) is not None and health.running == 50)
        client.config_set("maxmemory", "1")
        gate.set()
        await until_true(lambda: client.xlen(keys.history) == 50)
        await until_true(lambda: client.xlen(keys.stream) == 0)
        client.config_set("maxmemory", "0")
        client.close()
        await worker.close()
        await running


async def until_true(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if fact():
                return
            await asyncio.sleep(0.01)


async def test_the_oldest_go_when_there_are_more_than_the_queue_keeps(
    queue: Queue, redis: Redis, keys: Keys, start: Start
) -> None:
    await queue.set_history_max_len(100)
    start(handle, history=True)
    for _ in range(3):
        await queue.add_bulk([{"name": "n", "data": i} for i in range(1000)])
        await rest(redis, keys)
    retention = await queue.get_history_retention()
    assert retention.max_len == 100
    assert 100 <= retention.length < 3000


async def test_deleting_the_queue_deletes_its_history(
    queue: Queue, redis: Redis, keys: Keys, start: Start
) -> None:
    running = start(handle, history=True)
    await queue.add("n", "plain")
    await rest(redis, keys)
    await running.stop()
    assert await redis("XLEN", keys.history) == 1
    await queue.obliterate()
    assert await redis("EXISTS", keys.history) == 0


def test_history_is_a_flag() -> None:
    with pytest.raises(TypeError, match="history must be a bool, got str"):
        Worker("q", handle, history="yes")  # type: ignore[arg-type]
