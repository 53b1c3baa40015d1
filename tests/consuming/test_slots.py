"""A slot serves one job after the other, whatever a handler does to the task it runs in."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job, Worker
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.servers import Server

Start = Callable[..., Running]


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancels(job: Job) -> None:
    cancel_own_task()
    await asyncio.sleep(0)


async def cancels_twice(job: Job) -> None:
    cancel_own_task()
    try:
        await asyncio.sleep(0)
    finally:
        await cancels(job)


async def swallows(job: Job) -> None:
    """And says nothing of it: the task counts as being cancelled from now on."""
    try:
        await cancels(job)
    except asyncio.CancelledError:
        return


async def raises(job: Job) -> None:
    raise asyncio.CancelledError


async def returns(job: Job) -> None:
    """Whatever is awaited next is cancelled."""
    cancel_own_task()


@pytest.mark.fault(48)
@pytest.mark.both_loops
@pytest.mark.parametrize("is_batch", [False, True], ids=["", "batch"])
@pytest.mark.parametrize(
    ("rude", "failed"),
    [([cancels], 1), ([cancels_twice], 1), ([swallows, raises], 1), ([returns], 0)],
    ids=["cancels", "cancels twice", "swallows, then raises", "returns"],
)
async def test_a_handler_that_cancels_its_own_task_keeps_no_slot_from_the_next_jobs(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    rude: list[Any],
    failed: int,
    is_batch: bool,
) -> None:
    runs = {handler.__name__: handler for handler in rude}

    async def handler(job: Job) -> None:
        await runs.get(job.name, asyncio.sleep)(job if job.name in runs else 0)

    async def batch(jobs: list[Job]) -> None:
        for job in jobs:
            await handler(job)

    running = start(batch, batch=1, concurrency=1) if is_batch else start(handler, concurrency=1)
    for name in runs:
        await queue.add(name, None, attempts=1)
        await until(lambda: at_rest(redis, keys), "it is over")
    await running.buried(failed)
    await queue.add("next", None)
    await running.completed(len(rude) - failed + 1)
    assert running.metrics.dlq_count() == failed
    health = running.worker.health()
    assert health is not None
    assert health.cut_short == 0


async def test_a_slot_that_is_cancelled_while_it_has_nothing_to_do_is_opened_again(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def handler(job: Job) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)

    running = start(handler, concurrency=1)
    for count in range(1, 3):
        await queue.add("n", None)
        await running.completed(count)
        tasks[-1].cancel()
        await asyncio.wait({tasks[-1]})
    await queue.add("n", None)
    await running.completed(3)
    assert len(set(tasks)) == 3
    assert "ended and is opened again: it was cancelled" in caplog.text
    engine = running.worker._engine
    assert engine is not None

    async def is_idle() -> bool:
        return engine.held.idle_places == 1

    await until(is_idle, "one slot waits, and no more")


async def test_a_loop_that_cancels_all_its_tasks_fails_no_job(
    server: Server, queue: Queue, queue_name: str, redis: Redis, keys: Keys
) -> None:
    """As `asyncio.run` does when its main function returns."""

    async def main() -> None:
        begun = asyncio.Event()

        async def handler(job: Job) -> None:
            begun.set()
            await asyncio.Event().wait()

        worker = Worker(queue_name, handler, redis_url=server.url, concurrency=2)
        running = asyncio.ensure_future(worker.run())
        await begun.wait()
        assert not running.done()

    await queue.add("n", None, attempts=1)
    await asyncio.to_thread(asyncio.run, main())
    assert await redis("XLEN", keys.dlq) == 0
    assert (await redis("XPENDING", keys.stream, "default"))[0] == 1
