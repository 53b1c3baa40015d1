"""A job belongs to its worker while that lives, however long and however rudely it runs."""

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Worker, sync
from chasqui._core.entry import Entry
from chasqui.consuming.takeovers import Takeovers
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming.conftest import (
    PAST_LEASE,
    Redis,
    Renewals,
    Running,
    at_rest,
    renew_nothing,
    told_done,
    until,
)
from tests.proxy import Proxy
from tests.servers import Server

Start = Callable[..., Running]
LEASE_MS = 400
LEASE_S = LEASE_MS / 1000
#: Longer than a busy machine keeps a process waiting: nobody may take over what is renewed.
KEPT_MS = 2_000
KEPT_S = KEPT_MS / 1000


class Elsewhere(threading.Thread):
    """A worker with an event loop of its own, in a thread: it reads on while the test's blocks."""

    def __init__(self, queue_name: str, ran: Callable[[Any], None], **options: Any) -> None:
        super().__init__(name="elsewhere", daemon=True)
        self._queue_name, self._ran, self._options = queue_name, ran, options
        self._loop = asyncio.new_event_loop()
        self._is_told = asyncio.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work())

    def stop(self) -> None:
        """Also if it has never been started."""
        if self.ident is None:
            self._loop.close()
        else:
            self._loop.call_soon_threadsafe(self._is_told.set)
            self.join()

    async def _work(self) -> None:
        async def handler(job: Job) -> None:
            self._ran(job.data)

        worker = Worker(self._queue_name, handler, **self._options)
        working = asyncio.ensure_future(worker.run())
        await self._is_told.wait()
        await worker.close()
        await working


@pytest.mark.fault(50)
@pytest.mark.slow
async def test_long_runs_run_once_with_two_workers(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    runs: Counter[int] = Counter()

    async def handler(job: Job) -> None:
        runs[job.data] += 1
        await asyncio.sleep(KEPT_S * 1.5)
        assert not job.lost
        job.raise_if_lost()

    options = {"claim_min_idle_ms": KEPT_MS, "read_block_ms": 100, "concurrency": 2}
    one, other = start(handler, **options), start(handler, **options)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(6)])
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == Counter(range(6))
    assert one.metrics.jobs_failed == other.metrics.jobs_failed == 0
    assert one.metrics.total_reclaimed == other.metrics.total_reclaimed == 0


@pytest.mark.slow
@pytest.mark.both_loops
@pytest.mark.parametrize(
    "is_renewed",
    [
        pytest.param(True, marks=pytest.mark.fault(50)),
        pytest.param(False, marks=pytest.mark.fault(50, control=True)),
    ],
)
async def test_a_blocked_loop_keeps_its_jobs(
    server: Server,
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    is_renewed: bool,
) -> None:
    """Those that run and those that wait, though a rival takes over what lapses. Without the
    heartbeat it gets them, and they run twice."""
    monkeypatch.setattr("chasqui.consuming.takeovers.LOOK_S", KEPT_S / 4)
    if not is_renewed:
        renew_nothing(monkeypatch)
    runs: list[int] = []
    options = {"claim_min_idle_ms": KEPT_MS, "read_block_ms": 50, "concurrency": 2}
    rival = Elsewhere(queue.name, runs.append, redis_url=server.url, **options)

    async def handler(job: Job) -> None:
        runs.append(job.data)
        if job.data != 0:
            return
        rival.start()
        with redis_py.Redis.from_url(server.url) as client:
            renewals = Renewals(client, keys)
            while len(runs) == 1:
                time.sleep(0.01)  # noqa: ASYNC251 - the very point
            while runs.count(0) == 1 and renewals.look() < PAST_LEASE:
                time.sleep(0.01)  # noqa: ASYNC251

    await queue.add_bulk([{"name": "n", "data": i} for i in range(10)])
    running = start(handler, **options)
    try:
        await until(lambda: at_rest(redis, keys), "all is done")
    finally:
        await asyncio.to_thread(rival.stop)
    with nullcontext() if is_renewed else pytest.raises(AssertionError, match="some ran twice"):
        assert Counter(runs) == Counter(range(10)), "some ran twice"
    assert running.metrics.total_reclaimed == 0


