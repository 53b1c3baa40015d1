"""`sync.Queue` waits for jobs by their events, in the thread that waits."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis as redis_py

from chasqui import JobFailedError, sync
from chasqui.events.blocking_job_end_watcher import BlockingJobEndWaiter
from chasqui.events.job_end import READ_COUNT
from chasqui.model.keys import Keys
from chasqui.producing.new_jobs import ulids
from chasqui.transport.blocking import BlockingConnection
from tests.events.test_job_results import NEVER_S, working
from tests.proxy import Proxy
from tests.servers import Server


async def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(calls)) as pool:
        return await asyncio.gather(*(loop.run_in_executor(pool, call) for call in calls))


async def test_an_event_wakes_every_thread_that_waits(
    server: Server, queue_name: str, make_proxy: Callable[[str], Proxy]
) -> None:
    proxy = make_proxy(server.url)
    with sync.Queue(queue_name, redis_url=proxy.url) as queue:
        jobs = queue.add_bulk([{"name": "mail", "data": i} for i in range(5)])
        waits = [
            lambda wait=wait, job=job: wait(job.id, poll_interval=NEVER_S)
            for job in jobs
            for wait in (queue.wait_for_result, queue.wait_for_end)
        ]
        waiting = asyncio.create_task(in_threads(*waits))
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") >= len(waits))
        async with working(queue_name, server.url):
            assert await waiting == [{"got": i} for i in range(5) for _ in range(2)]
        before = proxy.count("HELLO")
        assert await asyncio.to_thread(queue.wait_for_result, jobs[0].id) == {"got": 0}
        assert proxy.count("HELLO") == before  # the connections are kept for who waits next
    await asyncio.to_thread(proxy.wait_for, lambda: len(proxy._links) == 0)


async def test_done_and_dead_are_told(server: Server, queue_name: str) -> None:
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        void = queue.add("void", 1)
        bad = queue.add("fails", 2, attempts=1)
        mine = queue.add("fails", 3, attempts=1, job_id="mine")
        async with working(queue_name, server.url):
            assert await asyncio.to_thread(queue.wait_for_end, void.id) is None
            for method in (queue.wait_for_end, queue.wait_for_result):
                for job in (bad, mine):
                    with pytest.raises(JobFailedError) as failed:
                        await asyncio.to_thread(method, job.id, poll_interval=NEVER_S)
                    assert failed.value.reason == "retries_exhausted"


@pytest.mark.parametrize("ahead_ms", [-3_600_000, 3_600_000])
async def test_the_clock_that_an_id_was_drawn_by_does_not_matter(
    server: Server, queue_name: str, ahead_ms: int
) -> None:
    """Nor how much has happened since the job ended, nor a job of old that had its id."""
    drawn = ulids.next(time.time_ns() // 1_000_000 + ahead_ms)
    events = Keys(queue_name).events
    with (
        sync.Queue(queue_name, redis_url=server.url) as queue,
        redis_py.Redis.from_url(server.url) as redis,
        redis.pipeline() as pipeline,
    ):
        redis.xadd(events, {"e": "dlq", "id": drawn, "reason": "of old"})
        job = queue.add("void", 1, job_id=drawn)
        async with working(queue_name, server.url):
            assert await asyncio.to_thread(queue.wait_for_end, job.id) is None
        for _ in range(2 * READ_COUNT):
            pipeline.xadd(events, {"e": "active", "id": "another"})
        pipeline.execute()
        waiting = asyncio.to_thread(queue.wait_for_end, job.id, poll_interval=NEVER_S)
        assert await waiting is None
        later_ms = time.time_ns() // 1_000_000 + 5000
        with pytest.raises(TimeoutError):
            queue.wait_for_end(job.id, timeout=0.05, since_ms=later_ms)


@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_who_may_not_read_events_finds_the_result(
    kind: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    server = private_server(kind)
    with redis_py.Redis.from_url(server.url) as redis:
        redis.execute_command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-xread")
    url = server.url.replace("redis://", "redis://blind:pw@")
    with sync.Queue(queue_name, redis_url=url) as queue:
        job = queue.add("mail", 1)
        waiting = asyncio.create_task(in_threads(lambda: queue.wait_for_result(job.id)))
        async with working(queue_name, server.url):
            assert await waiting == [{"got": 1}]


async def test_a_wait_may_be_longer_than_a_request(
    server: Server,
    queue_name: str,
    make_proxy: Callable[[str], Proxy],
    connect_blocking: Callable[..., BlockingConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads events in many requests, none of which lasts as long as the wait."""
    monkeypatch.setattr("chasqui.events.blocking_job_end_watcher.BLOCK_MS", 50)
    proxy, keys = make_proxy(server.url), Keys(queue_name)
    connection = connect_blocking(proxy.url, request_timeout_s=2.0)
    waiter = BlockingJobEndWaiter(connection, keys, "mine", None)
    waiting = asyncio.create_task(asyncio.to_thread(waiter.wait, 30.0))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") >= 3)
    with redis_py.Redis.from_url(server.url) as redis:
        redis.xadd(keys.events, {"e": "completed", "id": "mine"})
    await waiting
    assert waiter.end is not None
    assert proxy.accepted == 1


async def test_of_many_connections_a_few_are_kept(
    server: Server, queue_name: str, make_proxy: Callable[[str], Proxy]
) -> None:
    proxy = make_proxy(server.url)
    with sync.Queue(queue_name, redis_url=proxy.url) as queue:
        job = queue.add("mail", 1)
        waits = [lambda: queue.wait_for_end(job.id, poll_interval=NEVER_S)] * 40
        waiting = asyncio.create_task(in_threads(*waits))
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") >= 40)
        async with working(queue_name, server.url):
            assert await waiting == [{"got": 1}] * 40
        kept = 1 + 16  # its own, and those for who waits next
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.open_links == kept)
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.open_links == 0)


def test_time_runs_out(server: Server, queue_name: str) -> None:
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        job = queue.add("mail", 1)
        for method in (queue.wait_for_result, queue.wait_for_end):
            with pytest.raises(TimeoutError, match=job.id):
                method(job.id, timeout=0.05, poll_interval=NEVER_S)
