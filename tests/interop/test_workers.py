"""Mixed fleets: each side's jobs on each side's workers, and both kinds of workers on one queue."""

import asyncio
import contextlib
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui import Job, UnrecoverableError, Worker
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from tests.interop.conftest import ROOT
from tests.interop.plans import entries, outcome, reason
from tests.servers import Server

COUNT = 5_000
MANY = 50_000


class Fleet:
    """A queue, its producers and its workers of both kinds."""

    def __init__(self, python: Path, url: str, queue: Queue, ledger: Path) -> None:
        self._command = [python, ROOT / "tests" / "interop" / "fleet.py", url, queue.name]
        self._url = url
        self._queue = queue
        self._ledger = ledger
        self._theirs: list[subprocess.Popen[str]] = []
        self._ours: list[tuple[Worker, asyncio.Task[None]]] = []
        self.done_here: Counter[int] = Counter()

    async def add_ours(self, first: int, count: int) -> None:
        for start in range(first, first + count, 1000):
            await self._queue.add_bulk(entries(start, min(1000, first + count - start)))

    async def add_theirs(self, first: int, count: int) -> None:
        command = [*map(str, self._command), "produce", str(first), str(count)]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=120)

    def start_ours(self) -> None:
        async def handler(job: Job) -> None:
            wrong = outcome(job.data, job.attempt)
            if wrong == "final":
                raise UnrecoverableError("as planned")
            if wrong:
                raise ValueError("as planned")
            self.done_here[job.data["n"]] += 1
            await asyncio.sleep(0)

        worker = Worker(
            self._queue.name, handler, redis_url=self._url, concurrency=20, read_block_ms=50
        )
        self._ours.append((worker, asyncio.ensure_future(worker.run())))

    def start_theirs(self) -> None:
        process = subprocess.Popen(
            [*self._command, "work", self._ledger],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._theirs.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"

    def done_there(self) -> Counter[int]:
        if not self._ledger.exists():
            return Counter()
        return Counter(map(int, self._ledger.read_text().split()))

    async def stop(self) -> None:
        for worker, running in self._ours:
            await worker.close()
            await running
        for process in self._theirs:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 20)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
async def fleet(
    interop_python: Path, redis_86: Server, queue: Queue, tmp_path: Path
) -> AsyncIterator[Fleet]:
    made = Fleet(interop_python, redis_86.url, queue, tmp_path / "ledger")
    yield made
    await made.stop()


@pytest.fixture
def until_rest(redis: redis_py.Redis, keys: Keys) -> Callable[[], Any]:
    """Waits until nothing is in the stream or delayed any more."""

    def is_busy() -> bool:
        # Both at one moment: jobs go from one to the other.
        with redis.pipeline(transaction=True) as pipeline:
            return any(pipeline.xlen(keys.stream).zcard(keys.delayed).execute())

    async def wait() -> None:
        async with asyncio.timeout(120):
            while is_busy():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    return wait


def check(fleet: Fleet, redis: redis_py.Redis, keys: Keys, count: int) -> None:
    """Every job has come to the end that was planned for it, and to that one only."""
    found: dict[int, str] = {}
    for _, fields in redis.xrange(keys.dlq):
        data = msgpack.unpackb(msgpack.unpackb(fields[b"d"])[1])
        assert data["n"] not in found, "buried twice"
        found[data["n"]] = fields[b"reason"].decode()
    planned = {n: why for n in range(count) if (why := reason(n))}
    assert found == planned
    done = fleet.done_here + fleet.done_there()
    assert done == Counter(n for n in range(count) if n not in planned), "each ran once to its end"


async def test_their_jobs_on_our_workers(
    fleet: Fleet, redis: redis_py.Redis, keys: Keys, until_rest: Callable[[], Any]
) -> None:
    fleet.start_ours()
    await fleet.add_theirs(0, COUNT)
    await until_rest()
    check(fleet, redis, keys, COUNT)


async def test_our_jobs_on_their_workers(
    fleet: Fleet, redis: redis_py.Redis, keys: Keys, until_rest: Callable[[], Any]
) -> None:
    fleet.start_theirs()
    await fleet.add_ours(0, COUNT)
    await until_rest()
    check(fleet, redis, keys, COUNT)


async def test_their_worker_that_we_sweep_away_goes_on(
    fleet: Fleet, redis: redis_py.Redis, keys: Keys, until_rest: Callable[[], Any]
) -> None:
    """One that was idle for long: deleted in the middle of its read, it gets jobs all the same."""
    fleet.start_theirs()
    async with asyncio.timeout(30):
        while not (redis.exists(keys.stream) and redis.xinfo_groups(keys.stream)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        sweep = redis.register_script(settling.SWEEP.source)
        while not sweep(keys=[keys.stream, keys.paused], args=[0, 1000]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await fleet.add_ours(0, 100)
    await until_rest()
    check(fleet, redis, keys, 100)


@pytest.mark.parametrize("count", [COUNT, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.timeout(240)
async def test_both_kinds_at_once(
    fleet: Fleet, redis: redis_py.Redis, keys: Keys, until_rest: Callable[[], Any], count: int
) -> None:
    fleet.start_ours()
    fleet.start_theirs()
    half = count // 2
    await asyncio.gather(fleet.add_ours(0, half), fleet.add_theirs(half, half))
    await until_rest()
    check(fleet, redis, keys, count)
    assert fleet.done_here, "ours ran some"
    assert fleet.done_there(), "theirs ran some"
