"""Each run has context variables of its own: what one job sets, the next does not see."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job
from chasqui.queue import Queue
from tests.consuming import handlers
from tests.consuming.conftest import Running

ONE_SERVER = pytest.mark.parametrize("server", ["valkey-9"], indirect=True)

Start = Callable[..., Running]

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")
tenant: contextvars.ContextVar[Any] = contextvars.ContextVar("tenant", default="")


class Incomparable:
    """A value that cannot be compared, as arrays are."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = object.__hash__


async def awaited() -> list[str]:
    """What is seen further down: in a coroutine, in a task, in a thread, within a limit."""
    await asyncio.sleep(0)
    seen = [tenant.get()]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.to_thread(tenant.get))
        seen.append(await task)
    return seen


async def on_the_loop(job: Job) -> list[str]:
    found = [caller.get(), tenant.get()]
    tenant.set(job.data)
    return found + await awaited()


def in_a_thread(job: Job) -> list[str]:
    found = [caller.get(), tenant.get()]
    tenant.set(job.data)
    return [*found, tenant.get(), contextvars.copy_context()[tenant]]


def first_in_a_thread(job: Job) -> Any:
    """As decorators do that are plain functions around a coroutine function."""
    found = [caller.get(), tenant.get()]
    tenant.set(job.data)

    async def then() -> list[str]:
        return found + await awaited()

    return then()


async def in_a_batch(jobs: list[Job]) -> list[list[str]]:
    (job,) = jobs
    return [await on_the_loop(job)]


def in_a_batch_in_a_thread(jobs: list[Job]) -> list[list[str]]:
    (job,) = jobs
    return [in_a_thread(job)]


@ONE_SERVER
@pytest.mark.both_loops
@pytest.mark.parametrize("limit_ms", [None, 60_000], ids=["", "timed"])
@pytest.mark.parametrize(
    ("handler", "batch"),
    [
        (on_the_loop, None),
        (in_a_thread, None),
        (first_in_a_thread, None),
        (in_a_batch, 1),
        (in_a_batch_in_a_thread, 1),
    ],
    ids=["async", "thread", "thread, then async", "batch", "batch in a thread"],
)
async def test_what_a_run_sets_is_its_own(
    queue: Queue, start: Start, handler: Any, batch: int | None, limit_ms: int | None
) -> None:
    caller.set("set before run")
    jobs = await queue.add_bulk([{"name": "n", "data": f"tenant {i}"} for i in range(5)])
    options = {"batch": batch, "timeout_ms": limit_ms, "store_results": True}
    running = start(handler, concurrency=1, threads=1, **options)
    for job in jobs:
        seen = await running.result(queue, job.id)
        assert seen == ["set before run", "", job.data, job.data]
    assert tenant.get() == "", "nor does the caller"


@pytest.mark.slow
@ONE_SERVER
async def test_what_a_run_in_a_process_sets_is_its_own(queue: Queue, start: Start) -> None:
    running = start(handlers.note, processes=1, concurrency=1, store_results=True)
    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
    found = [await running.result(queue, job.id) for job in jobs]
    assert found == [["nothing", i] for i in range(3)]


@ONE_SERVER
async def test_a_slot_goes_on_in_its_task_unless_a_run_changed_the_context(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sets nothing, or takes it back, pays for no task."""
    tasks: dict[str, set[Any]] = {}

    async def handler(job: Job) -> None:
        tasks.setdefault(job.name, set()).add(asyncio.current_task())
        if job.name == "resets":
            tenant.reset(tenant.set("a while"))
        elif job.name == "sets":
            tenant.set(job.data)
        elif job.name == "sets what cannot be compared":
            tenant.set(Incomparable())

    tenant.set(Incomparable())
    names = ["plain", "resets", "sets", "sets what cannot be compared"]
    await queue.add_bulk([{"name": name, "data": i} for name in names for i in range(5)])
    running = start(handler, concurrency=1)
    await running.completed(20)
    assert [len(tasks[name]) for name in names] == [1, 1, 5, 5]
    assert tasks["plain"] == tasks["resets"]
    assert caplog.text == "", "a slot that begins anew is nothing to tell"


@ONE_SERVER
async def test_a_run_that_sets_a_variable_and_cancels_its_task_leaves_one_slot(
    queue: Queue, start: Start
) -> None:
    seen: list[Any] = []
    together = 0

    async def handler(job: Job) -> None:
        nonlocal together
        together += 1
        seen.append((tenant.get(), together))
        tenant.set(job.data)
        if job.data % 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # and return: whatever is awaited next is cancelled
        else:
            await asyncio.sleep(0)
        together -= 1

    await queue.add_bulk([{"name": "n", "data": i} for i in range(6)])
    running = start(handler, concurrency=1)
    await running.completed(6)
    assert seen == [("", 1)] * 6
