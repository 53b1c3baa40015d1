"""What a worker reads ahead of its slots, and when it lets others have that."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job
from chasqui.consuming.appetite import Appetite
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.proxy import Fault, Proxy
from tests.servers import Server

Start = Callable[..., Running]
#: Longer than any test: nothing comes back by itself.
LEASE_MS = 300_000
#: So many that a worker knows how quick they are.
QUICK = 3000


class Stall:
    """A worker of one slot: quick jobs, then one that does not end, then others behind it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.runs: Counter[int] = Counter()

    async def handler(self, job: Job) -> None:
        self.runs[job.data] += 1
        if job.name == "long":
            self.begun.set()
            await self.gate.wait()

    async def add(self, queue: Queue, *, behind: int) -> int:
        """Add them all; how many there are."""
        names = ["quick"] * QUICK + ["long"] + ["quick"] * behind
        await queue.add_bulk([{"name": name, "data": n} for n, name in enumerate(names)])
        return len(names)

    async def begins(self, start: Start, **options: Any) -> Running:
        """The worker, when the long one runs and others wait behind it."""
        running = start(self.handler, concurrency=1, claim_min_idle_ms=LEASE_MS, **options)
        await running.fact(self.begun.wait())

        async def some_wait() -> bool:
            health = running.worker.health()
            return health is not None and health.prefetched > 0

        await until(some_wait, "some were read ahead")
        return running


async def test_what_waits_behind_a_long_run_is_run_by_an_idle_worker(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    stall = Stall()
    count = await stall.add(queue, behind=10)
    busy = await stall.begins(start)
    idle = start(stall.handler, claim_min_idle_ms=LEASE_MS)
    await idle.completed(10)
    ((_, owner, _, deliveries),) = await redis("XPENDING", keys.stream, "default", "-", "+", 10)
    assert owner.decode() == busy.worker.consumer_id
    assert deliveries == 1
    assert busy.metrics.total_read <= count, "what went back was not read again"
    stall.gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert stall.runs == Counter(range(count)), "each ran once"


@pytest.mark.fault(14)
async def test_what_went_back_costs_no_delivery_and_is_run_by_the_same_worker_when_it_can(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    stall = Stall()
    count = await stall.add(queue, behind=10)
    busy = await stall.begins(start, max_deliveries=1)

    async def went_back() -> bool:
        pending = await redis("XPENDING", keys.stream, "default", "-", "+", 20)
        free = [one for one in pending if one[2] >= 864_000_000]
        assert {one[3] for one in free} <= {0}
        return len(free) == len(pending) - 1 > 0

    await until(went_back, "all but the long one are free")
    stall.gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert stall.runs == Counter(range(count))
    assert busy.metrics.dlq_count() == 0


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.GARBAGE])
async def test_a_link_that_breaks_while_entries_go_back_loses_none(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis: Redis,
    keys: Keys,
    fault: Fault,
) -> None:
    proxy = make_proxy(server.url)
    stall = Stall()
    count = await stall.add(queue, behind=10)
    proxy.fail(fault, "EVALSHA", holding=settling.RELEASE.sha)
    await stall.begins(lambda *args, **options: start_at(proxy.url, *args, **options))
    await until(lambda: _has_struck(proxy), "the link broke")
    stall.gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert stall.runs == Counter(range(count))


@pytest.mark.fault(26)
async def test_what_waits_goes_back_though_its_consumer_was_deleted(
    queue: Queue, start: Start, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, is_deleted = Appetite.excess, False
    monkeypatch.setattr(Appetite, "excess", lambda self: judge(self) if is_deleted else 0)
    stall = Stall()
    count = await stall.add(queue, behind=10)
    busy = await stall.begins(start)
    await redis("XGROUP", "DELCONSUMER", keys.stream, "default", busy.worker.consumer_id)
    is_deleted = True

    async def went_back() -> bool:
        return bool((await redis("XPENDING", keys.stream, "default"))[0])

    await until(went_back, "they are pending again")
    stall.gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert stall.runs == Counter(range(count)), "each ran once"


async def test_slow_handlers_read_nothing_ahead(
    queue: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in hand stays there in this test: so what others get was never read."""
    monkeypatch.setattr(Appetite, "excess", lambda self: 0)
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await gate.wait()

    async def quick(job: Job) -> None:
        pass

    await queue.add_bulk([{"name": "n", "data": i} for i in range(50)])
    slow = start(handler, concurrency=2, claim_min_idle_ms=LEASE_MS)

    async def both_run() -> bool:
        health = slow.worker.health()
        return health is not None and health.running == 2

    await until(both_run, "its slots are busy")
    other = start(quick, claim_min_idle_ms=LEASE_MS)
    await other.completed(48)
    gate.set()
    await slow.completed(2)


async def test_no_job_waits_for_a_thread_where_another_worker_has_one(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    gate, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def handler(job: Job) -> None:
        if job.name == "long":
            loop.call_soon_threadsafe(begun.set)
            gate.wait(60)

    await queue.add_bulk([{"name": name, "data": None} for name in ("long", *["short"] * 10)])
    busy = start(handler, threads=1, claim_min_idle_ms=LEASE_MS)
    try:
        await busy.fact(begun.wait())
        await start(handler, threads=1, claim_min_idle_ms=LEASE_MS).completed(10)
    finally:
        gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")


async def test_without_prefetch_nothing_is_read_but_for_slots(queue: Queue, start: Start) -> None:
    most = 0

    async def handler(job: Job) -> None:
        nonlocal most
        health = running.worker.health()
        assert health is not None
        most = max(most, health.running + health.prefetched)

    await queue.add_bulk([{"name": "n", "data": i} for i in range(1000)])
    running = start(handler, concurrency=4, prefetch=0)
    await running.completed(1000)
    assert 1 <= most <= 4


@pytest.mark.fault(46)
async def test_large_entries_behind_small_ones_do_not_fill_the_memory(
    queue: Queue, start: Start, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has learned to ask for many at once; of what then comes it keeps what it may."""
    small, large, large_bytes, most_bytes = 20_000, 200, 100_000, 1_000_000
    for module in ("reader", "appetite"):
        monkeypatch.setattr(f"chasqui.consuming.{module}.PREFETCH_BYTES", most_bytes)
    runs: Counter[int] = Counter()
    held_bytes = 0

    async def handler(job: Job) -> None:
        nonlocal held_bytes
        runs[job.data[0]] += 1
        if job.name == "large":
            engine = running.worker._engine
            assert engine is not None
            waiting = sum(len(entry.envelope or b"") for entry in engine.held.waiting)
            held_bytes = max(held_bytes, waiting)

    await queue.add_bulk([{"name": "small", "data": [n]} for n in range(small)])
    data = b"x" * large_bytes
    numbers = range(small, small + large)
    await queue.add_bulk([{"name": "large", "data": [n, data]} for n in numbers])
    running = start(handler, claim_min_idle_ms=LEASE_MS, concurrency=2, max_deliveries=1)
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == Counter(range(small + large))
    assert held_bytes <= 2 * (most_bytes + large_bytes)
    assert running.metrics.dlq_count() == 0


async def _has_struck(proxy: Proxy) -> bool:
    return not proxy._rules
