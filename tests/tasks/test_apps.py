"""Apps: when they connect, for whom, what workers they make, and their context."""

import asyncio
import gc
import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chasqui import App, ContextError, Job, WorkerOptions, current_job, sync
from chasqui.worker_group import UnknownQueueError
from tests.servers import Server
from tests.tasks.conftest import WAIT_S, MakeApp, serving, settled


def open_sockets() -> int:
    folder = Path("/proc/self/fd")
    count = 0
    for one in folder.iterdir():
        try:
            count += os.readlink(one).startswith("socket:")
        except OSError:  # the listing's own
            continue
    return count


# ── Connections ─────────────────────────────────────────────────────────────────────────────────


async def test_an_app_opens_nothing_until_it_is_used(make_app: MakeApp) -> None:
    sockets, threads = open_sockets(), threading.active_count()
    app = make_app(slots=5)

    @app.task(every=5)
    def ship(n: int = 1) -> int:
        return n

    ship.bind(1)
    ship.with_options(delay=5).bind(2)
    app.worker_group()
    app.queue()
    app.sync_queue()
    assert (open_sockets(), threading.active_count()) == (sockets, threads)
    await ship.enqueue(1)
    assert open_sockets() > sockets
    await app.close()
    assert open_sockets() == sockets
    await ship.enqueue(1)  # opens it again
    assert (await app.queue().counts()).waiting == 2
    await app.close()
    await app.close()


