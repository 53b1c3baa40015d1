"""Several workers as one: they begin together, end together, and share one lifespan."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chasqui import AuthenticationError, Job, Queue, Worker
from chasqui.cli import health
from chasqui.worker_group import WorkerGroup
from tests.running.conftest import WAIT_S, Program
from tests.servers import Server

Handler = Callable[[Job], Awaitable[Any]]


class Log:
    """What happened, in order; and facts that can be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = asyncio.Condition()

    async def write(self, line: str) -> None:
        async with self._came:
            self.lines.append(line)
            self._came.notify_all()

    async def has(self, *lines: str) -> None:
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(lambda: set(lines) <= set(self.lines))

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[str]:
        await self.write("entered")
        try:
            yield "context"
        finally:
            await self.write("left")

    async def before(self) -> None:
        await self.write("before")


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
def names(queue_name: str) -> tuple[str, str]:
    return f"{queue_name}-a", f"{queue_name}-b"


@pytest.fixture
def worker(valkey_9: Server) -> Callable[..., Worker]:
    def make(name: str, handler: Handler, **options: Any) -> Worker:
        options = {"redis_url": valkey_9.url, "shutdown_deadline_s": 20, **options}
        return Worker(name, handler, **options)

    return make


async def add(server: Server, name: str, *data: Any) -> None:
    async with Queue(name, redis_url=server.url) as queue:
        await queue.add_bulk([{"name": "job", "data": one} for one in data])


async def waiting(server: Server, name: str) -> int:
    async with Queue(name, redis_url=server.url) as queue:
        counts = await queue.counts()
        return counts.waiting + counts.pending + counts.delayed


async def ended(running: "asyncio.Task[None]") -> None:
    await asyncio.wait({running}, timeout=WAIT_S)
    assert running.done(), "it never ended"


async def closed(one: Worker | WorkerGroup) -> None:
    async with asyncio.timeout(WAIT_S):
        while not one.is_closed:  # noqa: ASYNC110 - there is no event, only the fact
            await asyncio.sleep(0.01)


async def test_it_enters_the_lifespan_runs_every_queue_and_leaves_after_the_drain(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log
) -> None:
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await log.write(f"began {job.data}")
        await gate.wait()
        await log.write(f"ended {job.data}")

    group = WorkerGroup(
        [worker(name, handler) for name in names],
        name="shop",
        lifespan=log.lifespan,
        before=log.before,
    )
    assert group.health() is None
    assert not group.is_running
    check = health.of_worker(group)
    assert check() == {"status": "starting"}
    for name in names:
        await add(valkey_9, name, name)
    running = asyncio.ensure_future(group.run())
    await log.has(*(f"began {name}" for name in names))
    assert log.lines[:2] == ["entered", "before"]
    found = group.health()
    assert found is not None
    assert found.running == 2
    assert found.is_connected
    assert found.oldest_running_s > 0
    assert group.is_running
    assert group.loop is asyncio.get_running_loop()
    told = {"status": "ok", "group": "shop", "queues": names, "running": 2}
    assert told.items() <= check().items()
    await group.close()
    assert check()["status"] == "draining"
    gate.set()
    await ended(running)
    running.result()
    assert log.lines[-1] == "left"
    assert sorted(log.lines[2:-1])[-2:] == [f"ended {name}" for name in names]
    assert group.is_closed
    assert not group.is_running
    await group.run()  # the same run, which is over
    assert log.lines.count("entered") == 1


def test_what_is_no_group_is_refused(worker: Callable[..., Worker], queue_name: str) -> None:
    async def handler(job: Job) -> None: ...

    with pytest.raises(ValueError, match="workers is empty"):
        WorkerGroup([], name="shop")
    with pytest.raises(TypeError, match="must be Workers, got str"):
        WorkerGroup(["a"], name="shop")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="has two of queue"):
        WorkerGroup([worker(queue_name, handler), worker(queue_name, handler)], name="shop")


@pytest.mark.parametrize("where", ["lifespan", "before"])
async def test_an_error_before_the_work_takes_no_job_and_comes_out_whole(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log, where: str
) -> None:
    error = OSError("no database")

    async def handler(job: Job) -> None:
        await log.write("ran")

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        if where == "lifespan":
            raise error
        async with log.lifespan():
            yield

    async def before() -> None:
        raise error

    await add(valkey_9, names[0], 1)
    group = WorkerGroup(
        [worker(name, handler) for name in names], name="shop", lifespan=lifespan, before=before
    )
    with pytest.raises(OSError, match="no database") as raised:
        await group.run()
    assert raised.value is error
    assert group.program_error is error
    assert log.lines == ([] if where == "lifespan" else ["entered", "left"])
    assert await waiting(valkey_9, names[0]) == 1


async def test_a_lifespan_that_is_only_a_generator_is_named(worker: Callable[..., Worker]) -> None:
    async def lifespan() -> AsyncIterator[None]:
        yield

    async def handler(job: Job) -> None: ...

    group = WorkerGroup([worker("q", handler)], name="shop", lifespan=lifespan)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="without @asynccontextmanager"):
        await group.run()


