"""The rest of `jobs`: single runs, fires, the server, and that no app reaches another one."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest

from chasqui import (
    App,
    ConversionError,
    Job,
    Queue,
    Worker,
    WorkerOptions,
    current_job,
    sync,
    testing,
)
from chasqui.testing import Jobs
from chasqui.testing.server import _own_database
from tests.servers import Server

NOWHERE = "redis://127.0.0.1:1"


# ── run ─────────────────────────────────────────────────────────────────────────────────────────


async def test_run_goes_the_way_of_a_job(jobs: Jobs) -> None:
    log: list[Any] = []

    async def hook(job: Job, run: Callable[[], Awaitable[Any]]) -> Any:
        log.append(("hook", job.data))
        return await run()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        log.append("in")
        yield "real"
        log.append("out")

    app = App("shop", redis_url=NOWHERE, lifespan=lifespan, around=[hook])

    @app.task(attempts=1)
    async def price(of: Decimal, on: date) -> tuple[Decimal, date]:
        job = current_job()
        log.append((app.context, job.name, job.max_attempts, job.is_last_attempt))
        return of * 2, on

    day = date(2026, 5, 4)
    assert await jobs.run(price, Decimal("1.50"), on=day) == (Decimal("3.00"), day)
    assert log == [
        "in",
        ("hook", {"of": "1.50", "on": "2026-05-04"}),
        ("real", "price", 1, True),
        "out",
    ]
    with app.override("fake"):
        await jobs.run(price, Decimal(1), on=day)
    assert log[-1] == ("fake", "price", 1, True)
    assert jobs.all_enqueued() == []
    with pytest.raises(ConversionError, match="of"):
        await jobs.run(price, "much", on=day)  # type: ignore[arg-type]


async def test_run_raises_what_the_task_raises_and_keeps_its_time(jobs: Jobs) -> None:
    app = App("shop")

    @app.task(timeout=timedelta(milliseconds=20))
    async def hang(fails: bool) -> None:
        if fails:
            raise LookupError("gone")
        await asyncio.Event().wait()

    with pytest.raises(LookupError, match="gone"):
        await jobs.run(hang, True)
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s"):
        await jobs.run(hang, False)


def test_run_sync_runs_plain_functions_in_a_thread(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    def where() -> list[str]:
        return [threading.current_thread().name, current_job().name]

    thread, name = jobs.run_sync(where)
    assert thread.startswith("chasqui-handler")
    assert name == "where"


async def test_run_refuses_a_result_that_cannot_be_stored(jobs: Jobs) -> None:
    app = App("shop")

    @app.task
    async def odd():  # type: ignore[no-untyped-def]
        return {1, 2}

    with pytest.raises(TypeError, match="result"):
        await jobs.run(odd)


# ── fire ────────────────────────────────────────────────────────────────────────────────────────


async def test_fire_adds_one_job_of_a_repeatable_task(jobs: Jobs) -> None:
    app, seen = App("shop"), []

    @app.task(cron="0 3 * * *", queue="nightly")
    async def digest(day: str = "today") -> None:
        seen.append(day)

    @app.task
    async def once() -> None: ...

    jobs.fire(digest)
    jobs.assert_enqueued(digest, queue="nightly", day="today")
    await jobs.drain()
    assert seen == ["today"]
    with pytest.raises(ValueError, match="task 'once' has neither every= nor cron="):
        jobs.fire(once)


# ── The server ──────────────────────────────────────────────────────────────────────────────────


async def test_every_app_and_every_plain_queue_uses_the_server_of_the_test(jobs: Jobs) -> None:
    async def secret(host: str | None) -> tuple[str | None, str | None]:
        raise AssertionError("the credentials are for another server")

    options = WorkerOptions(redis_url=NOWHERE, credential_provider=secret, tls=True)
    app = App("shop", redis_url=NOWHERE, workers={"shop": options})
    done = asyncio.Event()

    @app.task
    async def note() -> None:
        done.set()

    assert app.redis_url == jobs.url == os.environ["CHASQUI_URL"]
    await note.enqueue()
    await jobs.drain()
    assert done.is_set()
    done.clear()
    group = app.worker_group(redis_url=NOWHERE, credential_provider=secret)
    running = asyncio.ensure_future(group.run())
    async with Queue("shop") as queue:
        await queue.add("note", {})
    await done.wait()
    await group.close()
    await running
    assert Worker("shop", lambda job: None).server == f"unix://{jobs.url.removeprefix('unix://')}"


def test_afterwards_apps_have_their_own_server_and_their_open_queues_again(
    redis_86: Server, queue_name: str
) -> None:
    app = App(queue_name, redis_url=redis_86.url)

    @app.task
    async def note(what: str) -> None: ...

    note.enqueue_sync("before")
    opened = app.sync_queue()
    before = {name: os.environ.get(name) for name in ("CHASQUI_URL", "CHASQUI_APP_URL_OVERRIDE")}
    with testing.jobs() as jobs:
        note.enqueue_sync("in the test")
        (job,) = jobs.all_enqueued()
        assert job.args == {"what": "in the test"}
        in_test = app.sync_queue()
    assert in_test.is_closed
    assert app.redis_url == redis_86.url
    assert app.sync_queue() is opened
    assert before == {name: os.environ.get(name) for name in before}
    assert opened.counts().waiting == 1
    opened.obliterate(force=True)
    app.close_sync()


def test_there_is_one_at_a_time_and_it_ends_with_its_test() -> None:
    with testing.jobs() as jobs, pytest.raises(RuntimeError, match="has `jobs` already"):
        testing.jobs().__enter__()
    with pytest.raises(RuntimeError, match="after the end of its test"):
        asyncio.run(jobs.drain())


@pytest.fixture
def own_server(
    private_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A server that CHASQUI_TEST_URL names."""
    server = private_server()
    monkeypatch.setenv("CHASQUI_TEST_URL", server.url)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return server


