"""What was enqueued: asserts, their texts, and the jobs themselves."""

import enum
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from unittest.mock import ANY

import pytest

from chasqui import App, Queue, sync
from chasqui.testing import Jobs


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Address:
    city: str
    since: date


app = App("shop", redis_url="redis://127.0.0.1:1")


@app.task
async def ship(
    to: Address, size: Size = Size.SMALL, tags: tuple[str, ...] = (), delay: int = 0
) -> None: ...


@app.task(name="mail", aliases=["old-mail"], queue="mails")
async def welcome(to: str, again: bool = False) -> None: ...


HOME = Address("Cusco", date(2026, 1, 2))


async def test_typed_arguments_and_defaults_are_compared(jobs: Jobs) -> None:
    await ship.enqueue(HOME, tags=("a", "b"))
    jobs.assert_enqueued(ship)
    jobs.assert_enqueued(ship, to=HOME)
    jobs.assert_enqueued(ship, to=ANY, size=Size.SMALL)
    jobs.assert_enqueued(ship, tags=("a", "b"))
    jobs.refute_enqueued(ship, to=Address("Lima", date(2026, 1, 2)))
    jobs.refute_enqueued(ship, size=Size.LARGE)
    jobs.refute_enqueued(ship, tags=("a",))
    jobs.refute_enqueued(welcome)


async def test_delay_at_queue_and_id(jobs: Jobs) -> None:
    noon = datetime.now(UTC) + timedelta(days=2)
    await welcome.with_options(delay=timedelta(hours=1), job_id="one").enqueue("a@b")
    await welcome.with_options(at=noon, queue="bulk").enqueue("c@d")
    assert jobs.assert_enqueued(welcome, to="a@b", delay=timedelta(hours=1)).id == "one"
    jobs.assert_enqueued(welcome, job_id="one", queue="mails")
    jobs.assert_enqueued(welcome, at=noon, queue="bulk")
    jobs.refute_enqueued(welcome, to="a@b", delay=timedelta(hours=1, seconds=2))
    jobs.refute_enqueued(welcome, to="a@b", delay=timedelta())
    jobs.refute_enqueued(welcome, at=noon + timedelta(seconds=2))
    jobs.refute_enqueued(welcome, job_id="two")
    jobs.refute_enqueued(welcome, to="a@b", queue="bulk")


async def test_a_parameter_of_that_name_wins(jobs: Jobs) -> None:
    await ship.enqueue(HOME, delay=3)
    jobs.assert_enqueued(ship, delay=3)
    jobs.refute_enqueued(ship, delay=4)


async def test_a_failed_assert_shows_what_there_was(jobs: Jobs) -> None:
    with pytest.raises(AssertionError) as caught:
        jobs.assert_enqueued(welcome, to="x@y")
    assert str(caught.value) == (
        "no job of task 'mail' with to='x@y' was enqueued. Nothing was enqueued."
    )
    await ship.with_options(job_id="s").enqueue(HOME)
    await welcome.with_options(delay=timedelta(hours=1), job_id="w").enqueue("a@b")
    with pytest.raises(AssertionError) as caught:
        jobs.assert_enqueued(welcome, to="x@y", delay=timedelta(hours=1))
    assert str(caught.value).splitlines() == [
        "no job of task 'mail' with to='x@y', delay=1:00:00 was enqueued. There were 2 jobs:",
        f"  task  queue  {'arguments':57}  delay    id",
        "  ship  shop   to=Address(city='Cusco', since=datetime.date(2026, 1, 2))           s",
        "  mail  mails  " + "to='a@b'".ljust(57) + "  1:00:00  w",
    ]
    with pytest.raises(
        AssertionError, match=r"a job of task 'mail' was enqueued\. There was 1 job"
    ):
        jobs.refute_enqueued(welcome)


async def test_what_no_task_has_is_refused(jobs: Jobs) -> None:
    for call in (jobs.assert_enqueued, jobs.refute_enqueued):
        with pytest.raises(TypeError, match="task 'mail' has no parameter 'too': is it 'to'"):
            call(welcome, too="a@b")
        with pytest.raises(TypeError, match="a task is asked for, got str"):
            call("mail")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="delay must be a timedelta, got int"):
            call(welcome, delay=3600)


async def test_all_enqueued_gives_waiting_jobs_then_delayed_ones(jobs: Jobs) -> None:
    await welcome.with_options(delay=timedelta(hours=2)).enqueue("later")
    await welcome.with_options(delay=timedelta(hours=1)).enqueue("soon")
    job = await welcome.enqueue("now")
    await ship.enqueue(HOME)
    found = jobs.all_enqueued(welcome)
    assert [one.args for one in found] == [{"to": "now"}, {"to": "soon"}, {"to": "later"}]
    assert (found[0].name, found[0].queue, found[0].id) == ("mail", "mails", job.id)
    assert found[0].task is not None
    assert found[0].task.function is welcome.function
    assert [round(one.delay / timedelta(hours=1)) for one in found] == [0, 1, 2]
    assert len(jobs.all_enqueued()) == 4


async def test_jobs_of_others_and_of_older_names_are_seen(jobs: Jobs) -> None:
    async with Queue("mails") as queue:
        await queue.add("old-mail", {"to": "a@b"})
    with sync.Queue("elsewhere") as other:
        other.add("unknown", [1, 2])
    jobs.assert_enqueued(welcome, to="a@b")
    (unknown,) = [job for job in jobs.all_enqueued() if job.queue == "elsewhere"]
    assert (unknown.task, unknown.args) == (None, [1, 2])


def test_they_work_without_an_event_loop(jobs: Jobs) -> None:
    welcome.enqueue_sync("a@b")
    jobs.assert_enqueued(welcome, to="a@b")
    assert jobs.drain_sync().completed == 1
    jobs.refute_enqueued(welcome)


def test_each_test_begins_with_an_empty_server(jobs: Jobs) -> None:
    assert jobs.all_enqueued() == []
