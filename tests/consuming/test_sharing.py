"""Queues that share slots, on real servers: their order, their shares, and that nothing is lost."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from chasqui import Job, Queue, Worker, WorkerGroup
from chasqui.consuming.reader import Reader
from chasqui.consuming.shared_slots import Mode, SharedSlots
from chasqui.consuming.sharing import SharedReader
from tests.consuming.conftest import WAIT_S, until
from tests.servers import RemoteServer, Server

#: Longer than any test: nothing comes back by itself.
LEASE_MS = 300_000


class Shop:
    """Two queues and a group of workers that share slots. Jobs run until they are let go."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.names = {"urgent": f"{name}-urgent", "default": f"{name}-default"}
        self.starts: list[str] = []
        self.runs: Counter[Any] = Counter()
        self.held: list[asyncio.Event] = []
        self.are_held = True
        self.tasks: list[asyncio.Task[None]] = []
        self.groups: list[WorkerGroup] = []

    def group(
        self,
        slots: int,
        weights: tuple[int, int] = (1, 1),
        mode: Mode = "strict",
        **options: Any,
    ) -> WorkerGroup:
        shared = SharedSlots(slots, dict(zip(self.names.values(), weights, strict=True)), mode=mode)
        options = {"claim_min_idle_ms": LEASE_MS, "shutdown_deadline_s": 20, **options}
        workers = [
            Worker(name, self.handler(short, options.get("batch")), redis_url=self.url, **options)
            for short, name in self.names.items()
        ]
        self.groups.append(WorkerGroup(workers, name="shop", slots=shared))
        self.tasks.append(asyncio.ensure_future(self.groups[-1].run()))
        return self.groups[-1]

    def handler(self, short: str, batch: int | None) -> Callable[[Any], Any]:
        async def run(job: Job) -> None:
            self.starts.append(short)
            self.runs[short, job.data] += 1
            if self.are_held:
                self.held.append(gate := asyncio.Event())
                await gate.wait()

        async def run_all(jobs: list[Job]) -> None:
            for job in jobs:
                self.runs[short, job.data] += 1
            self.starts.append(short)
            await asyncio.sleep(0)

        return run if batch is None else run_all

    async def add(self, short: str, count: int) -> None:
        async with Queue(self.names[short], redis_url=self.url) as queue:
            await queue.add_bulk([{"name": "job", "data": n} for n in range(count)])

    async def counts(self, short: str) -> tuple[int, int]:
        """How many jobs nobody has, and how many somebody has."""
        async with Queue(self.names[short], redis_url=self.url) as queue:
            counts = await queue.counts()
            return counts.waiting, counts.pending

    async def started(self, count: int) -> None:
        async def have() -> bool:
            return len(self.starts) >= count

        await until(have, f"{count} jobs have started")

    async def holds_some(self) -> bool:
        """Whether entries wait in the process."""
        health = self.groups[0].health()
        return health is not None and health.prefetched > 0

    def let_go(self) -> None:
        """Let the oldest run end."""
        self.held.pop(0).set()

    def let_all_go(self) -> None:
        self.are_held = False
        while self.held:
            self.let_go()

    async def stop(self) -> None:
        self.let_all_go()
        for group in self.groups:
            await group.close()
        await asyncio.wait_for(asyncio.gather(*self.tasks), WAIT_S)


@pytest.fixture
async def shop(server: Server | RemoteServer, queue_name: str) -> AsyncIterator[Shop]:
    shop = Shop(server.url, queue_name)
    yield shop
    await shop.stop()


async def test_an_urgent_job_starts_next(shop: Shop) -> None:
    await shop.add("default", 20)
    shop.group(2)
    await shop.started(2)
    await shop.add("urgent", 1)
    shop.let_go()
    await shop.started(3)
    assert shop.starts == ["default", "default", "urgent"]
    shop.let_go()
    await shop.started(4)
    assert shop.starts[3:] == ["default"]


async def test_an_urgent_job_starts_next_though_it_went_back_meanwhile(shop: Shop) -> None:
    group = shop.group(2, read_block_ms=60_000)

    async def all_read() -> bool:
        engines = [worker._engine for worker in group.workers]
        return all(
            engine is not None
            and cast(SharedReader, engine._reader)._room
            and engine._reader._blocks
            for engine in engines
        )

    await until(all_read, "reads that wait for entries are under way")
    await shop.add("default", 20)
    await shop.started(2)
    await shop.add("urgent", 3)
    await until(shop.holds_some, "the read that was under way brought some")

    async def are_back() -> bool:
        return not await shop.holds_some()

    await until(are_back, "others may have them")
    for n in range(4):
        shop.let_go()
        await shop.started(3 + n)
    assert shop.starts[2:] == ["urgent", "urgent", "urgent", "default"]


