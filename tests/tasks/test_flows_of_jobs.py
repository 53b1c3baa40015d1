"""Flows that jobs begin: one for each job, however often it runs, and whatever its id."""

import asyncio
import gc

from chasqui import App, Call, Job, gather
from tests.tasks.conftest import serving, settled


async def test_another_job_of_the_same_id_begins_a_flow_of_its_own(app: App[None]) -> None:
    sums: list[int] = []

    @app.task
    async def part(n: int) -> int:
        return n

    @app.task
    async def total(parts: list[int]) -> None:
        sums.append(sum(parts))

    @app.task(unique_for=1)
    async def nightly() -> None:
        await gather(part.bind(1), part.bind(2)).then(total).enqueue()

    async with serving(app):
        await nightly.enqueue()
        while not (await nightly.enqueue()).is_new:  # noqa: ASYNC110 - the id is free after a second
            await asyncio.sleep(0.05)
        await settled(app)
    assert sums == [3, 3]


async def test_a_retry_goes_on_with_the_flow_that_it_began(app: App[None]) -> None:
    sums: list[int] = []
    runs: list[int] = []

    @app.task
    async def part(n: int) -> int:
        return n

    @app.task
    async def total(parts: list[int]) -> None:
        sums.append(sum(parts))

    @app.task(attempts=3, backoff={"kind": "fixed", "delay_ms": 1}, unique_for=60)
    async def nightly() -> None:
        for n in (1, 10):
            await gather(part.bind(n), part.bind(n)).then(total).enqueue()
        runs.append(1)
        if len(runs) < 3:
            raise ConnectionError("again")

    async with serving(app):
        await nightly.enqueue()
        await settled(app)
    assert len(runs) == 3
    assert sorted(sums) == [2, 20]


async def test_flows_begin_flows_as_deep_as_they_like(app: App[None]) -> None:
    depths: list[int] = []

    @app.task
    async def page(depth: int) -> int:
        return depth

    @app.task(attempts=1)
    async def follow(depth: int) -> None:
        depths.append(depth)
        if depth < 40:
            await page.bind(depth + 1).then(follow).enqueue()

    async with serving(app):
        await follow.enqueue(0)
        await settled(app)
    assert depths == list(range(41))


async def test_jobs_that_began_flows_are_let_go(app: App[None]) -> None:
    @app.task
    async def part(n: int) -> int:
        return n

    @app.task
    async def total(n: int) -> None: ...

    @app.task
    async def begin(n: int) -> None:
        await part.bind(n).then(total).enqueue()

    async with serving(app):
        await app.enqueue_many(begin.bind(n) for n in range(300))
        await settled(app)
        gc.collect()
        begun = [one for one in gc.get_objects() if type(one) is Job and one.name == "begin"]
    assert len(begun) < 250  # as many as slots, and some more


async def test_a_join_of_nothing_runs_at_once_with_an_empty_list(app: App[None]) -> None:
    @app.task
    async def size(text: str) -> int:
        return len(text)

    @app.task
    async def total(sizes: list[int], plus: int = 0) -> int:
        return sum(sizes) + plus

    @app.task
    async def whole(sizes: list[int], /) -> int:
        return len(sizes)

    nothing: list[Call[int]] = []
    async with serving(app):
        assert await (await gather(*nothing).then(total, plus=5).enqueue()).result() == 5
        assert await (await gather(*nothing).then(whole).enqueue()).result() == 0
        assert await gather(*nothing).enqueue() == []
