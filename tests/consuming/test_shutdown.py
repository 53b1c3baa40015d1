"""The end of a worker: nothing lost, nothing counted that did not run, nothing left behind."""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chasqui import Job, Worker
from chasqui.cli.facts import mapping
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.errors import ServerError, UnreachableError
from chasqui.metrics import LockOutcome
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming.conftest import WAIT_S, Redis, Running, at_rest, until
from tests.proxy import Proxy
from tests.servers import Server

Start = Callable[..., Running]
StartAt = Callable[..., Running]
MakeProxy = Callable[[str], Proxy]


async def fine(job: Job) -> None:
    pass


async def knows_claim(redis: Redis, keys: Keys) -> bool:
    """Whether the server can take over entries in a read."""
    with pytest.raises(ServerError) as refused:
        await redis("XREADGROUP", "GROUP", "no", "no", "CLAIM", 1, "STREAMS", keys.stream, ">")
    return "NOGROUP" in str(refused.value)


async def test_threads_that_handlers_block_are_in_nobodys_way(
    queue: Queue, start: Start, server: Server, queue_name: str
) -> None:
    """Those of the loop are few, and what blocks in them goes on when its handler is cancelled."""
    gate, begun = threading.Event(), 0

    async def handler(job: Job) -> None:
        nonlocal begun
        begun += 1
        await asyncio.to_thread(gate.wait)

    async def all_begun() -> bool:
        return begun == 40

    await queue.add_bulk([{"name": "n", "data": i} for i in range(40)])
    running = start(handler, shutdown_deadline_s=0.1)
    try:
        await until(all_begun, "all wait for a thread, or in one")
        by_name = server.url.replace("127.0.0.1", "localhost")
        async with Queue(queue_name, redis_url=by_name) as it:
            await it.counts()
        await running.worker.close()
    finally:
        gate.set()


