"""Waiting for a job: its value, its failure, or that there is no value, as soon as that is so."""

import asyncio
import gc
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis as redis_py

from chasqui import (
    Job,
    JobFailedError,
    Queue,
    QueueEvents,
    UnrecoverableError,
    Worker,
    sync,
)
from chasqui._core.envelope import encode_envelope
from chasqui.errors import ClosedError
from chasqui.events import job_end, job_end_watcher
from chasqui.events.job_end import End, Past, raise_if_dead
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Request
from tests.proxy import Proxy
from tests.servers import Server

MakeProxy = Callable[[str], Proxy]

#: Longer than any test: whoever is woken by polling is not woken at all.
NEVER_S = 1000.0


async def handler(job: Job) -> Any:
    if job.name == "dies":
        raise UnrecoverableError("no such address")
    if job.name == "fails":
        raise ValueError("not today")
    return None if job.name == "void" else {"got": job.data}


@asynccontextmanager
async def working(name: str, url: str, **options: Any) -> AsyncIterator[Worker]:
    options.setdefault("store_results", True)
    worker = Worker(name, handler, redis_url=url, **options)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        await worker.close()
        await task


@pytest.fixture
async def queue(server: Server, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, redis_url=server.url) as queue:
        yield queue


@pytest.fixture
def redis(server: Server) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(server.url) as redis:
        yield redis


async def test_an_event_wakes_who_waits(server: Server, queue: Queue) -> None:
    job = await queue.add("mail", 1)
    waits = [job.wait_for_result(poll_interval=NEVER_S), job.result(poll_interval=NEVER_S)]
    waiting = [asyncio.create_task(wait) for wait in waits]
    async with working(queue.name, server.url):
        assert await asyncio.gather(*waiting) == [{"got": 1}, {"got": 1}]
    assert await job.result() == {"got": 1}
    assert await job.wait_for_result() == {"got": 1}


@pytest.mark.parametrize("started", ["before", "after"])
async def test_a_job_without_a_result_is_known_to_be_done(
    server: Server, queue: Queue, started: str
) -> None:
    """Also one that was done before anybody waited."""
    job = await queue.add("void", 1)
    if started == "before":
        async with working(queue.name, server.url):
            assert await job.result(poll_interval=NEVER_S) is None
    assert await _after_a_run(server, queue, job) is None


async def _after_a_run(server: Server, queue: Queue, job: Job) -> Any:
    async with (
        working(queue.name, server.url),
        QueueEvents(
            queue.name, redis_url=server.url, last_event_id="0", events=["completed"]
        ) as events,
    ):
        assert (await anext(events)).job_id == job.id
    await queue._ends.close()
    return await job.result(poll_interval=NEVER_S)


async def test_a_worker_that_stores_nothing_gives_none(server: Server, queue: Queue) -> None:
    job = await queue.add("mail", 1)
    async with working(queue.name, server.url, store_results=False):
        assert await job.result(poll_interval=NEVER_S) is None


@pytest.mark.parametrize("method", ["result", "wait_for_result"])
async def test_a_dead_job_is_told_at_once(server: Server, queue: Queue, method: str) -> None:
    job, other = await queue.add("dies", 1), await queue.add("fails", 2, attempts=1)
    async with working(queue.name, server.url):
        with pytest.raises(JobFailedError) as dead:
            await getattr(job, method)(poll_interval=NEVER_S, timeout=NEVER_S)
        with pytest.raises(JobFailedError) as failed:
            await getattr(other, method)(poll_interval=NEVER_S, timeout=NEVER_S)
    assert (dead.value.job_id, dead.value.reason) == (job.id, "unrecoverable")
    assert dead.value.detail == "UnrecoverableError: no such address"
    assert (failed.value.reason, failed.value.detail) == (
        "retries_exhausted",
        "ValueError: not today",
    )


