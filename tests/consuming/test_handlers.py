"""Every kind of handler: on the loop, in threads, in processes, by name, in batches, in time."""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chasqui import BatchError, Job
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, ReaderBatch
from chasqui.queue import Queue
from chasqui.worker import Consumer, RawJob, Worker
from tests.consuming import handlers
from tests.consuming.conftest import Redis, Running, at_rest, until

#: What happens in pools has nothing to do with the server.
ONE_SERVER = pytest.mark.parametrize("server", ["valkey-9"], indirect=True)

Start = Callable[..., Running]
Dead = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


async def add_three(first: int, second: int, job: Job) -> int:
    return first + second + int(job.data)


class Callme:
    def __call__(self, job: Job) -> int:
        return int(job.data) * 2


class CallmeLater:
    async def __call__(self, job: Job) -> int:
        return int(job.data) * 2


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "handler",
    [
        handlers.double_later,
        handlers.double,
        Callme(),
        CallmeLater(),
        functools.partial(add_three, 1, 20),
        functools.partial(functools.partial(add_three, 1), 20),
        lambda job: handlers.double_later(job),
    ],
    ids=["async", "plain", "object", "async object", "partial", "partial twice", "lambda"],
)
async def test_whatever_can_be_called_runs(queue: Queue, start: Start, handler: Any) -> None:
    running = start(handler, store_results=True)
    job = await queue.add("n", 21)
    assert await running.result(queue, job.id) == 42


async def test_plain_functions_run_in_threads_side_by_side(queue: Queue, start: Start) -> None:
    both = threading.Barrier(2, timeout=20)

    def meet(job: Job) -> str:
        both.wait()
        return threading.current_thread().name

    running = start(meet, store_results=True, threads=2)
    jobs = [await queue.add("n", i) for i in range(2)]
    names = [await running.result(queue, job.id) for job in jobs]
    assert len(set(names)) == 2
    assert all("chasqui-handler" in name for name in names)


@ONE_SERVER
@pytest.mark.parametrize("had", [0, 1])
async def test_a_job_waits_for_a_thread_that_cannot_be_started(
    queue: Queue,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    had: int,
) -> None:
    """It has not run, so it has not failed; and it runs once. One that is there does the work."""
    ran: list[int] = []
    begun, gate = threading.Event(), threading.Event()

    def handler(job: Job) -> None:
        if job.data == 0:
            begun.set()
            gate.wait(60)
        ran.append(job.data)

    start_thread = threading.Thread.start
    refused = threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if "chasqui-handler" in thread.name:
            refused.set()
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    running = start(handler, threads=2)
    try:
        if had:
            await queue.add("n", 0)
            await asyncio.to_thread(begun.wait, 60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            await queue.add("n", 1, attempts=1)
            await asyncio.to_thread(refused.wait, 60)
            if had:
                gate.set()
                await running.completed(2)
    finally:
        gate.set()
    await running.completed(had + 1)
    assert sorted(ran) == [0, 1][1 - had :]
    assert ("waits for a thread: can't start new thread" in caplog.text) == (not had)


@pytest.mark.slow
@ONE_SERVER
async def test_processes_run_plain_and_async_functions(queue: Queue, start: Start) -> None:
    mapping = {
        "pid": handlers.process_id,
        "later": handlers.double_later,
        "here": handlers.process_id,
    }
    running = start(mapping, processes={"pid": 1, "later": 1}, store_results=True)
    pid = await queue.add("pid", None)
    later = await queue.add("later", 4)
    here = await queue.add("here", None)
    assert await running.result(queue, pid.id) != os.getpid()
    assert await running.result(queue, later.id) == 8
    assert await running.result(queue, here.id) == os.getpid()


@pytest.mark.slow
@ONE_SERVER
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("raise", b"ValueError: as told"),
        ("unpicklable", b"RuntimeError: CannotBeUnpickledError: as"),
        ("stop iteration", b"RuntimeError: StopIteration: "),
        ("die", b"BrokenProcessPool"),
    ],
)
async def test_what_fails_in_a_process_fails_here_and_the_next_job_runs(
    queue: Queue, start: Start, dead: Dead, data: str, error: bytes
) -> None:
    running = start(handlers.behave, processes=1, max_attempts=1, store_results=True)
    await queue.add("n", data)
    await running.buried(1)
    (buried,) = await dead()
    assert buried[b"reason"] == b"retries_exhausted"
    assert buried[b"error"].startswith(error)
    job = await queue.add("n", "fine")
    assert await running.result(queue, job.id) == "fine"


