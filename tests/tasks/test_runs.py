"""Workers call tasks with the arguments that they were given."""

import asyncio
import os
import re
import threading
from datetime import date, timedelta
from typing import Any

import pytest

from chasqui import App, BackoffSpec, Job, JobFailedError, Queue, UnknownArgumentsError, current_job
from tests.tasks import programs
from tests.tasks.conftest import WAIT_S, MakeApp, dead, serving

DAY = date(2026, 1, 2)


async def test_a_task_gets_its_arguments_and_the_caller_its_result(app: App[None]) -> None:
    @app.task
    async def on_loop(day: date, n: int = 3, *, loud: bool = False) -> list[Any]:
        return [day.isoformat(), n, loud, current_job().name]

    @app.task
    def in_thread(day: date, n: int = 3) -> list[Any]:
        return [day.isoformat(), n, threading.current_thread() is threading.main_thread()]

    @app.task
    async def native(n: int, text: str = "x") -> list[Any]:
        return [n, text]

    @app.task
    async def whole(data: Any, /) -> Any:
        return {"was": data}

    @app.task
    def whole_day(day: date, /) -> date:
        return day + timedelta(days=1)

    @app.task
    async def untyped(a, b=2):  # type: ignore[no-untyped-def]
        return [a, b]

    async with serving(app):
        assert await (await on_loop.enqueue(DAY, loud=True)).result() == [
            *("2026-01-02", 3, True, "on_loop")
        ]
        assert await (await in_thread.enqueue(DAY, n=4)).result() == ["2026-01-02", 4, False]
        assert await (await native.enqueue(1)).result() == [1, "x"]
        assert await (await whole.enqueue([1, None])).result() == {"was": [1, None]}
        assert await (await whole_day.enqueue(DAY)).result() == date(2026, 1, 3)
        assert await (await untyped.enqueue({"k": 1})).result() == [{"k": 1}, 2]
        # and from anybody else
        async with Queue(app.default_queue, redis_url=app.redis_url) as queue:
            job = await queue.add("on_loop", {"n": 5, "day": "2026-01-02"})
            assert await job.result() == ["2026-01-02", 5, False, "on_loop"]


# ── Data that do not fit ────────────────────────────────────────────────────────────────────────


async def test_bad_data_go_to_the_dlq_at_once_with_their_path(app: App[None]) -> None:
    runs: list[Any] = []

    @app.task
    async def on_loop(days: list[date]) -> None:
        runs.append(days)

    @app.task
    def in_thread(n: int) -> None:
        runs.append(n)

    @app.task
    async def whole(n: int, /) -> None:
        runs.append(n)

    cases = [
        ("on_loop", {"days": ["2026-01-02", 5]}, r"task 'on_loop': days[1] must be a date"),
        ("on_loop", {}, "task 'on_loop' lacks its argument days"),
        ("on_loop", [1], "task 'on_loop' takes a map of its arguments, and the data is a list"),
        ("on_loop", None, "and the data is a NoneType"),
        ("in_thread", {"n": "5"}, "task 'in_thread': n must be an int, got str"),
        ("in_thread", {"n": None}, "task 'in_thread': n must be an int, got None"),
        ("whole", "5", "task 'whole': n must be an int, got str"),
    ]
    async with serving(app):
        for name, data, _ in cases:
            await app.queue().add(name, data)
        found = await dead(app, len(cases))
    told = {(one.name, str(one.data)): one for one in found}
    for name, data, text in cases:
        one = told[name, str(data)]
        assert one.reason == "decode_failed"
        assert text in (one.detail or "")
        assert one.attempt == 0, "it never ran"
    assert not runs


async def test_whoever_waits_for_bad_data_is_told(app: App[None]) -> None:
    @app.task
    def ship(n: int) -> None: ...

    async with serving(app):
        job = await app.queue().add("ship", {"n": "5"})
        with pytest.raises(JobFailedError, match=r"decode_failed.*n must be an int, got str"):
            await job.result()


async def test_unknown_arguments_are_retried_until_a_newer_worker_comes(make_app: MakeApp) -> None:
    failed = asyncio.Event()
    seen: list[Any] = []

    async def hook(job: Job, run: Any) -> Any:
        try:
            return await run()
        except UnknownArgumentsError as error:
            seen.append(str(error))
            failed.set()
            raise

    old, new = make_app(around=[hook]), make_app()

    @old.task(name="paint")
    async def before(to: str) -> None:
        seen.append("before")

    @new.task(name="paint")
    async def after(to: str, colour: str = "") -> None:
        seen.append((to, colour))

    async with old, new:
        job = await new.queue().add("paint", {"to": "a", "colour": "red"})
        async with serving(old), asyncio.timeout(WAIT_S):
            await failed.wait()
        assert set(seen) == {"task 'paint' has no parameter 'colour'"}
        assert (await new.queue().counts()).dlq == 0
        async with serving(new):
            await job.result()
    assert seen[-1] == ("a", "red")


