"""`jobs.drain`: everything runs to its end, in the order of the clock, and nothing waits for it."""

import asyncio
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from chasqui import App, Job, Queue, Retry, UnrecoverableError, current_job
from chasqui.testing import DrainError, Jobs

NOWHERE = "redis://127.0.0.1:1"


def recording(app: App[Any], seen: list[Any]) -> Any:
    """A task that notes its argument."""

    @app.task
    async def note(what: str) -> str:
        seen.append(what)
        return what

    return note


async def test_waiting_jobs_run_and_their_results_can_be_read(jobs: Jobs) -> None:
    app, seen = App("shop", redis_url=NOWHERE), []
    note = recording(app, seen)
    job = await note.enqueue("a")
    drained = await jobs.drain()
    assert seen == ["a"]
    assert (drained.completed, drained.failed, drained.retried, drained.dead) == (1, 0, 0, [])
    assert drained.moved == timedelta()
    assert await job.result() == "a"
    assert jobs.all_enqueued() == []


async def test_a_thousand_jobs_of_a_month_run_in_their_order(jobs: Jobs) -> None:
    app, seen = App("shop"), []

    @app.task
    async def at(minute: int) -> None:
        seen.append(minute)

    minutes = [43 * i for i in range(1, 1001)]
    shuffled = random.Random(7).sample(minutes, len(minutes))
    calls = [at.with_options(delay=timedelta(minutes=one)).bind(one) for one in shuffled]
    await app.enqueue_many(calls)
    drained = await jobs.drain()
    assert seen == minutes
    assert drained.completed == 1000
    assert [run.args["minute"] for run in drained.jobs] == minutes
    assert timedelta(days=29) < drained.moved <= timedelta(minutes=43_000)


async def test_delays_that_handlers_add_keep_their_place(jobs: Jobs) -> None:
    app, seen = App("shop"), []
    note = recording(app, seen)

    @app.task
    async def begin() -> None:
        seen.append("begin")
        await note.with_options(delay=timedelta(hours=2)).enqueue("two hours later")
        await note.enqueue("at once")

    await begin.with_options(delay=timedelta(days=1)).enqueue()
    await note.with_options(delay=timedelta(days=1, hours=1)).enqueue("after a day and an hour")
    await note.with_options(delay=timedelta(days=1, hours=3)).enqueue("after a day and three")
    drained = await jobs.drain()
    assert seen == [
        *("begin", "at once", "after a day and an hour"),
        *("two hours later", "after a day and three"),
    ]
    assert timedelta(days=1, hours=2) < drained.moved <= timedelta(days=1, hours=3)


async def test_jobs_of_several_queues_and_apps_run_in_one_order(jobs: Jobs) -> None:
    seen: list[str] = []
    shop, mail = App("shop"), App("mail")
    note, other = recording(shop, seen), recording(mail, seen)

    @shop.task(queue="urgent")
    async def last() -> None:
        seen.append("urgent")
        await other.with_options(delay=timedelta(minutes=1)).enqueue("added to the other app")

    await last.with_options(delay=timedelta(minutes=3)).enqueue()
    await other.with_options(delay=timedelta(minutes=2)).enqueue("mail")
    await note.with_options(delay=timedelta(minutes=1)).enqueue("shop")
    await jobs.drain()
    assert seen == ["shop", "mail", "urgent", "added to the other app"]


async def test_a_queue_that_only_a_handler_opens_is_drained_too(jobs: Jobs) -> None:
    seen: list[str] = []
    app, quiet = App("shop"), App("quiet")
    recording(quiet, seen)

    @app.task
    async def tell() -> None:
        async with Queue("quiet") as queue:  # no app has opened it
            await queue.add("note", {"what": "told"})

    await tell.enqueue()
    await jobs.drain()
    assert seen == ["told"]


async def test_retries_run_without_waiting_and_end_well(jobs: Jobs) -> None:
    app, attempts = App("shop"), []

    @app.task(attempts=5, backoff=timedelta(seconds=25))
    async def third_time_lucky() -> None:
        attempts.append(current_job().attempt + 1)
        if len(attempts) < 3:
            raise OSError("not yet")

    await third_time_lucky.enqueue()
    drained = await jobs.drain(raises=False)
    assert attempts == [1, 2, 3]
    assert (drained.completed, drained.failed, drained.retried) == (1, 2, 2)
    assert [run.attempt for run in drained.jobs] == [1, 2, 3]
    assert [type(run.error) for run in drained.jobs] == [OSError, OSError, type(None)]
    assert timedelta(seconds=49) < drained.moved < timedelta(seconds=52)