@pytest.mark.slow
@ONE_SERVER
async def test_a_process_that_dies_takes_no_other_run_with_it(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    running = start(handlers.wait_for_file, processes=2, max_attempts=1, store_results=True)
    going = await queue.add("n", {"began": f"{tmp_path}/1", "until": f"{tmp_path}/end"})
    began = tmp_path / "1"
    await until(lambda: asyncio.to_thread(began.exists), "the other run has begun")
    await queue.add("n", "die")
    await running.buried(1)
    (tmp_path / "end").touch()
    assert await running.result(queue, going.id) == "waited"


@pytest.mark.slow
@ONE_SERVER
async def test_unrecoverable_is_known_through_a_process(
    queue: Queue, start: Start, dead: Dead
) -> None:
    running = start(handlers.behave, processes=1)
    await queue.add("n", "final")
    await running.buried(1)
    assert (await dead())[0][b"reason"] == b"unrecoverable"


async def test_names_choose_and_default_takes_the_rest(queue: Queue, start: Start) -> None:
    async def a(job: Job) -> str:
        return "a"

    async def rest(job: Job) -> str:
        return f"rest: {job.name}"

    running = start({"a": a}, default=rest, store_results=True)
    jobs = [await queue.add(name, None) for name in ("a", "b", "")]
    found = [await running.result(queue, job.id) for job in jobs]
    assert found == ["a", "rest: b", "rest: "]


async def test_a_name_without_handler_is_buried(queue: Queue, start: Start, dead: Dead) -> None:
    async def a(job: Job) -> None:
        pass

    running = start({"a": a})
    await queue.add("b", None)
    routed = await running.next(DlqRouted)
    assert routed == DlqRouted("unrecoverable", 1, "b")
    (buried,) = await dead()
    assert buried[b"reason"] == b"unrecoverable"
    assert buried[b"detail"] == b"no handler"
    assert buried[b"attempts"] == b"0", "it never ran"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"handler": 5}, TypeError),
        ({"handler": {"a": None}}, TypeError),
        ({"handler": print, "default": print}, TypeError),
        ({"handler": print, "concurrency": 0}, ValueError),
        ({"handler": print, "concurrency": True}, TypeError),
        ({"handler": print, "concurrency": 100_001}, ValueError),
        ({"handler": print, "max_attempts": 0}, ValueError),
        ({"handler": print, "claim_min_idle_ms": 5}, ValueError),
        ({"handler": print, "result_ttl_ms": 0}, ValueError),
        ({"handler": print, "consumer_id": " "}, ValueError),
        ({"handler": print, "shutdown_deadline_s": float("nan")}, ValueError),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        Worker("queue", **options)


# ── Batches ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_a_batch_is_filled_while_it_lingers(queue: Queue, start: Start) -> None:
    sizes: list[int] = []

    async def handler(jobs: list[Job]) -> list[int]:
        sizes.append(len(jobs))
        return [job.data * 2 for job in jobs]

    added = await queue.add_bulk([{"name": "n", "data": i} for i in range(25)])
    options = {"concurrency": 1, "batch": 10, "batch_linger_ms": 2000, "store_results": True}
    running = start(handler, **options)
    await running.completed(25)
    assert sizes == [10, 10, 5]
    results = await queue.get_job_result_bulk([job.id for job in added])
    assert results == [i * 2 for i in range(25)]


async def test_one_batch_is_full_before_the_next_begins(queue: Queue, start: Start) -> None:
    """However many slots have nothing to do."""
    sizes: list[int] = []

    async def handler(jobs: list[Job]) -> None:
        sizes.append(len(jobs))

    await queue.add_bulk([{"name": "n", "data": i} for i in range(120)])
    running = start(handler, concurrency=8, batch=50, batch_linger_ms=1000)
    await running.completed(120)
    assert sizes == [50, 50, 20]


async def test_a_batch_is_read_at_once(queue: Queue, start: Start) -> None:
    """Not one by one, as fast as single jobs of such handlers would be done."""
    sizes: list[int] = []

    async def handler(jobs: list[Job]) -> None:
        sizes.append(len(jobs))
        await asyncio.sleep(0.2)

    await queue.add_bulk([{"name": "n", "data": i} for i in range(300)])
    running = start(handler, concurrency=1, batch=50, batch_linger_ms=5000)
    await running.completed(300)
    assert sizes == [50] * 6
    reads = [read.size for read in running.metrics.all(ReaderBatch) if read.size]
    assert len(reads) <= 3 * len(sizes)


