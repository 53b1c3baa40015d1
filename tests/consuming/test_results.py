"""What handlers return, stored together with the acknowledgement."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job
from chasqui.errors import ServerError
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.servers import Server

Start = Callable[..., Running]


async def echo(job: Job) -> Any:
    return job.data


async def test_a_result_is_there_when_the_entry_is_gone(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running = start(echo, store_results=True, result_ttl_ms=50_000)
    jobs = await queue.add_bulk([{"name": "n", "data": {"i": i}} for i in range(250)])
    await running.completed(250)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    results = await queue.get_job_result_bulk([job.id for job in jobs])
    assert results == [{"i": i} for i in range(250)]
    left_ms = await redis("PTTL", keys.result(jobs[0].id))
    assert 20_000 < left_ms <= 50_000


async def test_none_stores_nothing_and_other_falsy_values_do(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running = start(echo, store_results=True)
    jobs = [await queue.add("n", value) for value in (None, 0, "", [], False)]
    await running.completed(5)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    stored = [await redis("EXISTS", keys.result(job.id)) for job in jobs]
    assert stored == [0, 1, 1, 1, 1]


async def test_results_are_off_unless_asked_for(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running = start(echo)
    job = await queue.add("n", 5)
    await running.completed(1)
    await until(lambda: at_rest(redis, keys), "it is acknowledged")
    assert await redis("EXISTS", keys.result(job.id)) == 0


async def test_a_job_that_was_added_can_be_waited_for(queue: Queue, start: Start) -> None:
    running = start(echo, store_results=True)
    job = await queue.add("n", [1, 2])
    assert await running.fact(job.wait_for_result(timeout=20)) == [1, 2]


async def test_a_replayed_job_is_not_answered_by_a_run_of_before(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """Its entry was taken from it, so what it returns is stored nowhere."""
    gates, runs = [asyncio.Event(), asyncio.Event()], 0

    async def handler(job: Job) -> int:
        nonlocal runs
        runs += 1
        await gates[runs - 1].wait()
        return runs

    async def has_begun(run: int) -> bool:
        return runs == run

    running = start(handler, concurrency=1, store_results=True)
    job = await queue.add("n", None)
    await until(lambda: has_begun(1), "the first run has begun")
    ((entry_id, fields),) = await redis("XRANGE", keys.stream, "-", "+")
    await redis("XADD", keys.dlq, "*", *fields, "source_id", entry_id, "reason", "unrecoverable")
    await redis("XACK", keys.stream, "default", entry_id)
    await redis("XDEL", keys.stream, entry_id)
    assert await queue.replay_dlq() == 1
    gates[0].set()
    await until(lambda: has_begun(2), "the second run has begun")

    async def has_sent_all() -> bool:
        health = running.worker.health()
        return health is not None and health.acks_waiting == 0

    await until(has_sent_all, "the server has said what it thinks of the first")
    assert await queue.get_job_result(job.id) is None
    gates[1].set()
    assert await running.fact(job.wait_for_result(timeout=20)) == 2


@pytest.mark.fault(21)
@pytest.mark.parametrize("kind", ["valkey-9", "redis-6.2", "redis-8.6"])
async def test_out_of_memory_adds_fail_and_the_queue_drains(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    keys: Keys,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
) -> None:
    server = private_server(kind, maxmemory_policy="noeviction")
    redis = redis_at(server.url)
    async with Queue(queue_name, redis_url=server.url) as queue:
        jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(300)])
        failing = await queue.add("fail", "x", attempts=1)
        await redis("XGROUP", "CREATE", keys.stream, "default", "0")
        await redis("SET", "ballast", b"x" * 4_000_000)
        await redis("CONFIG", "SET", "maxmemory", "3mb")
        with pytest.raises(ServerError) as caught:
            await queue.add("n", "too much")
        assert caught.value.code == "OOM"

        async def handler(job: Job) -> Any:
            if job.name == "fail":
                raise ValueError
            return job.data

        running = start_at(server.url, handler, store_results=True)
        await running.completed(300)
        pending = ("XPENDING", keys.stream, "default")

        async def is_drained() -> bool:
            return bool((await redis(*pending))[0] == 1)

        await until(is_drained, "all but the failed job are acknowledged")
        results = await queue.get_job_result_bulk([job.id for job in jobs])
        assert results == list(range(300)), "stored behind the acknowledgement"
        assert await redis("XLEN", keys.dlq) == 0
        await redis("CONFIG", "SET", "maxmemory", "0")
        await running.buried(1)
        assert [job.job_id async for job in queue.iter_dlq()] == [failing.id]