def test_one_loop_after_the_other(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def ship(n: int) -> None: ...

    async def add(n: int) -> None:
        await ship.enqueue(n)

    async def add_and_close(n: int) -> int:
        async with app:
            await ship.enqueue(n)
            return (await app.queue().counts()).waiting

    for n in range(3):
        assert asyncio.run(add_and_close(n)) == n + 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_loops_that_ended_without_a_close_leave_nothing_open(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def ship(n: int) -> None: ...

    async def add(n: int) -> None:
        await ship.enqueue(n)

    asyncio.run(add(0))
    gc.collect()
    before = open_sockets()
    for n in range(10):
        asyncio.run(add(n))
    gc.collect()
    assert open_sockets() <= before


def test_loops_at_once_have_queues_of_their_own(make_app: MakeApp) -> None:
    app = make_app()
    together = threading.Barrier(4)

    @app.task
    def ship(n: int) -> None: ...

    async def add(n: int) -> int:
        async with app:
            together.wait(WAIT_S)
            jobs = await asyncio.gather(*(ship.enqueue(n) for _ in range(25)))
            together.wait(WAIT_S)
            return sum(job.is_new for job in jobs)

    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: counts.append(asyncio.run(add(n)))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert counts == [25] * 4
    assert app.sync_queue().counts().waiting == 100


def test_threads_share_one_blocking_queue(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def ship(n: int) -> int:
        return n

    found: list[sync.Queue] = []
    threads = [
        threading.Thread(target=lambda: found.append((ship.enqueue_sync(1), app.sync_queue())[1]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    app.close_sync()
    assert found[0].is_closed
    ship.enqueue_sync(2)
    assert app.sync_queue().counts().waiting == 9


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_adds_over_a_connection_of_its_own(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def ship(n: int) -> None: ...

    ship.enqueue_sync(0)
    pid = os.fork()
    if pid == 0:  # the child
        code = 1
        try:
            for n in range(20):
                ship.enqueue_sync(n)
            code = 0
        finally:
            os._exit(code)
    for n in range(20):
        ship.enqueue_sync(n)
    assert os.waitpid(pid, 0)[1] == 0
    assert app.sync_queue().counts().waiting == 41


async def test_asgi_closes_what_was_opened(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def ship(n: int) -> None: ...

    async with app.asgi(object()):
        await ship.enqueue(1)
        await asyncio.to_thread(ship.enqueue_sync, 2)
        queues = app.queue(), app.sync_queue()
    assert [queue.is_closed for queue in queues] == [True, True]


# ── Context ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_context_is_made_once_for_all_queues(make_app: MakeApp, queue_name: str) -> None:
    told: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[dict[str, int]]:
        told.append("entered")
        yield {"n": 7}
        told.append("left")

    app = make_app(lifespan=lifespan)

    @app.task
    async def on_loop() -> int:
        told.append("ran")
        return app.context["n"]  # type: ignore[no-any-return]

    @app.task(queue=f"{queue_name}-b")
    def in_thread() -> int:
        return app.context["n"]  # type: ignore[no-any-return]

    with pytest.raises(ContextError, match=r"which only workers enter.*app\.override"):
        print(app.context)
    async with app:
        jobs = [await on_loop.enqueue(), await in_thread.enqueue()]
        async with serving(app):
            assert [await job.result() for job in jobs] == [7, 7]
        assert told == ["entered", "ran", "left"]
    with pytest.raises(ContextError):
        print(app.context)


def test_override_is_for_tests(make_app: MakeApp) -> None:
    app = make_app()
    with pytest.raises(ContextError, match=r"give App\(lifespan=…\) a function"):
        print(app.context)
    with app.override("outer"):
        with app.override("inner"):
            assert app.context == "inner"
        assert app.context == "outer"
        with pytest.raises(LookupError), app.override("broken"):
            raise LookupError
        assert app.context == "outer"
    with pytest.raises(ContextError):
        print(app.context)


async def test_groups_that_overlap_leave_each_other_their_context(make_app: MakeApp) -> None:
    """One may end before the other, in any order."""
    numbers = iter(range(10))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[int]:
        yield next(numbers)

    app = make_app(lifespan=lifespan)
    first, second = app.entered(), app.entered()
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert app.context == 1, "that of the one which still runs"
    await second.__aexit__(None, None, None)
    with pytest.raises(ContextError):
        print(app.context)


async def test_a_lifespan_that_raises_takes_no_job(make_app: MakeApp) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        raise LookupError("no database")
        yield

    app = make_app(lifespan=lifespan)
    runs: list[int] = []

    @app.task
    def ship() -> None:
        runs.append(1)

    async with app:
        await ship.enqueue()
        with pytest.raises(LookupError, match="no database"):
            await app.worker_group().run()
        counts = await app.queue().counts()
        assert (counts.waiting, counts.pending) == (1, 0)
    assert not runs


async def test_a_lifespan_that_is_no_context_manager_is_told(make_app: MakeApp) -> None:
    async def forgotten() -> AsyncIterator[None]:
        yield

    app = make_app(lifespan=forgotten)

    @app.task
    def ship() -> None: ...

    with pytest.raises(TypeError, match=r"got async_generator: is it a generator without"):
        await app.worker_group().run()
    with pytest.raises(TypeError, match="lifespan must be a function that returns"):
        make_app(lifespan=5)


async def test_what_tasks_open_is_closed_with_their_worker(make_app: MakeApp) -> None:
    app, watching = make_app(), make_app()

    @app.task
    async def more(n: int) -> None:
        if n:
            await more.enqueue(n - 1)

    async with watching:
        await watching.queue().add("more", {"n": 3})
        async with serving(app):
            await settled(watching)
            queue = app.queue()
        assert queue.is_closed


# ── Workers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


async def test_a_worker_imports_what_is_included(
    make_app: MakeApp, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(include=["included_one", "included_two"])
    monkeypatch.setattr(App, "of_test", app, raising=False)
    source = "from chasqui import App\n@App.of_test.task\ndef {}(): return 5\n"
    for name in ("one", "two"):
        (modules / f"included_{name}.py").write_text(source.format(name))
    importlib.invalidate_caches()
    assert app.tasks == []
    async with app, serving(app):
        jobs = [await app.queue().add(name, {}) for name in ("one", "two")]
        assert [await job.result() for job in jobs] == [5, 5]


def test_an_import_error_comes_out_whole(make_app: MakeApp, modules: Path) -> None:
    (modules / "included_broken.py").write_text("import chasqui\nimport no_such_module\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as found:
        make_app(include=["included_broken"]).worker_group()
    assert found.traceback[-1].path.name == "included_broken.py"
    with pytest.raises(TypeError, match="include must be a list of module names, got a str"):
        make_app(include="included_broken")


def test_queues_are_chosen_and_ordered(make_app: MakeApp) -> None:
    app = make_app("default", workers={"urgent": WorkerOptions(concurrency=3)})
    with pytest.raises(ValueError, match="the app has no task"):
        app.worker_group()
    for queue in (None, "late", "urgent"):
        app.task(name="ship", queue=queue)(lambda: None)
    assert app.worker_group().queues == ("urgent", "default", "late")
    assert app.worker_group(["late", "urgent"]).queues == ("urgent", "late")
    with pytest.raises(UnknownQueueError, match=r"'urgnt': is it 'urgent'\?"):
        app.worker_group(["urgnt"])
    with pytest.raises(TypeError, match="queues must be a list of names, got a str"):
        app.worker_group("late")
    with pytest.raises(TypeError, match="concurency"):
        app.worker_group(concurency=5)
    assert [worker.concurrency for worker in app.worker_group(["urgent"]).workers] == [3]


async def test_a_burst_ends_when_nothing_is_left(make_app: MakeApp, queue_name: str) -> None:
    app = make_app()
    seen: list[int] = []

    @app.task
    async def ship(n: int) -> None:
        seen.append(n)

    async with app:
        await app.enqueue_many(map(ship.bind, range(5)))
        async with asyncio.timeout(WAIT_S):
            await app.worker_group(burst=True).run()
    assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("weights", [None, (3, 1)], ids=["strict", "weight"])
async def test_queues_share_slots(
    make_app: MakeApp, queue_name: str, weights: tuple[int, int] | None
) -> None:
    names = [f"{queue_name}-urgent", f"{queue_name}-late"]
    options = [WorkerOptions(weight=one) for one in weights or (None, None)]
    app = make_app(workers=dict(zip(names, options, strict=True)), slots=1)
    seen: list[str] = []

    async def ship() -> None:
        seen.append(current_job().name)
        await asyncio.sleep(0)

    tasks = [app.task(name=name.rpartition("-")[2], queue=name)(ship) for name in reversed(names)]
    async with app:
        for task in tasks:
            await app.enqueue_many(task.bind() for _ in range(40))
        async with serving(app) as group:
            for name in names:
                await settled(app, name)
        assert group.queues == tuple(names)
    late = [i for i, name in enumerate(seen) if name == "late"]
    assert len(seen) == 80
    ahead = seen[: late[20]].count("urgent")
    if weights is None:
        assert ahead == 40, "all that is urgent comes first"
    else:
        assert seen[: len(seen) // 2].count("urgent") > seen[: len(seen) // 2].count("late")
        assert late[0] < 39, "and the others are not starved"


async def test_a_task_runs_on_every_server(make_app: MakeApp, server: Server) -> None:
    app = make_app(redis_url=server.url)

    @app.task(unique_for=60)
    async def ship(n: int) -> list[int]:
        job: Job[Any] = current_job()
        return [n, job.attempt]

    async with app, serving(app):
        job = await ship.enqueue(5)
        assert not (await ship.enqueue(5)).is_new
        assert await job.result() == [5, 0]


def test_options_of_workers_are_checked() -> None:
    with pytest.raises(TypeError, match=r"workers\['shop'\] must be WorkerOptions, got dict"):
        App("shop", workers={"shop": {"concurrency": 5}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="slots must be at least 1"):
        App("shop", slots=0)
    app = App("shop", workers={"shopp": WorkerOptions()})

    @app.task
    async def note() -> None: ...

    with pytest.raises(ValueError, match="names queue 'shopp', which no task is on: is it 'shop'"):
        app.worker_group()


def test_tasks_are_in_the_order_of_their_definition() -> None:
    app = App("shop")

    @app.task(queue="b")
    async def first() -> None: ...

    @app.task(queue="a")
    async def second() -> None: ...

    @app.task(queue="b", aliases=["old"])
    async def third() -> None: ...

    assert app.tasks == [first, second, third]


def test_a_queue_of_plain_tasks_takes_no_more_jobs_than_it_has_threads() -> None:
    """Though its worker also runs the tasks of other queues, of which one is on the loop."""
    app = App("threads", workers={"few": WorkerOptions(threads=3)})

    @app.task
    def plain() -> None: ...

    @app.task(queue="few")
    def other() -> None: ...

    @app.task(queue="loop")
    async def on_the_loop() -> None: ...

    found = {worker.name: worker.concurrency for worker in app.worker_group().workers}
    assert found == {"few": 3, "threads": 32, "loop": 100}