def test_a_server_of_the_user_is_never_flushed(own_server: Server) -> None:
    app = App("shop")

    @app.task
    async def note() -> None: ...

    with sync.Queue("mine", redis_url=own_server.url) as mine:
        mine.add("precious", {})
        with pytest.raises(RuntimeError, match=r"CHASQUI_TEST_URL holds queues.*mine"):
            testing.jobs().__enter__()
        assert mine.counts().waiting == 1
        mine.obliterate(force=True)
        with testing.jobs() as jobs:
            assert jobs.url == own_server.url
            note.enqueue_sync()
            assert jobs.drain_sync().completed == 1
            note.enqueue_sync()
        with testing.jobs() as jobs:
            assert jobs.all_enqueued() == []


def test_each_process_of_xdist_has_a_database_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert _own_database("redis://host:1/4") == "redis://host:1/4"
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert _own_database("redis://:pw@host:1") == "redis://:pw@host:1/3"
    assert _own_database("redis://host:1/4") == "redis://host:1/7"
    assert _own_database("unix:///a/socket?db=2") == "unix:///a/socket?db=5"


def test_a_cluster_cannot_be_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHASQUI_TEST_URL", "redis+cluster://127.0.0.1:1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(ValueError, match="must name a single server, not a cluster"):
        testing.jobs().__enter__()


# ── What tests leave behind ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_worker_that_is_left_running_is_ended(kind: str) -> None:
    """By an event loop that is neither closed nor running, as between a test and its fixtures."""
    app = App("shop")
    begun, ended = threading.Event(), []

    @app.task
    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")

    release = threading.Event()

    @app.task
    def block() -> None:
        begun.set()
        release.wait(30)

    async def leave() -> None:
        task = hang if kind == "coroutine" else block
        await task.enqueue()
        group = app.worker_group()
        left.append(group)
        running.append(asyncio.ensure_future(group.run()))
        await asyncio.to_thread(begun.wait)

    left: list[Any] = []
    running: list[Any] = []
    loop = asyncio.new_event_loop()
    with testing.jobs():
        loop.run_until_complete(leave())
        assert left[0].is_running
    assert not left[0].is_running
    assert ended == (["hang"] if kind == "coroutine" else [])
    release.set()
    loop.run_until_complete(running[0])
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_a_worker_of_another_thread_is_ended() -> None:
    app = App("shop")
    begun = threading.Event()

    @app.task
    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    group = None

    async def work() -> None:
        await group.run()  # type: ignore[attr-defined]

    with testing.jobs():
        hang.enqueue_sync()
        group = app.worker_group()
        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        begun.wait()
    thread.join(20)
    assert not thread.is_alive()
