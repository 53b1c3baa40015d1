"""Options of single jobs: they travel with each, and win over what the task says."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis as redis_py

from chasqui import App, BackoffSpec, JobFailedError
from chasqui.model.keys import Keys
from tests.servers import Server
from tests.tasks.conftest import MakeApp, serving

HOUR = timedelta(hours=1)


@pytest.fixture
def app(make_app: MakeApp) -> App[Any]:
    app = make_app()

    @app.task(name="ship", attempts=2)
    async def ship(n: int) -> int:
        return n

    return app


@pytest.fixture
def due(valkey_9: Server, queue_name: str) -> Iterator[Any]:
    """When the delayed jobs are due, in seconds from now by the server's clock."""
    with redis_py.Redis.from_url(valkey_9.url) as client:

        def look() -> list[float]:
            now_s = client.time()[0]
            found = client.zrange(Keys(queue_name).delayed, 0, -1, withscores=True)
            return [score / 1000 - now_s for _, score in found]

        yield look


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"delay": 7200}, 7200),
        ({"delay": 7200.5}, 7200.5),
        ({"delay": 2 * HOUR}, 7200),
        ({"at": datetime.now(UTC) + 2 * HOUR}, 7200),
    ],
)
async def test_a_job_may_come_later(
    app: App[Any], due: Any, options: dict[str, Any], seconds: float
) -> None:
    async with app:
        task = app.tasks[0].with_options(**options)
        await task.enqueue(1)
        await app.enqueue_many([task.bind(2), task.bind(3)])
        task.enqueue_sync(4)
        found = due()
    assert len(found) == 4
    for one in found:
        assert one == pytest.approx(seconds, abs=300)  # the test may have been collected long ago


async def test_a_moment_that_is_past_is_now(app: App[Any]) -> None:
    async with app:
        await app.tasks[0].with_options(at=datetime.now(UTC) - HOUR).enqueue(1)
        await app.tasks[0].with_options(delay=0).enqueue(1)
        counts = await app.queue().counts()
    assert (counts.waiting, counts.delayed) == (2, 0)


async def test_options_add_up_and_the_task_stays_as_it_is(app: App[Any], queue_name: str) -> None:
    (ship,) = app.tasks
    late = ship.with_options(delay=HOUR, attempts=3)
    own = late.with_options(job_id="own", backoff=timedelta(seconds=5), queue=f"{queue_name}-b")
    assert own.call_options.delay == HOUR
    assert own.call_options.attempts == 3
    assert own.call_options.backoff == BackoffSpec.fixed(5000)
    assert late.call_options.job_id is None
    assert own.with_options(attempts=9).call_options.attempts == 9
    assert own.call_options.attempts == 3
    assert (ship.queue, late.queue, own.queue) == (queue_name, queue_name, f"{queue_name}-b")
    assert ship.is_plain
    assert type(own) is type(ship)
    assert app.tasks == [ship]
    async with app:
        job = await own.enqueue(1)
        assert (job.id, job.is_new) == ("own", True)
        assert not (await own.enqueue(1)).is_new
        assert (await app.queue(f"{queue_name}-b").counts()).delayed == 1
        await ship.enqueue(1)
        assert (await app.queue().counts()).waiting == 1


async def test_a_result_is_read_from_the_queue_that_the_job_went_to(
    make_app: MakeApp, queue_name: str
) -> None:
    app = make_app()

    async def ship(n: int) -> timedelta:
        return timedelta(seconds=n)

    task = app.task(ship)
    app.task(queue=f"{queue_name}-b")(ship)
    async with app, serving(app):
        job = await task.with_options(queue=f"{queue_name}-b").enqueue(5)
        assert await job.result() == timedelta(seconds=5)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"delay": 5, "at": datetime.now(UTC)}, ValueError, "delay or at, not both"),
        ({"delay": -1}, ValueError, "delay must be from 0 s"),
        ({"delay": "5"}, TypeError, "delay must be a timedelta or a number of seconds, got str"),
        ({"delay": float("nan")}, ValueError, "delay must be from"),
        ({"at": datetime(2030, 1, 1)}, ValueError, "at must have a time zone"),
        ({"at": 5}, TypeError, "at must be a datetime, got int"),
        ({"job_id": 5}, ValueError, "job_id must be"),
        ({"attempts": 0}, ValueError, "attempts"),
        ({"attempts": "3"}, (TypeError, ValueError), "attempts"),
        ({"backoff": 1.5}, TypeError, "backoff"),
        ({"queue": "a b\n"}, ValueError, "queue"),
        ({"unique_for": 5}, ValueError, "unique_for is for a job_id"),
        ({"delais": 5}, TypeError, "delais"),
    ],
)
def test_wrong_options_are_named(
    app: App[Any], options: dict[str, Any], error: Any, told: str
) -> None:
    with pytest.raises(error, match=told):
        app.tasks[0].with_options(**options)


def test_delay_behind_at_is_refused_too(app: App[Any]) -> None:
    with pytest.raises(ValueError, match="delay or at, not both"):
        app.tasks[0].with_options(at=datetime.now(UTC)).with_options(delay=5)


async def test_a_delay_that_is_too_long_is_refused_before_anything_is_sent(app: App[Any]) -> None:
    async with app:
        for delay in (timedelta(days=40), timedelta(days=-1)):
            with pytest.raises(ValueError, match="delay"):
                await app.tasks[0].with_options(delay=delay).enqueue(1)
        assert (await app.queue().counts()).delayed == 0


async def test_a_worker_of_the_app_runs_what_is_sent_to_its_queue(
    make_app: MakeApp, queue_name: str
) -> None:
    urgent, bulk = f"{queue_name}-urgent", f"{queue_name}-bulk"
    app = make_app()

    @app.task(attempts=1)
    async def ship(n: int) -> int:
        return n

    @app.task(queue=urgent, name="alarm")
    async def alarm() -> str:
        return "urgent"

    @app.task(name="alarm")
    async def other_alarm() -> str:
        return "default"

    @app.task(queue=bulk)
    async def count() -> None: ...

    async with app, serving(app):
        for queue in (urgent, bulk):
            assert await (await ship.with_options(queue=queue).enqueue(5)).result() == 5
        # Each queue has its own task of a name, and another one has none of two.
        assert await (await other_alarm.with_options(queue=urgent).enqueue()).result() == "urgent"
        job = await alarm.with_options(queue=bulk).enqueue()
        with pytest.raises(JobFailedError, match="no handler"):
            await job.result()


async def test_a_long_backoff_of_a_single_job_is_not_cut(
    make_app: MakeApp, due: Callable[[], list[float]]
) -> None:
    app = make_app()

    @app.task
    async def fail() -> None:
        raise ValueError("no")

    async with serving(app, delayed_enabled=False):
        await fail.with_options(backoff=timedelta(minutes=5), attempts=2).enqueue()
        async with asyncio.timeout(40):
            while not due():  # noqa: ASYNC110 - nothing tells that it waits
                await asyncio.sleep(0.01)
    [wait_s] = due()
    assert 280 < wait_s < 302
    await app.close()