async def test_a_drain_does_not_wait_for_a_batch_to_become_full(queue: Queue, start: Start) -> None:
    sizes: list[int] = []

    async def handler(jobs: list[Job]) -> None:
        sizes.append(len(jobs))

    running = start(handler, batch=50, batch_linger_ms=600_000, shutdown_deadline_s=600)
    await queue.add("n", None)

    async def is_in_hand() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 1

    await until(is_in_hand, "a slot gathers")
    await running.stop()
    assert sizes == [1]


async def test_each_job_of_a_batch_has_its_own_fate(
    queue: Queue, start: Start, dead: Dead, redis: Redis, keys: Any
) -> None:
    async def handler(jobs: list[Job]) -> None:
        raise BatchError({job.id: ValueError(job.data) for job in jobs if job.data % 2})

    jobs = await queue.add_bulk([{"name": "n", "data": i, "attempts": 1} for i in range(6)])
    running = start(handler, batch=6, batch_linger_ms=500)
    await running.completed(3)
    await running.buried(3)
    assert [one[b"error"] for one in await dead()] == [b"ValueError: %d" % i for i in (1, 3, 5)]
    assert len(jobs) == 6
    await until(lambda: at_rest(redis, keys), "every job of the batch is settled")


async def test_a_batch_whose_results_belong_to_no_job_is_done_and_told_of(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(jobs: list[Job]) -> list[int]:
        return [1, 2, 3]

    running = start(handler, batch=2, batch_linger_ms=0, store_results=True)
    job = await queue.add("n", None)
    await running.completed(1)
    assert await running.fact(job.result()) is None
    assert "returned no list of one result for each job" in caplog.text


async def test_the_good_jobs_of_a_batch_that_failed_in_part_have_results(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(jobs: list[Job]) -> None:
        raise BatchError(
            {job.id: ValueError(job.data) for job in jobs if job.data == 1},
            results={job.id: [job.data] for job in jobs} | {"unknown": 1},
        )

    jobs = await queue.add_bulk([{"name": "n", "data": i, "attempts": 1} for i in range(3)])
    running = start(handler, batch=3, batch_linger_ms=500, store_results=True)
    await running.buried(1)
    assert [await running.result(queue, jobs[i].id) for i in (0, 2)] == [[0], [2]]
    assert await queue.get_job_result(jobs[1].id) is None, "it failed, whatever it would return"
    assert "BatchError names jobs that were not in the batch: 'unknown'" in caplog.text


async def test_a_batch_that_raises_fails_as_a_whole(queue: Queue, start: Start, dead: Dead) -> None:
    def handler(jobs: list[Job]) -> None:
        raise OSError("all of them")

    await queue.add_bulk([{"name": "n", "data": i, "attempts": 1} for i in range(3)])
    running = start(handler, batch=3, batch_linger_ms=500)
    await running.buried(3)
    assert {one[b"error"] for one in await dead()} == {b"OSError: all of them"}


# ── Time limits ─────────────────────────────────────────────────────────────────────────────────


async def test_a_run_over_its_time_is_cancelled_and_failed(
    queue: Queue, start: Start, dead: Dead
) -> None:
    seen: list[str] = []

    async def handler(job: Job) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    running = start(handler, timeout_ms=50)
    await queue.add("n", None, attempts=1)
    outcome = await running.next(JobOutcome)
    assert outcome.kind is OutcomeKind.ERR
    await running.buried(1)
    assert seen == ["cancelled"]
    assert (await dead())[0][b"error"] == b"TimeoutError: the handler took longer than 0.05 s"


async def test_time_limits_go_by_name(queue: Queue, start: Start) -> None:
    async def handler(job: Job) -> str:
        await asyncio.sleep(0.2)
        return "done"

    running = start(handler, timeout_ms={"short": 20}, store_results=True)
    long = await queue.add("long", None)
    await queue.add("short", None, attempts=1)
    await running.buried(1)
    assert await running.result(queue, long.id) == "done"


@pytest.mark.fault(49)
@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True], ids=["returns", "goes on for ever"])
async def test_a_run_that_swallows_its_cancellation_has_failed_and_frees_its_slot(
    queue: Queue, start: Start, goes_on: bool
) -> None:
    end = asyncio.Event()

    async def handler(job: Job) -> None:
        if job.data == "fine":
            return
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                if not goes_on:
                    return

    running = start(handler, timeout_ms=50, concurrency=1)
    await queue.add("n", "swallow", attempts=1)
    await running.buried(1)
    await queue.add("n", "fine")
    await running.completed(1)
    end.set()