@pytest.mark.both_loops
@pytest.mark.usefixtures("hoarding")
async def test_close_under_load_hands_back_what_has_not_begun(
    queue: Queue, start: Start, redis: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    gate = asyncio.Event()
    runs: Counter[int] = Counter()

    async def handler(job: Job) -> None:
        runs[job.data] += 1
        await gate.wait()

    await queue.add_bulk([{"name": "n", "data": i} for i in range(50)])
    running = start(handler, concurrency=5, read_count=20, shutdown_deadline_s=20)

    async def all_busy() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 5 and health.prefetched > 0

    await until(all_busy, "five run and more wait")
    await running.worker.close()
    await running.worker.close()
    assert running.worker.is_closed

    async def handed_back() -> list[Any] | None:
        pending = await redis("XPENDING", keys.stream, "default", "-", "+", 100)
        busy = [one for one in pending if one[2] < 864_000_000]
        return pending if len(busy) == 5 < len(pending) else None

    pending = await until(handed_back, "the others are free at once")
    assert Counter(one[3] for one in pending)[1] == 5
    assert {one[3] for one in pending} == {0, 1}, "what is handed back counts as never delivered"
    assert not running.task.done(), "running handlers are waited for"
    gate.set()
    await running.task
    assert sum(runs.values()) == 5
    left = await redis("XPENDING", keys.stream, "default", "-", "+", 100)
    assert {one[3] for one in left} == {0}, "acks were flushed"
    assert caplog.text.count("that had not begun go back to it") == 1
    assert "cut short" not in caplog.text

    heir = start(handler, claim_min_idle_ms=60_000)
    await heir.completed(45)
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == Counter(range(50))


@pytest.mark.parametrize("options", [{}, {"timeout_ms": 60_000}], ids=str)
async def test_a_job_that_waits_for_a_thread_does_not_begin_during_the_drain(
    queue: Queue, start: Start, redis: Redis, keys: Keys, options: dict[str, Any]
) -> None:
    gate = threading.Event()
    begun = 0

    def handler(job: Any) -> None:
        nonlocal begun
        begun += 1
        gate.wait(WAIT_S)

    async def coroutine(job: Any) -> None: ...  # takes no thread: there are more slots than those

    await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
    running = start({"n": handler, "other": coroutine}, threads=1, concurrency=3, **options)

    async def all_have_slots() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 3 and begun == 1

    await until(all_have_slots, "one runs and two wait")
    await running.worker.close()

    async def drains() -> bool:
        engine = running.worker._engine
        return engine is not None and engine._dispatcher._is_stopping

    await until(drains, "it drains")
    gate.set()
    await running.task
    assert begun == 1
    left = await redis("XPENDING", keys.stream, "default", "-", "+", 10)
    assert [one[3] for one in left] == [0, 0], "what is handed back counts as never delivered"

    heir = start(handler, claim_min_idle_ms=60_000, **options)
    await heir.completed(2)
    await until(lambda: at_rest(redis, keys), "all is done")


@pytest.mark.usefixtures("hoarding")
async def test_a_worker_that_waits_takes_at_once_what_is_handed_back(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """It reads, and leases last, for longer than this test takes."""
    options = {"claim_min_idle_ms": 300_000}
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        if job.data == "first":
            await gate.wait()

    async def holds(running_now: int, prefetched: int) -> bool:
        health = running.worker.health()
        return health is not None and (health.running, health.prefetched) == (
            running_now,
            prefetched,
        )

    async def reads(count: int) -> bool:
        clients = (await redis("CLIENT", "LIST")).decode().splitlines()
        blocked = [one for one in clients if " flags=b " in one and " cmd=xreadgroup " in one]
        return len(blocked) == count

    running = start(handler, concurrency=1, read_count=20, shutdown_deadline_s=60, **options)
    await queue.add("n", "first")
    await until(lambda: holds(1, 0), "one runs")
    await queue.add("n", "second")
    await until(lambda: holds(1, 1), "one waits behind it")
    heir = start(handler, read_block_ms=300_000, **options)
    await until(lambda: reads(2), "both wait for more")
    await running.worker.close()
    await heir.completed(1)
    gate.set()
    await running.task
    await until(lambda: at_rest(redis, keys), "all is done")
    assert heir.metrics.jobs_completed == running.metrics.jobs_completed == 1


@pytest.mark.usefixtures("hoarding")
async def test_what_is_handed_back_stays_free_though_the_own_read_has_not_ended_yet(
    queue: Queue,
    start: Start,
    redis: Redis,
    redis_at: Callable[[str], Redis],
    keys: Keys,
    server: Server,
) -> None:
    """A proxy passes on the end of a connection when it likes."""
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await gate.wait()

    async def holds_some() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 1 and health.prefetched > 0

    async def blocks() -> bool:
        clients = (await redis("CLIENT", "LIST")).decode().splitlines()
        return any(" name=left-behind " in one and " flags=b " in one for one in clients)

    async def free() -> list[Any]:
        pending = await redis("XPENDING", keys.stream, "default", "-", "+", 100)
        return [one for one in pending if one[2] >= 864_000_000]

    await queue.add_bulk([{"name": "n", "data": i} for i in range(20)])
    running = start(
        handler,
        concurrency=1,
        read_count=20,
        shutdown_deadline_s=60,
        claim_min_idle_ms=300_000,
    )
    await until(holds_some, "one runs and more wait")
    (held, *_) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
    claim = ("CLAIM", 300_000) if await knows_claim(redis, keys) else ()
    reader = redis_at(server.url)
    await reader("CLIENT", "SETNAME", "left-behind")
    words = ("GROUP", "default", held[1], "BLOCK", 60_000, *claim, "STREAMS", keys.stream, ">")
    reading = asyncio.ensure_future(reader("XREADGROUP", *words))
    await until(blocks, "a read of ours is left behind")
    await running.worker.close()
    await until(free, "what waited is free while one runs")
    assert not running.task.done()
    gate.set()
    reading.cancel()
    await running.task


@pytest.mark.usefixtures("hoarding")
async def test_what_is_handed_back_is_not_counted_as_new_where_nobody_must_be_woken(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """The server's counts stay what they are: how many entries came, and how many are unread."""

    async def facts() -> dict[bytes, Any]:
        return mapping(await redis("XINFO", "STREAM", keys.stream))

    async def holds_some() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 1 and health.prefetched > 0

    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await gate.wait()

    await queue.add_bulk([{"name": "n", "data": i} for i in range(50)])
    before = await facts()
    has_claim = await knows_claim(redis, keys)
    running = start(handler, concurrency=1, read_count=20, shutdown_deadline_s=60)
    await until(holds_some, "one runs and more wait")
    await running.worker.close()

    async def is_handed_back() -> bool:
        pending = await redis("XPENDING", keys.stream, "default", "-", "+", 100)
        return any(one[2] >= 864_000_000 for one in pending)

    await until(is_handed_back, "the others are free")
    after = await facts()
    gate.set()
    await running.task
    assert (after[b"last-generated-id"] != before[b"last-generated-id"]) == has_claim
    if b"entries-added" in before:
        assert after[b"entries-added"] == before[b"entries-added"] + has_claim


@pytest.mark.parametrize("is_now", [False, True], ids=["deadline", "stop_now"])
async def test_runs_beyond_the_deadline_are_cancelled_and_handed_back(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    is_now: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    cancelled: list[int] = []

    async def handler(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(job.data)
            raise

    added = await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
    running = start(handler, shutdown_deadline_s=60 if is_now else 0.05)

    async def all_run() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 3

    await until(all_run, "three run")
    if is_now:
        running.worker.stop_now()
    else:
        await running.worker.close()
    await running.task
    health = running.worker.health()
    assert health is not None
    assert health.cut_short == 3
    assert not health.is_incomplete
    assert "that had not begun" not in caplog.text
    (told,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "3 jobs were cut short by the end of the worker, and will run again: " in told
    assert all(f"{job.id} (n)" in told for job in added)
    assert sorted(cancelled) == [0, 1, 2]
    pending = await redis("XPENDING", keys.stream, "default", "-", "+", 10)
    assert [one[3] for one in pending] == [0, 0, 0]
    assert running.metrics.jobs_failed == 0, "that was no failure of theirs"
    heir = start(fine, claim_min_idle_ms=60_000)
    await heir.completed(3)


async def test_run_twice_is_one_run(queue: Queue, start: Start) -> None:
    running = start(fine)
    second = asyncio.ensure_future(running.worker.run())
    await queue.add("n", None)
    await running.completed(1)
    assert running.worker.is_running
    await running.stop()
    await second
    assert not running.worker.is_running
    await running.worker.run()  # over: returns at once


async def test_a_worker_that_was_closed_first_does_not_run(redis_86: Any, queue_name: str) -> None:
    worker = Worker(queue_name, fine, redis_url=redis_86.url)
    await worker.close()
    await worker.run()
    assert worker.health() is None


async def test_cancelling_run_drains(queue: Queue, start: Start, redis: Redis, keys: Keys) -> None:
    begun = asyncio.Event()
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await gate.wait()

    running = start(handler, shutdown_deadline_s=20)
    await queue.add("n", None)
    await running.fact(begun.wait())
    running.task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert running.metrics.jobs_completed == 1
    assert await at_rest(redis, keys)


def _has_stopped_reading(running: Running) -> Callable[[], Awaitable[bool]]:
    """What tells whether the drain is past its first step."""

    async def told() -> bool:
        engine = running.worker._engine
        return engine is not None and engine._reading.is_closed

    return told


async def test_cancelling_run_twice_stops_at_once(queue: Queue, start: Start) -> None:
    begun = asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    running = start(handler, shutdown_deadline_s=600)
    await queue.add("n", None)
    await running.fact(begun.wait())
    running.task.cancel()
    await until(_has_stopped_reading(running), "the drain has begun")
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert not running.worker.is_running


async def test_no_cancellation_keeps_a_worker_from_letting_go(
    queue: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, gate = threading.Event(), threading.Event()
    stop = Heartbeat.stop

    def stop_later(self: Heartbeat) -> None:
        stopping.set()
        assert gate.wait(WAIT_S)
        stop(self)

    monkeypatch.setattr(Heartbeat, "stop", stop_later)
    running = start(fine)
    await queue.add("n", None)
    await running.completed(1)
    running.task.cancel()
    assert await asyncio.to_thread(stopping.wait, WAIT_S)
    for _ in range(3):
        running.task.cancel()
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    engine = running.worker._engine
    assert engine is not None
    assert not engine.is_running
    assert engine.connection.is_closed
    assert not [one for one in threading.enumerate() if queue.name in one.name]


@pytest.mark.parametrize("is_silent", [False, True], ids=["gone", "silent"])
@pytest.mark.parametrize(
    "was_closed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["running", "draining"]
)
async def test_cancelling_run_does_not_wait_for_a_server_that_does_not_answer(
    redis_86: Server,
    make_proxy: MakeProxy,
    start_at: StartAt,
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    was_closed: bool,
    is_silent: bool,
) -> None:
    """Not even if it was to drain in all calm, for ten minutes."""
    monkeypatch.setattr("chasqui.consuming.drain.CANCELLED_S", 0.1)
    if is_silent:  # a while is left to a server whose links are there
        monkeypatch.setattr("chasqui.consuming.drain.FLUSH_DEADLINE_S", 0.2)
    proxy = make_proxy(redis_86.url)
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await gate.wait()

    running = start_at(proxy.url, handler, shutdown_deadline_s=600)
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        await queue.add("n", None)
        await running.fact(begun.wait())
        if is_silent:
            proxy.stall()
        else:
            proxy.is_refusing = True
            proxy.cut()
        gate.set()
        await running.completed(1)
        if was_closed:
            await running.worker.close()
            await until(_has_stopped_reading(running), "the drain has begun")
        running.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(running.task), WAIT_S)
        assert "1 finished job could not be acknowledged in time" in caplog.text
        assert "failed job" not in caplog.text
        assert caplog.text.count("the drain is incomplete") == 1
        assert not [one for one in threading.enumerate() if queue_name in one.name]


async def until_cancelled(job: Job) -> None:
    await asyncio.get_running_loop().create_future()


class Deaf:
    """A handler that takes no notice of its cancellation, until the test is over."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        while not self.end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.end.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["idle", "running", "deaf", "stopped"])
async def test_a_drain_ends_in_time_though_the_server_is_silent(
    redis_86: Server, make_proxy: MakeProxy, start_at: StartAt, queue_name: str, kind: str
) -> None:
    """Within the deadline and five seconds more, whatever the handlers do: that is the promise."""
    proxy = make_proxy(redis_86.url)
    deaf = Deaf()
    running = start_at(
        proxy.url, deaf if kind == "deaf" else until_cancelled, shutdown_deadline_s=1
    )
    jobs = 0 if kind == "idle" else 3

    async def is_busy() -> bool:
        health = running.worker.health()
        return health is not None and health.is_connected and health.running == jobs

    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        for n in range(jobs):
            await queue.add("n", n)
        await running.fact(until(is_busy, "its jobs run"))
        await running.next(LockOutcome)  # so the end has leadership to hand over, too
        proxy.stall()
        began_s = time.monotonic()
        if kind == "stopped":
            running.worker.stop_now()
        await running.stop()
        took_s = time.monotonic() - began_s
    deaf.end.set()
    assert took_s < 1 + 5 + 2  # the last for a busy machine


async def test_a_worker_ends_though_no_thread_can_be_started(
    queue: Queue, start: Start, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(fine)
    await queue.add("n", None)
    await running.completed(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        await running.stop()
    assert not [one for one in threading.enumerate() if queue_name in one.name]


@pytest.mark.slow
async def test_a_worker_ends_though_a_name_is_being_looked_up(
    redis_86: Server,
    make_proxy: MakeProxy,
    start_at: StartAt,
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lookup cannot be cancelled, and a name server may let it wait for long."""
    proxy = make_proxy(redis_86.url)
    url = proxy.url.replace("127.0.0.1", "localhost")
    running = start_at(url, until_cancelled, claim_min_idle_ms=300, shutdown_deadline_s=1)

    async def is_busy() -> bool:
        return (health := running.worker.health()) is not None and health.running == 1

    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        await queue.add("n", None)
        await until(is_busy, "there is a lease to renew")
    gate, asking = threading.Event(), set[str]()

    def never(*arguments: Any, **options: Any) -> Any:
        asking.add(threading.current_thread().name)
        gate.wait()
        raise OSError("as told")

    async def heartbeat_asks() -> bool:
        return any("heartbeat" in name for name in asking)

    caplog.set_level(logging.DEBUG, "chasqui.consuming")
    try:
        with monkeypatch.context() as patch:
            patch.setattr("socket.getaddrinfo", never)
            proxy.cut()
            await until(heartbeat_asks, "the heartbeat looks for its server")
            await running.stop()
    finally:
        gate.set()
    assert "hangs and is left behind" in caplog.text


async def test_no_server_to_begin_with_is_an_error(queue_name: str) -> None:
    worker = Worker(queue_name, fine, redis_url="redis://127.0.0.1:1")
    with pytest.raises(UnreachableError):
        await worker.run()
    assert not worker.is_running


async def test_leadership_is_released_and_taken_up_by_the_next(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    first = start(fine, consumer_id="first")
    assert await first.next(LockOutcome) is LockOutcome.ACQUIRED
    assert await redis("GET", keys.promoter_lock) == b"first"
    second = start(fine, consumer_id="second")
    assert await second.next(LockOutcome) is LockOutcome.HELD
    await first.stop()
    assert await second.next(LockOutcome) is LockOutcome.ACQUIRED
    await queue.add("n", None, delay_ms=1)
    await second.completed(1)


async def test_a_duty_that_breaks_begins_anew(
    queue: Queue, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from chasqui.timed.promoter import PromoterLoop

    monkeypatch.setattr("chasqui.consuming.engine.LOOP_AGAIN_MIN_S", 0.05)
    run = PromoterLoop.run
    broken = 2

    async def break_first(self: PromoterLoop, stop: asyncio.Event) -> None:
        nonlocal broken
        if broken:
            broken -= 1
            raise RuntimeError("a bug")
        await run(self, stop)

    monkeypatch.setattr(PromoterLoop, "run", break_first)
    running = start(fine)
    await queue.add("now", None)
    await queue.add("later", None, delay_ms=1)
    await running.completed(2)
    assert broken == 0
    assert "the promoter ended and is started again" in caplog.text


@pytest.mark.slow
@pytest.mark.both_loops
async def test_nothing_is_left_behind(valkey_9: Any, queue_name: str) -> None:
    def plain(job: Job) -> None:
        pass

    async def once() -> None:
        async with Queue(queue_name, redis_url=valkey_9.url) as queue:
            worker = Worker(
                queue_name, {"a": fine, "b": plain}, redis_url=valkey_9.url, read_block_ms=100
            )
            running = asyncio.ensure_future(worker.run())
            jobs = [{"name": name, "data": None} for name in ("a", "b") for _ in range(20)]
            await queue.add_bulk(jobs)

            async def is_done() -> bool:
                health = worker.health()
                return health is not None and health.finished == 40

            await until(is_done, "all ran")
            await worker.close()
            await running

    def left() -> tuple[int, int, int]:
        gc.collect()
        threads = [one for one in threading.enumerate() if "chasqui" in one.name]
        sockets = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets += os.readlink(fd).startswith("socket:")
        return len(asyncio.all_tasks()), len(threads), sockets

    await once()

    async def threads_are_gone() -> bool:
        return left()[1] == 0

    await until(threads_are_gone, "pool threads have ended")
    before = left()
    for _ in range(3):
        await once()
    await until(threads_are_gone, "pool threads have ended")
    assert left() == before