@pytest.mark.slow
async def test_what_was_taken_from_the_socket_does_not_run_here(
    server: Server, queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """A job is delivered to a worker whose loop is blocked, and a rival does it meanwhile."""
    ran: list[str] = []

    def rob() -> None:
        with (
            redis_py.Redis.from_url(server.url) as client,
            sync.Queue(queue.name, redis_url=server.url) as other,
        ):
            other.add("n", "robbed")
            while len(pending := client.xpending_range(keys.stream, "default", "-", "+", 2)) < 2:
                pass
            stolen = pending[-1]["message_id"]
            client.xclaim(keys.stream, "default", "rival", 0, [stolen])
            client.xack(keys.stream, "default", stolen)
            client.xdel(keys.stream, stolen)

    async def reads_on() -> bool:
        listed = (await redis("CLIENT", "LIST")).decode().splitlines()
        return any("cmd=xreadgroup" in one and "flags=b" in one for one in listed)

    async def handler(job: Job) -> None:
        ran.append(job.data)
        if job.data == "block":
            await until(reads_on, "the next read is out")
            thief = threading.Thread(target=rob)
            thief.start()
            time.sleep(LEASE_S * 2)  # noqa: ASYNC251 - the very point
            thief.join()

    running = start(handler, claim_min_idle_ms=LEASE_MS, read_block_ms=5000, concurrency=2)
    await queue.add("n", "block")
    await running.completed(1)
    await queue.add("n", "later")
    await running.completed(2)
    assert ran == ["block", "later"]
    await until(lambda: at_rest(redis, keys), "all is done")


@pytest.mark.slow
async def test_entries_in_hand_that_come_back_are_not_run_again(
    queue: Queue, start: Start, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat renews nothing and says it did; the worker's own read takes its running entry
    over from itself."""

    async def take_over(self: Takeovers, most: int) -> list[Entry | None]:
        """As if others had something in hand too, where reads cannot claim."""
        return await self._take_over(most, 0.1)

    renew_nothing(monkeypatch)
    monkeypatch.setattr(Takeovers, "_look_after_others", take_over)
    gate = asyncio.Event()
    runs: Counter[str] = Counter()

    async def handler(job: Job) -> None:
        runs[job.id] += 1
        await gate.wait()

    running = start(handler, claim_min_idle_ms=100, read_block_ms=20, read_count=10)
    await queue.add("n", None)

    async def came_back() -> bool:
        return running.metrics.total_reclaimed >= 2

    await until(came_back, "the entry was delivered again, twice")
    gate.set()
    await running.completed(1)
    await until(lambda: at_rest(redis, keys), "it is acknowledged")
    assert set(runs.values()) == {1}


def keep_the_gil(job: Job) -> None:
    """As a slow regular expression does, or an extension module that computes."""
    ctypes.PyDLL(None).usleep(int(LEASE_S * 4e6))


async def keep_the_gil_on_the_loop(job: Job) -> None:
    keep_the_gil(job)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["valkey-9"], indirect=True)
@pytest.mark.parametrize("handler", [keep_the_gil, keep_the_gil_on_the_loop])
async def test_a_handler_that_keeps_the_gil_past_the_lease_is_told_of(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture, handler: Any
) -> None:
    """Unless that was in the middle of a beat: so there are a few of them."""
    start(handler, claim_min_idle_ms=LEASE_MS, concurrency=1)
    await queue.add_bulk([{"name": "rude", "data": i} for i in range(5)])

    async def is_told() -> bool:
        return "lapsed while this ran: 'rude'. No other thread could run for" in caplog.text

    await until(is_told, "the heartbeat has told why it was late")


@pytest.mark.slow
async def test_a_job_that_keeps_the_gil_does_not_go_from_worker_to_worker_for_ever(
    server: Server, queue: Queue, redis: Redis, keys: Keys, dead: Any, tmp_path: Path
) -> None:
    """Each time is a delivery, and those are counted."""
    program = (
        "from chasqui import Worker\n"
        "from tests.consuming.test_leases import LEASE_MS, keep_the_gil\n"
        "def handler(job):\n"
        "    with open('runs', 'a') as runs:\n"
        "        runs.write('.')\n"
        "    keep_the_gil(job)\n"
        "    job.raise_if_lost()\n"
        "def make():\n"
        "    options = {'claim_min_idle_ms': LEASE_MS, 'read_block_ms': 100}\n"
        f"    return Worker({queue.name!r}, handler, max_deliveries=3, **options)\n"
    )
    (tmp_path / "rude.py").write_text(program)
    root = Path(__file__).parents[2]
    await queue.add("n", None)
    workers = [
        await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "chasqui", "worker", "rude:make"],
            cwd=tmp_path,
            env=os.environ | {"CHASQUI_URL": server.url, "PYTHONPATH": str(root)},
        )
        for _ in range(2)
    ]

    async def is_over() -> bool:
        return bool(await redis("XLEN", keys.dlq)) or (
            bool(await redis("EXISTS", keys.stream)) and await at_rest(redis, keys)
        )

    try:
        await until(is_over, "the job is buried, or one of them was left alone with it")
    finally:
        for worker in workers:
            worker.kill()
            await worker.wait()
    assert 1 <= len((tmp_path / "runs").read_text()) <= 3
    for buried in await dead():
        assert buried[b"detail"] == b"worker lost"


@pytest.mark.fault(15)
@pytest.mark.slow
@pytest.mark.usefixtures("hoarding")
async def test_nothing_starts_while_leases_may_have_lapsed(
    server: Server,
    queue: Queue,
    queue_name: str,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    start: Start,
    redis: Redis,
    keys: Keys,
) -> None:
    """Cut off for longer than the lease with entries in hand: a rival runs those, we do not."""
    runs: Counter[int] = Counter()
    gate = asyncio.Event()
    begun = asyncio.Event()

    async def handler(job: Job) -> None:
        runs[job.data] += 1
        begun.set()
        if job.data == 0:
            await gate.wait()

    proxy = make_proxy(server.url)
    cut_off = start_at(proxy.url, handler, claim_min_idle_ms=LEASE_MS, concurrency=1, read_count=5)
    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(5)])
    await cut_off.fact(begun.wait())

    async def all_in_hand() -> bool:
        return bool((await redis("XPENDING", keys.stream, "default"))[0] == 5)

    await until(all_in_hand, "all five are delivered")
    proxy.stall()
    rival = start(handler, claim_min_idle_ms=LEASE_MS, read_block_ms=50)
    await rival.completed(4)

    async def first_runs_too() -> bool:
        return runs[0] == 2

    await until(first_runs_too, "the rival runs the first as well")
    assert runs == Counter({0: 2, 1: 1, 2: 1, 3: 1, 4: 1})
    gate.set()
    await rival.completed(5)
    await cut_off.ended(1)
    assert cut_off.metrics.jobs_completed == 0, "who it belongs to is not known"
    proxy.resume()
    last = await queue.add("n", 5)
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == Counter({0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    assert await last.result() is None
    await cut_off.stop()
    await rival.stop()
    assert await told_done(redis, keys) == Counter(job.id for job in [*jobs, last])
    assert rival.metrics.jobs_completed + cut_off.metrics.jobs_completed == 6
