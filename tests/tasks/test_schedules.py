"""Schedules of tasks: written when a worker starts, and only if they have changed."""

import asyncio
import logging
from typing import Any

import pytest

from chasqui import App, RepeatPattern, current_job
from tests.servers import Server
from tests.tasks.conftest import WAIT_S, MakeApp, serving


async def specs(app: App[Any]) -> dict[str, RepeatPattern]:
    return {one.key: one.pattern for one in await app.queue().get_repeatable_jobs()}


async def started(app: App[Any]) -> None:
    """Start its workers and end them, without letting a job run: schedules are written."""
    async with asyncio.timeout(WAIT_S):
        await app.worker_group(burst=True).run()


async def test_a_schedule_fires_with_defaults(make_app: MakeApp) -> None:
    app = make_app()
    fired = asyncio.Event()
    seen: list[Any] = []

    @app.task(every=0.05)
    async def tick(n: int = 7) -> None:
        seen.append((n, current_job().name, current_job().data))
        fired.set()

    async with app:
        async with serving(app, scheduler_tick_ms=20), asyncio.timeout(WAIT_S):
            await fired.wait()
        assert await specs(app) == {"task:tick": RepeatPattern.every(50)}
    assert seen[0] == (7, "tick", {})


@pytest.mark.slow
async def test_restarts_do_not_keep_a_schedule_from_firing(make_app: MakeApp) -> None:
    """A worker that lives for 0.3 s each time, and a schedule of one second."""
    app = make_app()
    fired = asyncio.Event()

    @app.task(every=1)
    async def tick() -> None:
        fired.set()

    async with app, asyncio.timeout(WAIT_S):
        while not fired.is_set():
            async with serving(app, scheduler_tick_ms=50):
                try:
                    await asyncio.wait_for(fired.wait(), 0.3)
                except TimeoutError:
                    continue


async def test_the_version_that_started_last_wins(make_app: MakeApp) -> None:
    old, new = make_app(), make_app()

    @old.task(name="nightly", cron="0 2 * * *", tz="Europe/Berlin")
    def before() -> None: ...

    @new.task(name="nightly", every=3600)
    def after() -> None: ...

    cron = RepeatPattern.cron("0 2 * * *", tz="Europe/Berlin")
    async with old, new:
        await started(old)
        assert await specs(new) == {"task:nightly": cron}
        await started(new)
        assert await specs(new) == {"task:nightly": RepeatPattern.every(3_600_000)}
        await started(old)
        assert await specs(new) == {"task:nightly": cron}


async def test_a_schedule_that_left_the_code_is_reported_and_stays(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_app(), make_app()

    @old.task(every=3600)
    def gone() -> None: ...

    @new.task(every=3600)
    def kept() -> None: ...

    async with old, new:
        await started(old)
        await new.queue().upsert_repeatable_job("own", 1, repeat=RepeatPattern.every(9_000_000))
        with caplog.at_level(logging.WARNING, "chasqui.tasks"):
            await started(new)
        assert {"task:gone", "task:kept"} < set(await specs(new))
    told = [one.getMessage() for one in caplog.records if one.name == "chasqui.tasks.serving"]
    assert len(told) == 1
    assert f"chasqui repeatable remove {new.default_queue} task:gone" in told[0]


async def test_a_schedule_that_is_the_same_keeps_its_next_fire(
    make_app: MakeApp, server: Server
) -> None:
    app = make_app(redis_url=server.url)

    @app.task(every=3600)
    def tick() -> None: ...

    async with app:
        await started(app)
        (before,) = await app.queue().get_repeatable_jobs()
        await started(app)
        (after,) = await app.queue().get_repeatable_jobs()
    assert after == before
