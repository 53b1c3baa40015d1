"""The processes of pools: when a run begins there, and that each of them ends."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from chasqui import Job
from chasqui.consuming import processes
from chasqui.queue import Queue
from tests.consuming import handlers, slow_import
from tests.consuming.conftest import WAIT_S, Running, until
from tests.servers import Server

Start = Callable[..., Running]
Dead = Callable[[], Awaitable[list[dict[bytes, bytes]]]]

pytestmark = [
    pytest.mark.slow,
    #: What happens in pools has nothing to do with the server.
    pytest.mark.parametrize("server", ["valkey-9"], indirect=True),
]

RAN = b"the handler ran to its end; its result could not be stored"


def is_alive(pid: int) -> bool:
    """Whether it runs. One that nobody has asked for how it ended does not."""
    asked = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(asked.stdout.strip()) and "Z" not in asked.stdout


async def gone(pid: int) -> None:
    async def is_gone() -> bool:
        return not await asyncio.to_thread(is_alive, pid)

    await until(is_gone, f"process {pid} is gone")


async def written(path: Path) -> int:
    """The number that a handler writes into a file."""

    def read() -> str:
        return path.read_text() if path.exists() else ""

    return int(await until(lambda: asyncio.to_thread(read), f"{path} is written"))


# ── The beginning of a run ──────────────────────────────────────────────────────────────────────


async def test_the_time_of_a_run_begins_when_its_process_runs_it(
    queue: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(slow_import.MANNER, "sleep 3")
    running = start(slow_import.echo, processes=1, timeout_ms=2000, store_results=True)
    job = await queue.add("n", "done", attempts=1)
    assert await running.fact(job.result()) == "done"


@pytest.mark.parametrize(
    ("manner", "error"),
    [
        (
            "raise",
            b"RuntimeError: the handler cannot be imported in its process: ImportError: as told",
        ),
        (
            "exit",
            b"BrokenProcessPool: the handler's process ended with code 5 before it could run the "
            b"handler",
        ),
    ],
)
async def test_a_handler_that_cannot_be_imported_is_told(
    queue: Queue,
    start: Start,
    dead: Dead,
    monkeypatch: pytest.MonkeyPatch,
    manner: str,
    error: bytes,
) -> None:
    monkeypatch.setenv(slow_import.MANNER, manner)
    running = start(slow_import.echo, processes=1, store_results=True)
    await queue.add("n", None, attempts=1)
    await running.buried(1)
    (buried,) = await dead()
    assert buried[b"error"] == error
    monkeypatch.delenv(slow_import.MANNER)
    job = await queue.add("n", "done")
    assert await running.result(queue, job.id) == "done"


async def test_a_process_that_never_begins_is_given_up(
    queue: Queue, start: Start, dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(slow_import.MANNER, "sleep 60")
    monkeypatch.setattr(processes, "START_S", 0.5)
    running = start(slow_import.echo, processes=1)
    await queue.add("n", None, attempts=1)
    await running.buried(1)
    (buried,) = await dead()
    assert buried[b"error"].endswith(b"the handler's process did not begin within 0.5 s")


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_process_that_died_idle_costs_no_job_an_attempt(
    queue: Queue, start: Start, is_noticed: bool
) -> None:
    """Whether its death is known when the job comes, or it dies with the job in its line."""
    running = start(handlers.process_id, processes=1, store_results=True)
    first = await queue.add("n", None)
    pid = await running.result(queue, first.id)
    os.kill(pid, signal.SIGKILL if is_noticed else signal.SIGSTOP)
    if is_noticed:
        await gone(pid)
    job = await queue.add("n", None, attempts=1)
    if not is_noticed:
        health = running.worker.health

        async def has_it() -> bool:
            return (now := health()) is not None and now.running == 1

        await until(has_it, "the process has the job")
        os.kill(pid, signal.SIGKILL)
    assert await running.fact(job.result()) not in (pid, os.getpid())


async def test_a_job_waits_for_a_process_that_cannot_be_started(
    queue: Queue,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has not run, so it has not failed."""

    def refuse(*arguments: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    async def is_told() -> bool:
        return "waits for a process: Resource temporarily unavailable" in caplog.text

    running = start(handlers.double, processes=1, store_results=True)
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.context.SpawnProcess.start", refuse)
        job = await queue.add("n", 4, attempts=1)
        await until(is_told, "it is told")
    assert await running.fact(job.result()) == 8


async def test_no_job_waits_for_a_process_where_another_worker_has_one(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    long = {"began": f"{tmp_path}/began", "until": str(end)}
    short = {"began": f"{tmp_path}/other", "until": str(tmp_path)}
    await queue.add_bulk([{"name": "n", "data": data} for data in (long, short, short, short)])
    busy = start(handlers.wait_for_file, processes=1)
    await until(lambda: asyncio.to_thread((tmp_path / "began").exists), "the long run has begun")
    other = start(handlers.wait_for_file, processes=1)
    await other.completed(3)
    end.touch()
    await busy.completed(1)


async def test_a_job_that_waits_for_a_process_does_not_begin_during_the_drain(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    async def other(job: Job) -> None:
        pass

    end = tmp_path / "end"
    for name in ("first", "second"):
        await queue.add("long", {"began": f"{tmp_path}/{name}", "until": str(end)})
    running = start({"long": handlers.wait_for_file, "other": other}, processes={"long": 1})

    async def both_have_slots() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 2

    await until(both_have_slots, "one waits for the other's process")
    await until(lambda: asyncio.to_thread((tmp_path / "first").exists), "the first has begun")
    await running.worker.close()

    async def drains() -> bool:
        engine = running.worker._engine
        return engine is not None and engine._dispatcher._is_stopping

    await until(drains, "it drains")
    end.touch()
    await running.task
    assert running.metrics.jobs_completed == 1
    assert not (tmp_path / "second").exists()


@pytest.mark.both_loops
async def test_a_process_is_used_again(queue: Queue, start: Start) -> None:
    running = start(handlers.process_id, processes=2, concurrency=1, store_results=True)
    jobs = [await queue.add("n", None) for _ in range(5)]
    assert len({await running.result(queue, job.id) for job in jobs}) == 1


async def test_large_jobs_and_results_go_through(queue: Queue, start: Start) -> None:
    running = start(slow_import.echo, processes=1, store_results=True)
    data = os.urandom(900_000)
    job = await queue.add("n", data)
    assert await running.result(queue, job.id) == data


@pytest.mark.parametrize(
    ("data", "told"),
    [("lambda", b"result is a function"), ("sealed", b"result is a value that cannot be unpick")],
)
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_result_that_cannot_leave_its_process_is_no_failed_run(
    queue: Queue, start: Start, dead: Dead, data: str, told: bytes, is_stored: bool
) -> None:
    running = start(handlers.behave, processes=1, store_results=is_stored)
    await queue.add("n", data)
    if not is_stored:
        await running.completed(1)
        return
    await running.buried(1)
    (buried,) = await dead()
    assert (buried[b"detail"], buried[b"attempts"]) == (RAN, b"1")
    assert told in buried[b"error"]


@pytest.mark.parametrize("fails", [False, True])
async def test_each_job_of_a_batch_in_a_process_has_its_own_fate(
    queue: Queue, start: Start, dead: Dead, fails: bool
) -> None:
    told = ["good", "lambda", "unpicklable"] if fails else ["good", "lambda", "fine"]
    jobs = await queue.add_bulk([{"name": "n", "data": data, "attempts": 1} for data in told])
    options = {"batch": 3, "batch_linger_ms": 2000, "store_results": True}
    running = start(handlers.behave_in_batches, processes=1, **options)
    assert await running.result(queue, jobs[0].id) == "good"
    await running.buried(1 + fails)
    buried = {one[b"error"]: one.get(b"detail") for one in await dead()}
    assert buried.pop(next(error for error in buried if b"is a function" in error)) == RAN
    if fails:
        assert buried == {b"RuntimeError: CannotBeUnpickledError: as": None}
    else:
        assert await running.result(queue, jobs[2].id) == "fine"


# ── The end of a process ────────────────────────────────────────────────────────────────────────


async def test_a_process_that_takes_no_notice_is_killed_when_its_time_is_over(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    running = start(handlers.take_no_notice, processes=1, timeout_ms=2000)
    await queue.add("n", f"{tmp_path}/pid", attempts=1)
    pid = await written(tmp_path / "pid")
    await running.buried(1)
    await gone(pid)


async def test_a_process_that_is_killed_makes_room_for_the_next_only_then(
    queue: Queue, start: Start, tmp_path: Path
) -> None:
    """So there are never more of them than asked for."""
    running = start(handlers.take_no_notice, processes=1, timeout_ms=2000)
    for name in ("first", "second"):
        await queue.add("n", f"{tmp_path}/{name}", attempts=1)
    first = await written(tmp_path / "first")
    second = await written(tmp_path / "second")
    assert first != second
    assert not is_alive(first)
    await running.buried(2)


@pytest.mark.both_loops
async def test_no_process_outlives_its_worker(queue: Queue, start: Start, tmp_path: Path) -> None:
    """Neither an idle one nor one that takes no notice."""
    mapping = {"deaf": handlers.take_no_notice, "idle": handlers.process_id}
    running = start(mapping, processes=1, store_results=True, shutdown_deadline_s=0.1)
    await queue.add("deaf", f"{tmp_path}/pid")
    job = await queue.add("idle", None)
    pids = [await written(tmp_path / "pid"), await running.result(queue, job.id)]
    await running.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # gone, and nobody has to ask how it ended
            os.kill(pid, 0)
    assert not multiprocessing.active_children()


async def test_a_process_whose_worker_is_killed_ends(
    queue: Queue, server: Server, tmp_path: Path
) -> None:
    """Neither an idle one nor one that takes no notice is left behind."""
    program = (
        "import asyncio\n"
        "from chasqui import Worker\n"
        "from tests.consuming import handlers\n"
        "mapping = {'deaf': handlers.take_no_notice, 'idle': handlers.process_id}\n"
        "def make():\n"
        f"    return Worker({queue.name!r}, mapping, processes=1, store_results=True)\n"
    )
    (tmp_path / "orphans.py").write_text(program)
    root = Path(__file__).parents[2]
    worker = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "chasqui", "worker", "orphans:make"],
        cwd=tmp_path,
        env=os.environ | {"CHASQUI_URL": server.url, "PYTHONPATH": str(root)},
    )
    try:
        await queue.add("deaf", f"{tmp_path}/pid")
        job = await queue.add("idle", None)
        pids = [await written(tmp_path / "pid"), await job.result(timeout=WAIT_S)]
    finally:
        worker.kill()
        await worker.wait()
    for pid in pids:
        await gone(pid)


async def test_the_end_of_a_process_is_known_though_its_children_live(
    queue: Queue, start: Start, dead: Dead, tmp_path: Path
) -> None:
    running = start(handlers.fork_and_die, processes=1)
    await queue.add("n", f"{tmp_path}/child", attempts=1)
    child = await written(tmp_path / "child")
    try:
        await running.buried(1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    (buried,) = await dead()
    assert b"ended with code 3 while it ran the handler" in buried[b"error"]