async def test_a_worker_that_fails_drains_the_others(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log
) -> None:
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await log.write("began")
        await gate.wait()
        await log.write("ended")

    await add(valkey_9, names[0], 1)
    good = worker(names[0], handler)
    turn = asyncio.Event()

    async def credentials(host: str) -> tuple[str, str]:
        await turn.wait()
        return "nobody", "wrong"

    bad = worker(names[1], handler, credential_provider=credentials)
    group = WorkerGroup([good, bad], name="shop", lifespan=log.lifespan)
    running = asyncio.ensure_future(group.run())
    await log.has("began")
    turn.set()
    await closed(good)
    assert not running.done(), "the other one has not drained yet"
    gate.set()
    await ended(running)
    with pytest.raises(AuthenticationError):
        running.result()
    assert log.lines == ["entered", "began", "ended", "left"]
    assert group.program_error is None, "it is one sentence, without a traceback"
    assert await waiting(valkey_9, names[0]) == 0


async def test_a_handler_that_exits_drains_all(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log
) -> None:
    async def exits(job: Job) -> None:
        await log.has("began")
        raise SystemExit(7)

    async def finishes(job: Job) -> None:
        await log.write("began")
        await closed(group)
        await log.write("ended")

    for name in names:
        await add(valkey_9, name, 1)
    workers = [worker(names[0], exits), worker(names[1], finishes)]
    group = WorkerGroup(workers, name="shop", lifespan=log.lifespan)
    with pytest.raises(SystemExit) as raised:
        await group.run()
    assert raised.value.code == 7
    assert log.lines == ["entered", "began", "ended", "left"]


async def test_a_cancelled_run_drains_and_leaves_the_lifespan(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log
) -> None:
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await log.write("began")
        await gate.wait()
        await log.write("ended")

    await add(valkey_9, names[0], 1)
    group = WorkerGroup(
        [worker(name, handler) for name in names], name="shop", lifespan=log.lifespan
    )
    running = asyncio.ensure_future(group.run())
    await log.has("began")
    running.cancel()
    await asyncio.sleep(0)
    gate.set()
    await ended(running)
    assert running.cancelled()
    assert log.lines == ["entered", "began", "ended", "left"]
    assert await waiting(valkey_9, names[0]) == 0


async def test_a_run_that_is_cancelled_twice_gives_its_jobs_back(
    valkey_9: Server, names: tuple[str, str], worker: Callable[..., Worker], log: Log
) -> None:
    async def handler(job: Job) -> None:
        await log.write("began")
        await asyncio.Event().wait()

    await add(valkey_9, names[0], 1)
    group = WorkerGroup(
        [worker(name, handler) for name in names], name="shop", lifespan=log.lifespan
    )
    running = asyncio.ensure_future(group.run())
    await log.has("began")
    running.cancel()
    await asyncio.sleep(0.05)
    assert not running.done()
    running.cancel()
    await ended(running)
    assert running.cancelled()
    assert log.lines == ["entered", "began", "left"]
    assert await waiting(valkey_9, names[0]) == 1


@pytest.mark.parametrize("how", ["close", "stop_now"])
async def test_one_that_ends_while_the_lifespan_waits_takes_no_job(
    worker: Callable[..., Worker], log: Log, names: tuple[str, str], how: str
) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with log.lifespan():
            await asyncio.Event().wait()
            yield

    async def handler(job: Job) -> None: ...

    group = WorkerGroup([worker(name, handler) for name in names], name="s", lifespan=lifespan)
    running = asyncio.ensure_future(group.run())
    await log.has("entered")
    await group.close() if how == "close" else group.stop_now()
    await ended(running)
    running.result()
    assert log.lines == ["entered", "left"]
    assert group.health() is None


PROGRAM = """
from contextlib import asynccontextmanager
from chasqui import Worker
from chasqui.worker_group import WorkerGroup

@asynccontextmanager
async def lifespan():
    if FAILS:
        connect()
    print("entered", flush=True)
    yield
    print("left", flush=True)

def connect():
    raise ConnectionRefusedError("no database")

async def handler(job):
    with open("ran", "a") as file:
        print(job.data, file=file)

def make():
    workers = [Worker(name, handler) for name in QUEUES]
    return WorkerGroup(workers, name="shop", lifespan=lifespan)
"""


def source(names: tuple[str, str], *, fails: bool) -> str:
    return PROGRAM.replace("QUEUES", repr(names)).replace("FAILS", str(fails))


@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]], ids=["alone", "supervised"])
async def test_a_process_runs_a_group(
    program: Program, valkey_9: Server, names: tuple[str, str], arguments: list[str]
) -> None:
    program.write(source(names, fails=False))
    for name in names:
        await add(valkey_9, name, name)
    process = program.start("shop:make", *arguments)
    program.until(lambda: len(program.lines("ran")) == 2, "both queues are served")
    count = 2 if arguments else 1
    program.until(lambda: program.log.count("entered") == count, "all processes run")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert sorted(program.lines("ran")) == sorted(names)
    assert program.log.count("left") == count
    assert "worker shop: worker ended after" in program.log


def test_an_error_of_the_lifespan_is_shown_where_it_is(
    program: Program, names: tuple[str, str]
) -> None:
    program.write(source(names, fails=True))
    assert program.run("shop:make") == 1
    assert "ConnectionRefusedError: no database" in program.log
    assert 'shop.py", line 9, in lifespan' in program.log
    assert 'shop.py", line 15, in connect' in program.log
    assert "worker_group.py" not in program.log
    assert "asyncio" not in program.log.replace("asynccontextmanager", "")


def test_no_server_is_one_sentence(program: Program, names: tuple[str, str]) -> None:
    nowhere = "handler, redis_url='redis://127.0.0.1:1')"
    program.write(source(names, fails=False).replace("handler)", nowhere))
    assert program.run("shop:make") == 1
    assert "127.0.0.1:1" in program.log
    assert "Traceback" not in program.log
