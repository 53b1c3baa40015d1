"""Calls with the same arguments are one job, for as long as the task says."""

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

import pytest

from chasqui import App, Job

DAY = date(2026, 1, 2)


async def are_new(app: App[Any], calls: Sequence[Any]) -> list[bool]:
    """Whether each call added something, one after the other."""
    return [(await call.enqueue()).is_new for call in calls]


async def test_a_second_call_with_the_same_arguments_adds_nothing(app: App[None]) -> None:
    @app.task(unique_for=timedelta(minutes=1))
    def ship(to: str, day: date = DAY, *, n: int | None = 5) -> None: ...

    calls = [ship.bind("a"), ship.bind(to="a"), ship.bind("b"), ship.bind("a", date(2026, 1, 3))]
    assert await are_new(app, calls) == [True, False, True, True]
    first = await ship.enqueue("a")
    assert not first.is_new
    assert not ship.enqueue_sync("a").is_new
    assert (await app.queue().counts()).waiting == 3


async def test_a_default_counts_as_the_value_that_it_is(app: App[None]) -> None:
    @app.task(unique_for=60)
    def ship(to: str, day: date = DAY, *, n: int | None = 5) -> None: ...

    calls = [
        ship.bind("a"),
        ship.bind("a", DAY),
        ship.bind("a", n=5),
        ship.bind("a", n=None),  # another call, which must not be lost
        ship.bind("a", DAY, n=None),
    ]
    assert await are_new(app, calls) == [True, False, False, True, False]


async def test_a_default_that_no_payload_holds_is_like_no_value(app: App[None]) -> None:
    @app.task(unique_for=60)
    def ship(to: str = None, what: Any = object) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    assert await are_new(app, [ship.bind(), ship.bind(), ship.bind("a"), ship.bind(what=None)]) == [
        *(True, False, True, True)
    ]


@pytest.mark.parametrize("by", ["to", ["to"], ("to",)])
async def test_only_the_named_arguments_count(app: App[None], by: Any) -> None:
    @app.task(unique_for=60, unique_by=by)
    def ship(to: str, n: int = 1) -> None: ...

    calls = [ship.bind("a", 1), ship.bind("a", 2), ship.bind("b", 1)]
    assert await are_new(app, calls) == [True, False, True]


async def test_a_function_makes_the_id_of_all_arguments(app: App[None]) -> None:
    seen: list[tuple[date, str]] = []

    def by(day: date, to: str) -> str:
        seen.append((day, to))
        return f"{day:%Y}-{to}"

    @app.task(unique_for=60, unique_by=by)
    def ship(to: str, day: date = DAY) -> None: ...

    job = await ship.enqueue("a")
    assert job.id == "ship:2026-a"
    assert seen == [(DAY, "a")], "by name, converted, with defaults"
    assert not (await ship.enqueue("a", date(2026, 12, 31))).is_new
    assert (await ship.enqueue("a", date(2027, 1, 1))).is_new


async def test_what_the_function_returns_is_checked(app: App[None]) -> None:
    def number(to: str) -> str:
        return 5  # type: ignore[return-value]

    @app.task(unique_for=60, unique_by=number)
    def ship(to: str) -> None: ...

    with pytest.raises(TypeError, match="unique_by of task 'ship' must return a str, got int"):
        await ship.enqueue("a")

    @app.task(unique_for=60, unique_by=lambda to: "a" * 5000)
    def long(to: str) -> None: ...

    with pytest.raises(ValueError, match="job_id"):
        await long.enqueue("a")
    assert (await app.queue().counts()).waiting == 0


async def test_the_whole_data_may_be_unique(app: App[None]) -> None:
    @app.task(unique_for=60)
    def whole(data: Any, /) -> None: ...

    @app.task(unique_for=60, unique_by=str)
    def by_text(data: int, /) -> None: ...

    calls = [whole.bind([1]), whole.bind([1]), whole.bind(1), whole.bind(None)]
    assert await are_new(app, calls) == [True, False, True, True]
    assert (await by_text.enqueue(7)).id == "by_text:7"


async def test_the_order_of_keys_does_not_count(app: App[None]) -> None:
    @app.task(unique_for=60)
    def ship(what: Any) -> None: ...

    calls = [
        ship.bind([{"a": 1, b"a": {"x": 1, "y": 2}}]),
        ship.bind([{b"a": {"y": 2, "x": 1}, "a": 1}]),
        ship.bind([{b"a": {"y": 1, "x": 2}, "a": 1}]),
    ]
    assert await are_new(app, calls) == [True, False, True]
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(ValueError, match="deep"):
        await ship.enqueue(nested)


async def test_in_bulk_and_with_a_delay(app: App[None]) -> None:
    @app.task(unique_for=60)
    def ship(to: str) -> None: ...

    @app.task(unique_for=90)
    def other(to: str) -> None: ...

    @app.task
    def plain(to: str) -> None: ...

    late = ship.with_options(delay=3600)
    calls = [
        ship.bind("a"),
        plain.bind("a"),
        ship.bind("a"),
        other.bind("a"),
        late.bind("b"),
        late.bind("b"),
        ship.bind("b"),
    ]
    jobs = await app.enqueue_many(calls)
    assert [job.is_new for job in jobs] == [True, True, False, True, True, False, False]
    assert [job.name for job in jobs] == [call.task.name for call in calls]
    counts = await app.queue().counts()
    assert (counts.waiting, counts.delayed) == (3, 1)


async def test_with_options_changes_the_time_or_the_id(app: App[None]) -> None:
    @app.task(unique_for=60)
    def ship(to: str) -> None: ...

    @app.task
    def plain(to: str) -> None: ...

    job: Job[None] = await ship.with_options(unique_for=3600).enqueue("a")
    assert job.id.startswith("ship:")
    assert not (await ship.enqueue("a")).is_new
    own = ship.with_options(job_id="own")
    assert (await own.enqueue("a")).id == "own"
    with pytest.raises(ValueError, match="unique_for is for a job_id"):
        plain.with_options(unique_for=60)
    assert (await plain.with_options(unique_for=60, job_id="x").enqueue("a")).is_new