@pytest.mark.fault(49)
async def test_a_thread_over_its_time_keeps_neither_its_slot_nor_the_pool(
    queue: Queue, start: Start
) -> None:
    """It cannot be stopped: the run has failed, and a new thread takes the next job."""
    end = threading.Event()

    def handler(job: Job) -> str:
        if job.data == "hang":
            end.wait(60)
        return "done"

    try:
        running = start(handler, timeout_ms=200, concurrency=1, threads=1, store_results=True)
        await queue.add("n", "hang", attempts=1)
        await running.buried(1)
        job = await queue.add("n", "fine")
        assert await running.result(queue, job.id) == "done"
    finally:
        end.set()


@pytest.mark.slow
@ONE_SERVER
@pytest.mark.parametrize("returns", ["value", "coroutine"])
async def test_to_wait_for_a_thread_is_no_part_of_a_run(
    queue: Queue, start: Start, returns: str
) -> None:
    """Three runs one after the other take longer than one of them may."""

    async def later() -> str:
        return "done"

    def handler(job: Job) -> Any:
        time.sleep(0.4)
        return "done" if returns == "value" else later()

    jobs = await queue.add_bulk([{"name": "n", "data": i, "attempts": 1} for i in range(3)])
    running = start(handler, timeout_ms=1000, concurrency=3, threads=1, store_results=True)
    for job in jobs:
        assert await running.fact(job.result()) == "done"


@pytest.mark.slow
@ONE_SERVER
async def test_a_coroutine_from_a_thread_is_kept_to_its_time_and_holds_no_thread(
    queue: Queue, start: Start, dead: Dead
) -> None:
    meeting = asyncio.Barrier(3)

    async def later(job: Job) -> str:
        if job.name == "hang":
            await asyncio.sleep(60)
        await meeting.wait()
        return "met"

    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
    options = {"timeout_ms": {"hang": 50, "n": 20_000}, "threads": 1, "store_results": True}
    # `other` takes no thread, so there are more slots than threads.
    running = start({"other": later}, default=lambda job: later(job), **options)
    for job in jobs:
        assert await running.result(queue, job.id) == "met"
    await queue.add("hang", None, attempts=1)
    await running.buried(1)
    assert (await dead())[0][b"error"] == b"TimeoutError: the handler took longer than 0.05 s"


@pytest.mark.fault(49)
@pytest.mark.slow
@ONE_SERVER
async def test_a_process_over_its_time_is_ended(queue: Queue, start: Start) -> None:
    running = start(
        handlers.behave, timeout_ms=3000, concurrency=2, processes=1, store_results=True
    )
    await queue.add("n", "hang", attempts=1)
    await running.buried(1)
    job = await queue.add("n", "fine")
    assert await running.result(queue, job.id) == "fine"
    assert running.worker.health() is not None


# ── Consumer ────────────────────────────────────────────────────────────────────────────────────


async def test_consumer_hands_over_bytes_and_stores_bytes(
    server: Any, queue: Queue, queue_name: str
) -> None:
    from chasqui.model import payload

    seen: list[RawJob] = []

    async def handler(job: RawJob) -> bytes:
        seen.append(job)
        return payload.encode("stored")

    consumer = Consumer(server.url, queue_name, store_results=True, read_block_ms=200)
    running = asyncio.ensure_future(consumer.run(handler))
    job = await queue.add("n", {"a": 1})
    assert await job.wait_for_result() == "stored"
    assert (seen[0].id, seen[0].name, seen[0].attempt) == (job.id, "n", 0)
    assert payload.decode(seen[0].payload) == {"a": 1}
    with pytest.raises(RuntimeError):
        await consumer.run(handler)
    consumer.shutdown()
    await running


async def test_reads_are_told_to_the_sink(queue: Queue, start: Start) -> None:
    async def handler(job: Job) -> None:
        pass

    await queue.add_bulk([{"name": "n", "data": i} for i in range(5)])
    running = start(handler)
    assert await running.next(ReaderBatch) == ReaderBatch(5, 0)
