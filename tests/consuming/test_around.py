"""Hooks around runs, and the current job."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chasqui import Around, Job, Retry, Worker, WorkerConfig, current_job
from chasqui.consuming.handlers import Handlers
from chasqui.metrics import RetryScheduled
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming import handlers
from tests.consuming.conftest import Redis, Running, until

ONE_SERVER = pytest.mark.parametrize("server", ["valkey-9"], indirect=True)

Start = Callable[..., Running]
Run = Callable[[], Awaitable[Any]]
Dead = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


async def passing(job: Job, run: Run) -> Any:
    return await run()


async def echo(job: Job) -> Any:
    return job.data


def echo_in_a_thread(job: Job) -> Any:
    return job.data


def noting(notes: list[str], name: str) -> Around:
    async def hook(job: Job, run: Run) -> Any:
        notes.append(f"{name} before {job.data}")
        try:
            return [name, await run()]
        finally:
            notes.append(f"{name} after {job.data}")

    return hook


# ── Where they stand ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"around": ()}, {"around": []}])
def test_without_hooks_the_very_handler_runs(options: dict[str, Any]) -> None:
    worker = Worker("q", {"mail": echo, "plain": echo_in_a_thread}, **options)
    assert worker._handlers.find("mail")[0] is echo
    assert worker._handlers.find("plain")[0] is worker._handlers._runners["plain"]


def test_hooks_are_composed_once_for_each_handler_and_limit() -> None:
    limits = {"a": 5, "b": 5, "c": 6}
    found = Handlers(echo, threads=1, around=(passing,), timeout_ms=limits)
    runners = {name: found.find(name)[0] for name in "abcdef"}
    assert runners["a"] is runners["b"] is not runners["c"]
    assert runners["d"] is runners["e"]
    assert found.find("a")[1] is None, "the limit is inside of the hooks"
    for i in range(2000):  # more names than are remembered
        assert found.find(f"name {i}")[0] is runners["f"]
    assert Handlers({"a": echo}, threads=1, around=(passing,)).find("b") == (None, None)


def test_hooks_change_nothing_about_slots() -> None:
    worker = Worker("q", echo_in_a_thread, threads=3, around=[passing])
    assert worker._config.concurrency == 3


@ONE_SERVER
@pytest.mark.both_loops
@pytest.mark.parametrize("limit_ms", [None, 60_000], ids=["", "timed"])
@pytest.mark.parametrize(
    ("handler", "options"),
    [
        (echo, {}),
        (echo_in_a_thread, {}),
        pytest.param(handlers.double, {"processes": 1}, marks=pytest.mark.slow),
    ],
    ids=["async", "thread", "process"],
)
async def test_the_first_is_outermost(
    queue: Queue, start: Start, handler: Any, options: dict[str, Any], limit_ms: int | None
) -> None:
    notes: list[str] = []
    hooks = [noting(notes, "outer"), noting(notes, "inner")]
    running = start(handler, around=hooks, timeout_ms=limit_ms, store_results=True, **options)
    job = await queue.add("n", 4)
    value = 8 if handler is handlers.double else 4
    assert await running.result(queue, job.id) == ["outer", ["inner", value]]
    assert notes == ["outer before 4", "inner before 4", "inner after 4", "outer after 4"]


# ── What they may do ────────────────────────────────────────────────────────────────────────────


@ONE_SERVER
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "thread"])
async def test_a_hook_decides_how_a_run_ends(
    queue: Queue, start: Start, dead: Dead, is_plain: bool
) -> None:
    runs: list[str] = []

    def plain(job: Job) -> str:
        runs.append(job.name)
        if job.name in ("heals", "hides") and runs.count(job.name) < 3:
            raise ValueError("not yet")
        return "ran"

    async def handler(job: Job) -> str:
        return plain(job)

    async def hook(job: Job, run: Run) -> Any:
        match job.name:
            case "changes":
                return [await run()]
            case "raises":
                await run()
                raise ValueError("no good")
            case "waits" if not job.attempt:
                raise Retry(delay_ms=1)
            case "heals":
                for _ in range(2):
                    try:
                        return await run()
                    except ValueError:
                        pass
            case "hides":
                try:
                    return await run()
                except ValueError as error:
                    return str(error)
            case "skips":
                return "never ran"
        return await run()

    running = start(plain if is_plain else handler, around=[hook], store_results=True)
    names = ["changes", "waits", "heals", "hides", "skips"]
    jobs = await queue.add_bulk([{"name": name, "data": None} for name in names])
    results = [await running.result(queue, job.id) for job in jobs]
    assert results == [["ran"], "ran", "ran", "not yet", "never ran"]
    assert {name: runs.count(name) for name in names} == {
        "changes": 1, "waits": 1, "heals": 3, "hides": 1, "skips": 0,
    }  # fmt: skip
    assert [one.backoff_ms for one in running.metrics.all(RetryScheduled)] == [1]
    await queue.add("raises", None, attempts=1)
    await running.buried(1)
    (buried,) = await dead()
    assert buried[b"error"] == b"ValueError: no good"


@ONE_SERVER
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "thread"])
async def test_the_limit_is_the_handlers_and_hooks_see_what_it_raises(
    queue: Queue, start: Start, dead: Dead, is_plain: bool
) -> None:
    seen: list[str] = []
    free = threading.Event()

    def plain(job: Job) -> Any:
        if job.name == "hangs":
            free.wait(30)
        return job.data

    async def handler(job: Job) -> Any:
        if job.name == "hangs":
            await asyncio.sleep(1000)
        return job.data

    async def hook(job: Job, run: Run) -> Any:
        try:
            value = await run()
        except BaseException as error:
            seen.append(f"{type(error).__name__}: {error}")
            raise
        await asyncio.sleep(0.2)  # longer than the limit
        return value

    of_kind = plain if is_plain else handler
    running = start(of_kind, around=[hook], timeout_ms=100, max_attempts=1, store_results=True)
    quick = await queue.add("quick", "done")
    assert await running.result(queue, quick.id) == "done"
    await queue.add("hangs", 1)
    await running.buried(1)
    free.set()
    (buried,) = await dead()
    assert buried[b"error"].startswith(b"TimeoutError")
    assert seen == ["TimeoutError: the handler took longer than 0.1 s"]


@ONE_SERVER
async def test_a_run_that_has_not_begun_is_no_error_of_a_hook(
    queue: Queue, start: Start, redis: Redis
) -> None:
    """At the drain it goes back: a hook that hides errors must not settle it."""
    began, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []
    waiting = asyncio.Event()

    def block(job: Job) -> None:
        began.set()
        go_on.wait(30)

    async def hook(job: Job, run: Run) -> Any:
        if job.data:
            waiting.set()
        try:
            return await run()
        except Exception as error:
            errors.append(error)
            return None

    # The coroutine function keeps the number of slots above that of threads.
    both = {"n": block, "other": echo}
    running = start(both, around=[hook], threads=1, concurrency=2, shutdown_deadline_s=30)
    await queue.add_bulk([{"name": "n", "data": False}, {"name": "n", "data": True}])
    await running.fact(waiting.wait())
    await running.fact(asyncio.to_thread(began.wait, 30))
    await running.worker.close()

    async def stops() -> bool:
        return running.worker._handlers._threads.is_stopping

    await running.fact(until(stops, "the drain has begun"))
    go_on.set()
    await running.task
    assert errors == []
    left = await redis("XLEN", Keys(queue.name).stream)
    assert left == 1, "the one that has not begun is still there"


# ── What is refused ─────────────────────────────────────────────────────────────────────────────


class Hook:
    async def __call__(self, job: Job, run: Run) -> Any:
        return await run()

    async def method(self, job: Job, run: Run) -> Any:
        return await run()


async def with_more(job: Job, run: Run, name: str) -> Any:
    return await run()


async def takes_one(job: Job) -> Any:
    pass


async def takes_by_name(job: Job, run: Run, *, name: str) -> Any:
    pass


def plain_hook(job: Job, run: Run) -> Any:
    return run()


async def generator(job: Job, run: Run) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def manager(job: Job, run: Run) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("around", "told"),
    [
        (passing, r"around must be a sequence of hooks, got function: pass \[hook\]"),
        ("hooks", "around must be a sequence of hooks, got str"),
        (5, "around must be a sequence of hooks, got int"),
        ([passing, None], r"around\[1\] must be callable, got NoneType"),
        ([plain_hook], r"around\[0\] must be a coroutine function, .*: plain_hook is none"),
        ([generator], r"around\[0\] must be a coroutine function"),
        ([manager], r"around\[0\] must be a coroutine function"),
        ([Hook], r"around\[0\] must be a coroutine function"),
        ([takes_one], r"around\[0\] must accept two positional arguments, .* takes_one takes"),
        ([takes_by_name], r"takes_by_name takes \(job"),
        ([with_more], r"with_more takes"),
        ([Hook.method], r"Hook\.method takes"),
    ],
)
def test_what_is_no_hook_is_refused(around: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Worker("q", echo, around=around)
    with pytest.raises(TypeError, match=told):
        WorkerConfig(around=around)


@pytest.mark.parametrize(
    "hook", [passing, Hook(), Hook().method, functools.partial(with_more, name="x")]
)
def test_what_is_a_hook_is_taken(hook: Any) -> None:
    assert WorkerConfig(around=[hook]).around == (hook,)


def test_hooks_are_refused_with_batches() -> None:
    with pytest.raises(TypeError, match="around cannot go with batch"):
        WorkerConfig(around=[passing], batch=5)
    WorkerConfig(around=[], batch=5)


# ── The current job ─────────────────────────────────────────────────────────────────────────────


async def seen_below() -> list[str]:
    """What a coroutine finds, and a task and a thread of its own."""
    await asyncio.sleep(0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.to_thread(lambda: current_job().id))
        other = group.create_task(asyncio.sleep(0, current_job().id))
    return [current_job().id, task.result(), other.result()]


async def current_on_the_loop(job: Job) -> list[str]:
    return await seen_below()


def first_in_a_thread(job: Job) -> Any:
    assert current_job() is job
    return seen_below()


def current_in_a_thread(job: Job) -> list[str]:
    return [current_job().id] * 3


@ONE_SERVER
@pytest.mark.both_loops
@pytest.mark.parametrize("limit_ms", [None, 60_000], ids=["", "timed"])
@pytest.mark.parametrize("handler", [current_on_the_loop, first_in_a_thread, current_in_a_thread])
async def test_it_is_known_in_hooks_and_handlers(
    queue: Queue, start: Start, handler: Any, limit_ms: int | None
) -> None:
    """Each of several that run at once finds its own."""
    found: list[bool] = []

    async def hook(job: Job, run: Run) -> Any:
        found.append(current_job() is job)
        value = await run()
        found.append(current_job() is job)
        return value

    options = {"store_results": True, "timeout_ms": limit_ms, "concurrency": 4}
    running = start(handler, around=[hook], **options)
    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(20)])
    for job in jobs:
        assert await running.result(queue, job.id) == [job.id] * 3
    assert found == [True] * 40
    with pytest.raises(RuntimeError, match="where no job runs"):
        current_job()


@pytest.mark.slow
@ONE_SERVER
async def test_it_is_known_in_a_process(queue: Queue, start: Start) -> None:
    running = start(handlers.current, around=[passing], processes=1, store_results=True)
    jobs = await queue.add_bulk([{"name": "n", "data": i, "attempts": i} for i in (3, 4)])
    for job in jobs:
        assert await running.result(queue, job.id) == [job.id, job.data, True]


@ONE_SERVER
async def test_a_slot_with_hooks_stays_in_its_task(queue: Queue, start: Start) -> None:
    """The context after a run is the one before it."""
    tasks: set[Any] = set()

    async def handler(job: Job) -> None:
        await asyncio.sleep(0)
        tasks.add(asyncio.current_task())
        if job.data == 7:
            raise Retry(delay_ms=1_000_000)

    running = start(handler, around=[passing, passing], concurrency=1)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(20)])
    await running.completed(19)
    assert len(tasks) == 1


@ONE_SERVER
@pytest.mark.parametrize("around", [[], [passing]], ids=["without hooks", "with hooks"])
async def test_what_a_run_leaves_behind_keeps_its_job(
    queue: Queue, start: Start, around: list[Any]
) -> None:
    """A task that outlives the run that started it, while its slot runs other jobs."""
    go_on = asyncio.Event()
    left: dict[int, asyncio.Task[str]] = {}

    async def outlives() -> str:
        await go_on.wait()
        return current_job().id

    async def handler(job: Job) -> None:
        assert current_job() is job
        left[job.data] = asyncio.create_task(outlives())

    running = start(handler, around=around, concurrency=1)
    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(5)])
    await running.completed(5)
    go_on.set()
    assert [await left[i] for i in range(5)] == [job.id for job in jobs]


@ONE_SERVER
async def test_a_slot_whose_code_asks_for_its_job_stays_in_its_task(
    queue: Queue, start: Start
) -> None:
    tasks: set[Any] = set()

    async def handler(job: Job) -> None:
        assert current_job() is job
        tasks.add(asyncio.current_task())

    running = start(handler, concurrency=1)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(20)])
    await running.completed(20)
    assert len(tasks) == 1