def test_why_a_job_is_dead_is_found_where_it_died(server: Server, queue_name: str) -> None:
    """However many died before it and after it: everyone who waits looks, and all may die."""
    keys, count, at_ms = Keys(queue_name), 3000, 1_700_000_000_000
    with redis_py.Redis.from_url(server.url) as redis, redis.pipeline() as pipeline:
        for i in range(count):
            envelope = encode_envelope(f"job-{i}", b"\x01", at_ms)
            pipeline.xadd(keys.dlq, {"d": envelope, "error": f"error {i}"}, f"{at_ms + i}-0")
        pipeline.execute()
    looked_at = 0

    class Counting(BlockingConnection):
        def call(self, request: Request) -> Any:
            nonlocal looked_at
            entries = super().call(request)
            looked_at += len(entries)
            return entries

    connection = Counting(Endpoint.parse(server.url), key=keys.stream)
    for i in range(0, count, 100):
        told_ms = at_ms + i + 20
        with pytest.raises(JobFailedError, match=f"error {i}$"):
            connection.run(raise_if_dead(keys, f"job-{i}", End(told_ms, "unrecoverable")))
    assert looked_at <= count // 100 * 50
    connection.run(raise_if_dead(keys, "job-5", End(at_ms + 4, "died later than that")))
    connection.run(raise_if_dead(keys, "replayed", End(at_ms + count, "unrecoverable")))
    connection.close()


@pytest.mark.parametrize("method", ["result", "wait_for_result"])
async def test_a_replayed_job_is_waited_for_anew(server: Server, queue: Queue, method: str) -> None:
    is_mended = False

    async def mendable(job: Job) -> Any:
        if not is_mended:
            raise UnrecoverableError("not yet")
        return "at last"

    job = await queue.add("mail", 1)
    worker = Worker(queue.name, mendable, redis_url=server.url, store_results=True)
    running = asyncio.create_task(worker.run())
    try:
        with pytest.raises(JobFailedError, match="not yet"):
            await getattr(job, method)(poll_interval=NEVER_S)
        is_mended = True
        assert await queue.replay_dlq() == 1
        assert await getattr(job, method)(poll_interval=NEVER_S) == "at last"
    finally:
        await worker.close()
        await running


async def test_a_retry_is_no_end(server: Server, queue: Queue) -> None:
    runs = 0

    async def fails_once(job: Job) -> str:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("once")
        return "done"

    job = await queue.add("mail", 1, backoff=1)
    worker = Worker(queue.name, fails_once, redis_url=server.url, store_results=True)
    task = asyncio.create_task(worker.run())
    assert await job.result(poll_interval=NEVER_S) == "done"
    await worker.close()
    await task
    assert runs == 2


async def test_where_events_are_off_a_stored_result_is_found(server: Server, queue: Queue) -> None:
    job = await queue.add("mail", 1)
    async with working(queue.name, server.url, events_enabled=False):
        assert await job.result() == {"got": 1}
        job = await queue.add("mail", 2)
        assert await job.wait_for_result() == {"got": 2}


async def test_who_may_not_read_events_finds_the_result(
    private_server: Callable[..., Server], queue_name: str
) -> None:
    server = private_server("redis-8.6")
    events = Keys(queue_name).events.decode()
    with redis_py.Redis.from_url(server.url) as redis:
        rules = ["on", ">pw", "+@all", "%R~*", f"(%W~{events})", "-xread"]
        redis.execute_command("ACL", "SETUSER", "blind", *rules)
        redis.execute_command("ACL", "SETUSER", "blind", "~*")
    url = server.url.replace("redis://", "redis://blind:pw@")
    async with Queue(queue_name, redis_url=url) as queue, working(queue_name, server.url):
        job = await queue.add("mail", 1)
        assert await job.result() == {"got": 1}
        assert await (await queue.add("mail", 2)).result() == {"got": 2}