async def test_without_raises_dead_jobs_are_told(jobs: Jobs) -> None:
    app = App("shop")

    @app.task(attempts=2)
    async def charge(cents: int) -> None:
        raise LookupError(f"no card for {cents}")

    job = await charge.enqueue(250)
    drained = await jobs.drain(raises=False)
    assert (drained.completed, drained.failed, drained.retried) == (0, 2, 1)
    (dead,) = drained.dead
    assert (dead.name, dead.queue, dead.id, dead.args) == ("charge", "shop", job.id, {"cents": 250})
    assert dead.error == "LookupError: no card for 250"
    assert (await jobs.drain(raises=False)).dead == [], "those of an earlier drain do not count"


async def test_the_first_error_is_raised_itself(jobs: Jobs) -> None:
    app = App("shop")

    @app.task(attempts=5)
    async def charge(cents: int) -> None:
        raise LookupError("no card")

    job = await charge.enqueue(250)
    with pytest.raises(LookupError, match="no card") as caught:
        await jobs.drain()
    assert caught.value.__notes__ == [
        f"raised in attempt 1 of 5 of job {job.id}, task 'charge' of queue 'shop'"
    ]
    assert "charge" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_the_error_of_a_plain_function_is_raised_too(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    def charge() -> None:
        raise LookupError("no card")

    charge.enqueue_sync()
    with pytest.raises(LookupError) as caught:
        jobs.drain_sync()
    assert "charge" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


async def test_a_task_over_its_time_raises(jobs: Jobs) -> None:
    app = App("shop")

    @app.task(timeout=timedelta(milliseconds=20))
    async def hang() -> None:
        await asyncio.Event().wait()

    await hang.enqueue()
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s") as caught:
        await jobs.drain()
    assert "task 'hang'" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_what_would_end_the_test_itself_is_told_as_an_error(
    jobs: Jobs, error: BaseException
) -> None:
    app = App("shop")

    @app.task
    async def leave() -> None:
        raise error

    await leave.enqueue()
    with pytest.raises(DrainError, match=f"a handler raised {type(error).__name__}") as caught:
        await jobs.drain()
    assert caught.value.__cause__ is error
    assert "task 'leave'" in caught.value.__notes__[0]


async def test_a_handler_that_ends_the_worker_ends_the_drain(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    async def leave() -> None:
        raise SystemExit(3)

    await leave.enqueue()
    with pytest.raises(
        DrainError, match=r"the worker shop ended before the drain: SystemExit\(3\)"
    ):
        await jobs.drain(raises=False)


async def test_data_that_no_task_can_take_raises(jobs: Jobs) -> None:
    app = App("shop")
    note = recording(app, [])
    async with Queue("shop") as queue:
        await queue.add(note.name, {"what": 5})
    with pytest.raises(Exception, match="what"):
        await jobs.drain()


async def test_asking_for_another_run_is_no_failure(jobs: Jobs) -> None:
    app, attempts = App("shop"), []

    @app.task(attempts=3)
    async def poll() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise Retry(delay_ms=3_600_000)

    await poll.enqueue()
    drained = await jobs.drain()
    assert (drained.completed, drained.failed, drained.retried) == (1, 0, 2)
    assert timedelta(hours=1) < drained.moved <= timedelta(hours=2)


async def test_an_unrecoverable_error_is_dead_at_once(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    async def give_up() -> None:
        raise UnrecoverableError("no use")

    await give_up.enqueue()
    drained = await jobs.drain(raises=False)
    assert (drained.failed, drained.retried, len(drained.dead)) == (1, 0, 1)


async def test_until_bounds_how_far_the_clock_moves(jobs: Jobs) -> None:
    app, seen = App("shop"), []
    note = recording(app, seen)
    for day in (1, 2, 3, 4):
        await note.with_options(delay=timedelta(days=day)).enqueue(f"day {day}")
    drained = await jobs.drain(until=timedelta(days=2, hours=1))
    assert seen == ["day 1", "day 2"]
    assert drained.moved == timedelta(days=2, hours=1)
    jobs.assert_enqueued(note, what="day 3", delay=timedelta(days=3))
    await jobs.drain(until=timedelta(days=1))
    assert seen == ["day 1", "day 2", "day 3"], "the clock of the test goes on where it was"


async def test_delays_are_told_by_when_the_job_was_added(jobs: Jobs) -> None:
    app = App("shop")
    note = recording(app, [])

    @app.task
    async def begin() -> None:
        await note.with_options(delay=timedelta(days=3)).enqueue("later")

    for hour in range(1, 6):
        await begin.with_options(delay=timedelta(hours=hour)).enqueue()
    await jobs.drain(until=timedelta(days=1))
    assert len(jobs.all_enqueued(note)) == 5
    for job in jobs.all_enqueued(note):
        assert abs(job.delay - timedelta(days=3)) < timedelta(seconds=1)


async def test_a_paused_queue_is_an_error(jobs: Jobs) -> None:
    app = App("shop")
    note = recording(app, [])
    await note.enqueue("a")
    async with Queue("shop") as queue:
        await queue.pause()
    with pytest.raises(DrainError, match="queue 'shop' is paused, and 1 job in it"):
        await jobs.drain()


async def test_a_job_that_no_task_takes_is_an_error(jobs: Jobs) -> None:
    app = App("shop")
    recording(app, [])
    async with Queue("shop") as queue:
        job = await queue.add("notes", {})
    with pytest.raises(DrainError, match=f"no task takes job {job.id}.*'notes'.*'note'"):
        await jobs.drain()
    async with Queue("shop") as queue:
        await queue.add("notes", {})
    (dead,) = (await jobs.drain(raises=False)).dead
    assert (dead.name, dead.error) == ("notes", "no handler")


async def test_a_queue_that_no_app_has_is_an_error(jobs: Jobs) -> None:
    async with Queue("nobody") as queue:
        await queue.add("welcome", {}, delay=timedelta(hours=1))
    with pytest.raises(DrainError, match=r"queue 'nobody' holds jobs \('welcome'\), and no app"):
        await jobs.drain()


async def test_a_result_that_cannot_be_stored_is_an_error(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    async def odd():  # type: ignore[no-untyped-def]
        return object()

    await odd.enqueue()
    with pytest.raises(DrainError, match=r"is dead.*result"):
        await jobs.drain()
    await odd.enqueue()
    drained = await jobs.drain(raises=False)
    assert (drained.completed, len(drained.dead)) == (0, 1)


class Places:
    """Counts how often a lifespan was entered and left."""

    def __init__(self, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self._error = error

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[str]:
        self.log.append("in")
        if self._error is not None:
            raise self._error
        yield "real"
        self.log.append("out")


async def test_the_lifespan_is_entered_once_and_left(jobs: Jobs) -> None:
    places = Places()
    app = App("shop", lifespan=places.lifespan)

    @app.task
    async def where() -> str:
        places.log.append(app.context)
        return app.context

    await where.enqueue()
    await where.with_options(delay=timedelta(hours=1)).enqueue()
    await jobs.drain()
    assert places.log == ["in", "real", "real", "out"]


async def test_inside_override_no_lifespan_is_entered(jobs: Jobs) -> None:
    places = Places()
    app = App("shop", lifespan=places.lifespan)

    @app.task
    async def where() -> str:
        return app.context

    job = await where.enqueue()
    with app.override("fake"):
        await jobs.drain()
    assert await job.result() == "fake"
    assert await jobs.run(where) == "real"
    assert places.log == ["in", "out"]


async def test_the_error_of_a_lifespan_is_raised(jobs: Jobs) -> None:
    app = App("shop", lifespan=Places(PermissionError("no database")).lifespan)
    await recording(app, []).enqueue("a")
    with pytest.raises(PermissionError, match="no database"):
        await jobs.drain()


async def test_hooks_of_the_app_run_inside_of_the_drains(jobs: Jobs) -> None:
    names: list[str] = []

    async def hook(job: Job, run: Callable[[], Awaitable[Any]]) -> Any:
        names.append(job.name)
        return await run()

    app = App("shop", around=[hook])
    await recording(app, []).enqueue("a")
    await jobs.drain()
    assert names == ["note"]


async def test_two_apps_on_one_queue_need_a_name(jobs: Jobs) -> None:
    seen: list[str] = []
    first, second = App("shared"), App("shared")
    note, other = recording(first, seen), recording(second, seen)
    await note.enqueue("a")
    await jobs.drain()  # only one of them was used
    await other.enqueue("b")
    with pytest.raises(Exception, match=r"queue 'shared' has tasks of 2 apps.*drain\(app=app\)"):
        await jobs.drain()
    await jobs.drain(app=second)
    assert seen == ["a", "b"]


async def test_a_repeatable_task_does_not_fire_by_itself(jobs: Jobs) -> None:
    app, seen = App("shop"), []
    note = recording(app, seen)

    @app.task(every=timedelta(seconds=1))
    async def tick() -> None:
        seen.append("tick")

    await note.with_options(delay=timedelta(days=1)).enqueue("a day")
    await jobs.drain()
    assert seen == ["a day"]


async def test_drain_sync_refuses_to_block_an_event_loop(jobs: Jobs) -> None:
    with pytest.raises(RuntimeError, match=r"use `await jobs\.drain`"):
        jobs.drain_sync()


async def test_wrong_arguments(jobs: Jobs) -> None:
    with pytest.raises(TypeError, match="until must be a timedelta, got int"):
        await jobs.drain(until=5)  # type: ignore[arg-type]
