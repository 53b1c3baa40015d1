"""What a task returns comes back as what it was, for callers with and without an event loop."""

import asyncio
import functools
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import pytest

from chasqui import App, JobFailedError
from tests.tasks.conftest import dead, serving, settled


class Colour(Enum):
    RED = 1


class Total(TypedDict):
    total: Decimal


class Point(NamedTuple):
    x: int
    day: date


@dataclass
class Line:
    item: str
    price: Decimal


VALUES: list[tuple[Any, Any]] = [
    (int, 5),
    (str, "x"),
    (bytes, b"\xff"),
    (list[int], [1, 2]),
    (dict[str, int | None], {"a": None}),
    (float, 1.5),
    (Any, {"a": [1]}),
    (None, None),
    (int | None, None),
    (date | None, None),
    (date | None, date(2026, 1, 2)),
    (datetime, datetime(2026, 1, 2, 3, tzinfo=UTC)),
    (timedelta, timedelta(seconds=1.5)),
    (Decimal, Decimal("1.50")),
    (UUID, UUID(int=7)),
    (Colour, Colour.RED),
    (tuple[int, date], (1, date(2026, 1, 2))),
    (set[str], {"b", "a"}),
    (Total, {"total": Decimal("1.5")}),
    (Point, Point(1, date(2026, 1, 2))),
    (Line, Line("a", Decimal("2.50"))),
    (list[Line], [Line("a", Decimal("2.50"))]),
]


async def test_results_of_every_kind(app: App[None]) -> None:
    tasks = []
    for number, (annotation, value) in enumerate(VALUES):

        async def on_loop(value: Any = value) -> Any:
            return value

        def in_thread(value: Any = value) -> Any:
            return value

        for kind, function in (("loop", on_loop), ("thread", in_thread)):
            function.__annotations__["return"] = annotation
            tasks.append((app.task(name=f"{kind}-{number}")(function), value))
    async with serving(app):
        jobs = [await task.enqueue() for task, _ in tasks]
        many = await app.enqueue_many([task.bind() for task, _ in tasks])
        blocking = [await asyncio.to_thread(task.enqueue_sync) for task, _ in tasks]
        alike = await app.enqueue_many([task.bind() for _ in range(2) for task, _ in tasks[-1:]])
        for i, (task, value) in enumerate(tasks):
            for found in (
                await jobs[i].result(),
                await many[i].result(),
                await asyncio.to_thread(blocking[i].result),
            ):
                assert found == value, task
                assert type(found) is type(value)
        if value is not None:
            assert await jobs[-1].wait_for_result() == value
            assert await asyncio.to_thread(blocking[-1].wait_for_result) == value
        assert [await job.result() for job in alike] == [VALUES[-1][1]] * 2


async def test_a_wrong_result_is_not_run_again(app: App[None]) -> None:
    runs: list[str] = []

    @app.task(backoff=1)
    async def on_loop() -> list[Decimal]:
        runs.append("on_loop")
        return [Decimal(1), 2]  # type: ignore[list-item]

    @app.task(backoff=1)
    def in_thread() -> date:
        runs.append("in_thread")
        return None  # type: ignore[return-value]

    @app.task(backoff=1)
    async def unstorable() -> Any:
        runs.append("unstorable")
        return object()

    told = {
        "on_loop": "result[1] must be a Decimal, got int",
        "in_thread": "result must be a date, got None",
        "unstorable": "object",
    }
    async with serving(app):
        jobs = [await task.enqueue() for task in (on_loop, in_thread, unstorable)]
        found = await dead(app, 3)
        await settled(app)
        with pytest.raises(
            JobFailedError, match=r"ResultError: result\[1\] must be a Decimal, got int"
        ):
            await jobs[0].result()
    assert sorted(runs) == sorted(told)
    for one in found:
        assert one.detail == "the handler ran to its end; its result could not be stored"
        assert told[one.name] in (one.error or "")


async def test_a_conversion_error_of_the_function_itself_is_retried(app: App[None]) -> None:
    """It fails like any other error: the work is not done."""
    runs: list[int] = []

    @app.task
    async def inner(day: date) -> None: ...

    @app.task(backoff=1, attempts=3)
    async def outer() -> Decimal:
        runs.append(1)
        inner.bind(5 if len(runs) < 3 else date(2026, 1, 2))  # type: ignore[arg-type]
        return Decimal(1)

    async with serving(app):
        assert await (await outer.enqueue()).result() == 1
    assert len(runs) == 3


async def test_a_plain_function_may_return_a_coroutine(app: App[None]) -> None:
    def traced(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    @app.task
    @traced
    async def price(n: int) -> Decimal:
        await asyncio.sleep(0)
        return Decimal(n)

    async with serving(app):
        assert await (await price.enqueue(5)).result() == Decimal(5)