async def test_one_reader_serves_all_who_wait(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        jobs = await queue.add_bulk([{"name": "mail", "data": i} for i in range(200)])
        waiting = [asyncio.create_task(job.result(poll_interval=NEVER_S)) for job in jobs]
        async with working(queue_name, redis_86.url):
            assert await asyncio.gather(*waiting) == [{"got": i} for i in range(200)]
            late = await queue.add("mail", 200)
            assert await late.result(poll_interval=NEVER_S) == {"got": 200}
        assert proxy.accepted == 2  # the queue's own, and the reader's
    await asyncio.to_thread(proxy.wait_for, lambda: len(proxy._links) == 0)


async def test_the_reader_stops_when_nobody_waits(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_end_watcher, "LINGER_S", 0.01)
    proxy = make_proxy(redis_86.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue, working(queue_name, redis_86.url):
        job = await queue.add("mail", 1)
        assert await job.result(poll_interval=NEVER_S) == {"got": 1}
        await asyncio.to_thread(proxy.wait_for, lambda: len(proxy._links) == 1)
        job = await queue.add("void", 1)
        assert await job.result(poll_interval=NEVER_S) is None


async def test_an_older_job_is_found_by_a_reader_that_began_later(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        old = await queue.add("void", 1)
        assert await _after_a_run(redis_86, queue, old) is None
        await queue._ends.close()
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.open_links == 1)
        reads = proxy.count("XREAD")
        new = await queue.add("mail", 2)
        waiting = asyncio.create_task(new.result(poll_interval=NEVER_S))
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") > reads)
        assert await old.result(poll_interval=NEVER_S) is None
        async with working(queue_name, redis_86.url):
            assert await waiting == {"got": 2}


# ── Whose end it is ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step_s", [-3600, 3600])
async def test_a_step_of_the_clock_here_hides_no_end(
    server: Server, queue: Queue, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """Neither while somebody waits, nor between an add and the wait."""
    real_ns, step_ns = time.time_ns, 0
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + step_ns)
    first = await queue.add("void", 1)
    async with working(queue.name, server.url):
        assert await first.result(poll_interval=NEVER_S) is None
        step_ns = step_s * 1_000_000_000
        for job_id in (None, "mine"):
            job = await queue.add("void", 1, job_id=job_id)
            assert await job.result(poll_interval=NEVER_S) is None
        before = await queue.add("void", 1)
        step_ns = 0
        assert await before.result(poll_interval=NEVER_S) is None
        await queue._ends.close()
        assert await before.result(poll_interval=NEVER_S) is None


@pytest.mark.parametrize("delay_ms", [None, 1])
@pytest.mark.parametrize("ended", ["dies", "void"])
async def test_an_earlier_job_of_the_same_id_is_another(
    server: Server, queue: Queue, redis: redis_py.Redis, ended: str, delay_ms: int | None
) -> None:
    """Its end is not told to who waits for the new one: by its job, by that of an add which found
    the id taken, by the id, in a thread."""
    keys = Keys(queue.name)
    old = await queue.add(ended, 1, job_id="invoice", delay_ms=delay_ms)
    async with working(queue.name, server.url):
        if ended == "dies":
            with pytest.raises(JobFailedError):
                await old.result(poll_interval=NEVER_S)
        else:
            assert await old.result(poll_interval=NEVER_S) is None
    redis.delete(keys.unique("invoice"), keys.dlid("invoice"))  # as if `unique_for` were over
    last_ms = int(redis.xinfo_stream(keys.events)["last-generated-id"].partition(b"-")[0])
    while server_ms(redis) <= last_ms:  # in which the end and the add could both fall
        pass
    new = await queue.add("mail", 2, job_id="invoice", delay_ms=delay_ms)
    again = await queue.add("mail", 2, job_id="invoice", delay_ms=delay_ms)
    assert (new.is_new, again.is_new) == (True, False)
    with sync.Queue(queue.name, redis_url=server.url) as threads:
        waits = [
            new.result(poll_interval=NEVER_S),
            again.result(poll_interval=NEVER_S),
            queue.wait_for_end("invoice", poll_interval=NEVER_S),
            queue.wait_for_result("invoice", poll_interval=NEVER_S),
            asyncio.to_thread(threads.wait_for_end, "invoice", poll_interval=NEVER_S),
            asyncio.to_thread(threads.wait_for_result, "invoice", poll_interval=NEVER_S),
        ]
        waiting = [asyncio.ensure_future(wait) for wait in waits]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done, "told how the earlier one ended"
        async with working(queue.name, server.url):
            assert await asyncio.gather(*waiting) == [{"got": 2}] * len(waits)


def server_ms(redis: redis_py.Redis) -> int:
    seconds, micros = redis.time()
    return int(seconds * 1000 + micros // 1000)


# ── What it costs ───────────────────────────────────────────────────────────────────────────────


async def test_the_log_is_read_once_for_all_who_wait(
    server: Server, queue_name: str, make_proxy: MakeProxy, redis: redis_py.Redis
) -> None:
    """However many ask by an id of which nothing is known."""
    fill(redis, queue_name, 3 * job_end.READ_COUNT)
    proxy = make_proxy(server.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        assert await queue.wait_for_end("job-0", poll_interval=NEVER_S) is None
        read = proxy.count("XREVRANGE")
        assert read <= 4
        for i in range(100):
            assert await queue.wait_for_end(f"job-{i}", poll_interval=NEVER_S) is None
        with pytest.raises(TimeoutError):
            await queue.wait_for_end("nobody's", timeout=0.01, poll_interval=NEVER_S)
        assert proxy.count("XREVRANGE") <= 4
        assert proxy.accepted == 2


async def test_what_was_forgotten_is_read_again(
    server: Server, queue_name: str, redis: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many ends are remembered, the newest; the others are found all the same."""
    monkeypatch.setattr(job_end_watcher, "KNOWN_MAX", 10)
    monkeypatch.setattr(job_end, "READ_COUNT", 7)
    monkeypatch.setattr(job_end, "PAGE_PAUSE_S", 0.001)
    fill(redis, queue_name, 100)
    async with Queue(queue_name, redis_url=server.url) as queue:
        for i in (0, 99, 50, 5, 98, 49):
            assert await queue.wait_for_end(f"job-{i}", poll_interval=NEVER_S) is None
        waits = [queue.wait_for_end(f"job-{i}", poll_interval=NEVER_S) for i in range(0, 100, 3)]
        assert await asyncio.gather(*waits) == [None] * len(waits)
        assert len(queue._ends._known) + len(queue._ends._known_past) <= 10


async def test_the_past_is_read_with_pauses(
    server: Server, queue_name: str, redis: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a thread: whoever waits for what never ended must not read for all he is worth."""
    monkeypatch.setattr(job_end, "READ_COUNT", 5)
    monkeypatch.setattr(job_end, "PAGE_PAUSE_S", NEVER_S)
    fill(redis, queue_name, 100)
    pages: list[int] = []
    read = Past.read

    def count(self: Past) -> Any:
        pages.append(1)
        return read(self)

    monkeypatch.setattr(Past, "read", count)
    with sync.Queue(queue_name, redis_url=server.url) as threads, pytest.raises(TimeoutError):
        await asyncio.to_thread(threads.wait_for_end, "nobody's", timeout=0.2)
    assert 1 <= len(pages) <= job_end.PAGES_AT_ONCE
    async with Queue(queue_name, redis_url=server.url) as queue:
        with pytest.raises(TimeoutError):
            await queue.wait_for_end("nobody's", timeout=0.2)
    assert 2 <= len(pages) <= 2 * job_end.PAGES_AT_ONCE


def fill(redis: redis_py.Redis, queue_name: str, count: int) -> None:
    """Write the ends of so many jobs of which nothing else is left."""
    with redis.pipeline(transaction=False) as pipeline:
        for i in range(count):
            pipeline.xadd(Keys(queue_name).events, {"e": "completed", "id": f"job-{i}"})
        pipeline.execute()


# ── Readers that are hindered ───────────────────────────────────────────────────────────────────


async def test_a_lost_link_hides_no_end(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        job = await queue.add("void", 1)
        waiting = asyncio.create_task(job.result(poll_interval=NEVER_S))
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") == 1)
        proxy.is_refusing = True
        proxy.cut()
        async with working(queue_name, redis_86.url):
            pass
        proxy.is_refusing = False
        async with working(queue_name, redis_86.url):
            assert await waiting is None


async def test_the_reader_outlives_whatever_a_credential_provider_raises(
    redis_86: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_end_watcher, "AGAIN_S", 0.01)
    asked = 0

    async def provider(_host: str | None) -> tuple[str | None, str | None]:
        nonlocal asked
        asked += 1
        if asked == 2:  # the queue's own link was the first
            raise RuntimeError("the token service is away")
        return None, None

    url = redis_86.url
    async with Queue(queue_name, redis_url=url, credential_provider=provider) as queue:
        job = await queue.add("void", 1)
        async with working(queue_name, url), asyncio.timeout(20):
            assert await job.result(poll_interval=NEVER_S) is None
    assert asked == 3


async def test_a_closed_queue_is_not_waited_on(redis_86: Server, queue_name: str) -> None:
    queue = Queue(queue_name, redis_url=redis_86.url)
    job = await queue.add("mail", 1)
    await queue.close()
    tasks = asyncio.all_tasks()
    for method in (job.result, job.wait_for_result):
        with pytest.raises(ClosedError, match="is closed"):
            await method()
    assert asyncio.all_tasks() == tasks, "nor is a reader of events begun"


async def test_a_close_that_is_cancelled_closes_all_the_same(
    redis_86: Server, queue_name: str
) -> None:
    """Whoever left its `async with` block so does not call it a second time."""
    tasks = asyncio.all_tasks()
    queue = Queue(queue_name, redis_url=redis_86.url)
    with pytest.raises(TimeoutError):
        await queue.wait_for_result("nobody's", timeout=0.01)
    closing = asyncio.ensure_future(queue.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert queue.is_closed
    assert asyncio.all_tasks() == tasks
    del queue
    gc.collect()  # an unclosed socket or transport would warn, and warnings are errors


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_queue_that_outlived_its_event_loop_is_closed(server: Server, queue_name: str) -> None:
    """Whoever waited there left a reader of events behind."""
    queue = Queue(queue_name, redis_url=server.url)

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await queue.wait_for_result("nobody's", timeout=0.01)

    asyncio.run(wait())
    asyncio.run(queue.close())
    assert queue.is_closed
    gc.collect()  # while what is not closed may be told


async def test_a_job_of_a_sync_queue_blocks(server: Server, queue_name: str) -> None:
    def add_and_wait() -> list[object]:
        with sync.Queue(queue_name, redis_url=server.url) as queue:
            one = queue.add("mail", 1)
            later = queue.add("mail", 2, delay_ms=1)
            many = queue.add_bulk([{"name": "mail", "data": 3}, {"name": "void", "data": None}])
            jobs = [one, later, *many]
            assert all(type(job) is sync.Job for job in jobs)
            return [one.wait_for_result(), *(job.result() for job in jobs)]

    async with working(queue_name, server.url):
        one, *values = await asyncio.to_thread(add_and_wait)
    assert one == values[0]
    assert values == [{"got": 1}, {"got": 2}, {"got": 3}, None]


def test_every_add_of_a_sync_queue_makes_its_jobs(server: Server, queue_name: str) -> None:
    with sync.Queue(queue_name, redis_url=server.url, max_backlog=9, on_full="wait") as queue:
        jobs = [
            queue.add("mail", 1),
            queue.add_unique("mail", 2, job_id="x"),
            queue.add_unique("mail", 2, job_id="x"),
            queue.upsert_repeatable_job("mail", 3, repeat={"kind": "every", "interval_ms": 10**9}),
            *queue.add_bulk([{"name": "mail", "data": 4}]),
        ]
        assert [type(job) for job in jobs] == [sync.Job] * 5
        assert [job.is_new for job in jobs] == [True, True, False, True, True]
        assert all(isinstance(job, Job) and job._queue is queue for job in jobs)
        with pytest.raises(TimeoutError, match=jobs[0].id):
            jobs[0].result(timeout=0.01)


def test_a_sync_job_is_a_value_as_any_job_is() -> None:
    one = sync.Job("1", "mail", [1], 2, 3)
    assert repr(one) == repr(Job("1", "mail", [1], 2, 3))
    assert one == Job("1", "mail", [1], 2, 3)
    assert Job("1", "mail", [1], 2, 3) == one
    assert one != Job("2", "mail", [1], 2, 3)
    assert one != "1"
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.unknown = 1  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(one))
    assert (type(copy), copy) == (sync.Job, one)
    for method in (copy.result, copy.wait_for_result):
        with pytest.raises(RuntimeError, match="requires a Queue"):
            method()


async def test_time_runs_out(server: Server, queue: Queue) -> None:
    job = await queue.add("mail", 1)
    for method in (job.result, job.wait_for_result):
        with pytest.raises(TimeoutError, match=job.id):
            await method(timeout=0.05, poll_interval=0.01)
    with pytest.raises(ValueError, match="timeout"):
        await job.result(timeout=0)
    with pytest.raises(ValueError, match="poll_interval"):
        await job.result(poll_interval=0)


async def test_a_workers_job_cannot_be_waited_for() -> None:
    job = Job("1", "mail", None)
    with pytest.raises(RuntimeError, match=r"Job\.result requires a Queue"):
        await job.result()