# ── Names and limits ────────────────────────────────────────────────────────────────────────────


async def test_old_names_run_with_the_settings_of_the_new_one(app: App[None]) -> None:
    seen: list[tuple[str, int | None]] = []

    @app.task(aliases=["greet", "hello"], attempts=7)
    async def welcome(to: str) -> None:
        job = current_job()
        seen.append((job.name, job.max_attempts))

    async with serving(app):
        for name in ("welcome", "greet", "hello"):
            await (await app.queue().add(name, {"to": "a"})).result()
        await app.queue().add("hallo", {"to": "a"})
        assert (await dead(app))[0].name == "hallo"
    assert seen == [("welcome", 7), ("greet", 7), ("hello", 7)]


async def test_limits_reach_jobs_that_wait_already_and_with_options_wins(app: App[None]) -> None:
    seen: list[tuple[int | None, int]] = []

    async def fails(n: int) -> None:
        job = current_job()
        seen.append((job.max_attempts, n))
        raise LookupError("as told")

    waiting = app.task(attempts=9, backoff=BackoffSpec.fixed(60_000))(fails)
    await waiting.enqueue(1)
    await waiting.with_options(attempts=2, backoff=5).enqueue(2)
    app.task(attempts=3, backoff=timedelta(milliseconds=5))(fails)
    async with serving(app):
        found = await dead(app, 2)
    assert sorted(seen) == [(2, 2), (2, 2), (3, 1), (3, 1), (3, 1)]
    for one in found:
        assert one.reason == "retries_exhausted"
        assert one.error == "LookupError: as told"
        assert 'in fails\n    raise LookupError("as told")' in (one.traceback or "")


async def test_a_timeout_is_that_of_the_task(app: App[None]) -> None:
    @app.task(timeout=timedelta(milliseconds=30), attempts=1)
    async def slow() -> None:
        await asyncio.Event().wait()

    @app.task(attempts=1)
    async def patient() -> int:
        await asyncio.sleep(0.1)
        return 5

    async with serving(app):
        job = await patient.enqueue()
        await slow.enqueue()
        (one,) = await dead(app)
        assert await job.result() == 5
    assert one.error == "TimeoutError: the handler took longer than 0.03 s"


async def test_options_of_the_group_hold_where_a_task_says_nothing(app: App[None]) -> None:
    seen: dict[str, int | None] = {}

    @app.task(attempts=4)
    async def own() -> None:
        seen["own"] = current_job().max_attempts

    @app.task
    async def others() -> None:
        seen["others"] = current_job().max_attempts

    async with serving(app, max_attempts=6):
        await (await own.enqueue()).result()
        await (await others.enqueue()).result()
    assert seen == {"own": 4, "others": 6}


async def test_hooks_stand_around_every_task(make_app: MakeApp) -> None:
    seen: list[str] = []

    async def hook(job: Job, run: Any) -> Any:
        seen.append(job.name)
        return await run()

    app = make_app(around=[hook])

    @app.task
    async def on_loop() -> int:
        return 1

    @app.task
    def in_thread() -> date:
        return DAY

    async with app, serving(app):
        assert await (await on_loop.enqueue()).result() == 1
        assert await (await in_thread.enqueue()).result() == DAY
    assert seen == ["on_loop", "in_thread"]


# ── Threads and processes ───────────────────────────────────────────────────────────────────────


async def test_processes_run_what_they_import(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, queue_name: str
) -> None:
    app = programs.app
    monkeypatch.setattr(app, "_redis_url", make_app().redis_url)
    async with app, serving(app):
        pid, day = await (await programs.where.enqueue(DAY)).result()
        assert pid != os.getpid()
        assert day == DAY
        runs = programs.in_process.with_options(attempts=1)
        assert str(await (await runs.enqueue("right")).result()) == "1.50"
        for what, told in (
            ("context", "ContextError: the app's context is made by its lifespan.*processes="),
            ("raise", "LookupError: in the process"),
            ("wrong", "result must be a Decimal, got str"),
        ):
            job = await runs.enqueue(what)
            with pytest.raises(JobFailedError):
                await job.result()
            (one,) = [one async for one in app.queue().iter_dlq() if one.job_id == job.id]
            assert re.search(told, str(one.error)), one.error
            assert "programs.py" in (one.traceback or "") or what == "wrong"
    async with app:
        await app.queue().obliterate(force=True)