@pytest.mark.parametrize("are_held", [True, False], ids=["slow", "quick"])
async def test_starts_are_shared_by_weight(shop: Shop, are_held: bool) -> None:
    for short in shop.names:
        await shop.add(short, 1000)
    shop.are_held = are_held
    shop.group(4, (3, 1), "weight")
    if are_held:
        for n in range(400):
            await shop.started(4 + n)
            shop.let_go()
    await shop.started(400)
    count = Counter(shop.starts[:400])
    assert abs(count["urgent"] - 300) <= 4
    assert abs(count["default"] - 100) <= 4


async def test_a_slot_that_one_queue_frees_wakes_the_other(shop: Shop) -> None:
    await shop.add("urgent", 1)
    shop.group(1, read_block_ms=60_000)
    await shop.started(1)
    await shop.add("default", 1)
    shop.let_go()
    await shop.started(2)
    assert shop.starts == ["urgent", "default"]
    await shop.add("urgent", 1)
    shop.let_go()
    await shop.started(3)


@pytest.mark.parametrize("mode", ["strict", "weight"])
@pytest.mark.parametrize("batch", [None, 7], ids=["single", "batch"])
async def test_all_jobs_of_all_queues_run_once(shop: Shop, mode: Mode, batch: int | None) -> None:
    shop.are_held = False
    for short in shop.names:
        await shop.add(short, 500)
    for _ in range(2):
        shop.group(3, (2, 1), mode, batch=batch)
    for _ in range(5):
        for short in shop.names:
            await shop.add(short, 100)

    async def are_done() -> bool:
        return all([await shop.counts(short) == (0, 0) for short in shop.names])

    await until(are_done, "all is done")
    await shop.stop()
    assert sum(shop.runs.values()) == 2000
    assert set(shop.runs) == {(short, n) for short in shop.names for n in range(500)}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each queue was read."""
    reads: Counter[str] = Counter()
    read = Reader._read

    async def counted(self: Reader, room: int, **options: Any) -> int:
        reads[self._keys.queue] += 1
        return await read(self, room, **options)

    monkeypatch.setattr(Reader, "_read", counted)
    return reads


async def test_idle_queues_wait_at_the_server(shop: Shop, reads: Counter[str]) -> None:
    shop.are_held = False
    shop.group(2)
    for short in shop.names:
        await shop.add(short, 1)
    await shop.started(2)
    await asyncio.sleep(2.0)
    assert reads.total() <= 12, "and do not hand their slots round"


async def test_a_queue_without_slots_does_not_read_and_give_back_for_ever(
    shop: Shop, reads: Counter[str]
) -> None:
    await shop.add("urgent", 50)
    shop.group(2)
    await shop.started(2)
    before = reads.total()
    await shop.add("default", 50)
    await asyncio.sleep(2.0)
    assert reads.total() - before <= 3
    assert await shop.counts("urgent") == (48, 2), "they are there for others"
    assert (await shop.counts("default"))[0] >= 48


async def test_no_queue_keeps_slots_while_it_is_paused(shop: Shop) -> None:
    async with Queue(shop.names["urgent"], redis_url=shop.url) as queue:
        await queue.add("job", 1)
        await queue.pause()
        shop.are_held = False
        await shop.add("default", 100)
        shop.group(1)
        await shop.started(100)
        assert set(shop.starts) == {"default"}
        await queue.resume()
        await shop.started(101)


async def test_the_drain_gives_back_what_has_not_begun(shop: Shop) -> None:
    for short in shop.names:
        await shop.add(short, 10)
    group = shop.group(2)
    await shop.started(2)
    await group.close()
    shop.let_all_go()
    await shop.stop()
    assert len(shop.starts) == 2
    for short in shop.names:
        assert await shop.counts(short) == (10 - shop.starts.count(short), 0)


async def test_a_queue_that_the_slots_do_not_name_is_refused(shop: Shop) -> None:
    async def handler(job: Job) -> None: ...

    with pytest.raises(ValueError, match="do not name queue 'urgnt'"):
        WorkerGroup(
            [Worker("urgnt", handler, redis_url=shop.url)],
            name="shop",
            slots=SharedSlots(2, ["urgent"]),
        )
