"""Whoever waits for a job is told that it ended: over lost links too, and by its owner only."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job, JobFailedError, UnrecoverableError
from chasqui.consuming import acker
from chasqui.consuming.moves import MAX_MOVES
from chasqui.consuming.relocator import Moves
from chasqui.managing.retention import TRIM_ENTRIES
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from tests.consuming.conftest import Redis, Running, at_rest, told_done, until
from tests.proxy import Fault, Proxy
from tests.servers import Server

Start = Callable[..., Running]
#: Longer than any test: whoever is woken by polling is not woken at all.
NEVER_S = 1000.0


async def void(job: Job) -> None:
    pass


# ── Over lost links ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
async def test_an_end_that_was_lost_with_its_link_is_told_again(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    fault: Fault,
) -> None:
    """The acknowledgement before it has arrived: nobody runs the job again, to tell of it then."""
    proxy = make_proxy(server.url)
    proxy.fail(fault, "XADD", holding=b"completed")
    start_at(proxy.url, void)
    job = await queue.add("n", 1)
    assert await job.result(poll_interval=NEVER_S) is None
    assert not proxy.disarm(), "it happened"


async def test_an_end_while_there_is_no_link_is_told_later(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
) -> None:
    proxy = make_proxy(server.url)
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await gate.wait()

    running = start_at(proxy.url, handler)
    job = await queue.add("n", 1)
    await running.fact(begun.wait())
    proxy.is_refusing = True
    proxy.cut()
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.open_links == 0)
    gate.set()
    await running.ended(1)
    proxy.is_refusing = False
    assert await job.result(poll_interval=NEVER_S) is None


async def test_a_death_whose_reply_was_lost_is_told(
    server: Server,
    queue: Queue,
    redis: Redis,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
) -> None:
    async def handler(job: Job) -> None:
        raise UnrecoverableError("no such address")

    proxy = make_proxy(server.url)
    await redis("SCRIPT", "LOAD", settling.BURY.source)
    proxy.fail(Fault.CUT_AFTER, "EVALSHA", holding=settling.BURY.sha)
    start_at(proxy.url, handler)
    job = await queue.add("n", 1)
    with pytest.raises(JobFailedError, match="no such address"):
        await job.result(poll_interval=NEVER_S)
    assert not proxy.disarm(), "it happened"


# ── By its owner ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(5)
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_run_that_lost_its_job_does_not_tell_that_it_is_done(
    queue: Queue,
    redis: Redis,
    keys: Keys,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    is_stored: bool,
) -> None:
    """Another worker took the job over during the run, and only the server knows of it."""
    assert not await lose_and_tell(queue, redis, keys, start, monkeypatch, is_stored=is_stored)


@pytest.mark.fault(5, control=True)
async def test_without_a_fence_it_tells(
    queue: Queue, redis: Redis, keys: Keys, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acker.Acker, "_fenced", lambda self, batch: self._plain(batch, 10.0))
    monkeypatch.setattr(acker.Acker, "_answered", lambda self, batch, _: self._finished(batch))
    assert await lose_and_tell(queue, redis, keys, start, monkeypatch, is_stored=False)


async def lose_and_tell(
    queue: Queue,
    redis: Redis,
    keys: Keys,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_stored: bool,
) -> Counter[str]:
    """What is told of a job whose run lost it; without a result its lease is in doubt besides."""

    async def handler(job: Job) -> int:
        ((entry_id, *_),) = await redis("XPENDING", keys.stream, DEFAULT_GROUP, "-", "+", 1)
        await redis("XCLAIM", keys.stream, DEFAULT_GROUP, "heir", 0, entry_id)
        return 1

    if not is_stored:
        monkeypatch.setattr(acker.Acker, "_are_ours", lambda self, ids, sure_for_s: False)
    running = start(handler, store_results=is_stored)
    await queue.add("n", 1)
    await running.ended(1)

    async def is_settled() -> bool:
        health = running.worker.health()
        return health is not None and health.acks_waiting == 0

    await until(is_settled, "the server has answered")
    await running.stop()
    if not is_stored:
        assert running.metrics.jobs_completed == 0
    return await told_done(redis, keys)


async def test_ends_that_are_in_doubt_are_told_once_they_are_not(
    queue: Queue, redis: Redis, keys: Keys, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the script, which says the same as the plain way does."""
    monkeypatch.setattr(acker.Acker, "_are_ours", lambda self, ids, sure_for_s: False)
    running = start(void)
    jobs = await queue.add_bulk([{"name": name, "data": 1} for name in ("n", "", "n")])
    for job in jobs:
        assert await job.result(poll_interval=NEVER_S) is None
    await running.completed(3)
    assert await told_done(redis, keys) == Counter(job.id for job in jobs)
    events = [fields for _, fields in await redis("XRANGE", keys.events, "-", "+")]
    done = [dict(zip(one[::2], one[1::2], strict=True)) for one in events if b"completed" in one]
    assert [set(one) for one in done] == [
        {b"e", b"id", b"ts", b"attempt", b"duration_us"} | ({b"n"} if job.name else set())
        for job in jobs
    ]


async def test_a_run_in_doubt_counts_though_another_of_its_batch_was_not_pending_any_more(
    queue: Queue, redis: Redis, keys: Keys, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases were in doubt when the runs ended, and are certain when that is sent."""
    monkeypatch.setattr(acker.Acker, "_are_ours", lambda self, ids, sure_for_s: len(ids) > 1)
    gate, begun = asyncio.Event(), 0

    async def handler(job: Job) -> None:
        nonlocal begun
        begun += 1
        await gate.wait()

    running = start(handler, concurrency=2)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(2)])

    async def both_run() -> bool:
        return begun == 2

    await until(both_run, "both run")
    pending = await redis("XPENDING", keys.stream, DEFAULT_GROUP, "-", "+", 1)
    await redis("XACK", keys.stream, DEFAULT_GROUP, pending[0][0])
    await redis("XDEL", keys.stream, pending[0][0])
    gate.set()
    await running.completed(1)
    await until(lambda: at_rest(redis, keys), "both are gone")


# ── What one script carries ─────────────────────────────────────────────────────────────────────


async def test_results_are_stored_by_size_as_well_as_by_number(
    queue: Queue, redis: Redis, keys: Keys, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is held up by what one script has to take."""
    sizes: list[int] = []
    fenced, size = acker.Acker._fenced, acker.RESULT_BYTES * 2 // 5
    gate, begun = asyncio.Event(), 0

    def weigh(self: acker.Acker, batch: acker.Acks) -> Any:
        request = fenced(self, batch)
        sizes.append(len(request.frame))
        return request

    async def handler(job: Job) -> bytes:
        nonlocal begun
        begun += 1
        await gate.wait()
        return bytes(size)

    monkeypatch.setattr(acker.Acker, "_fenced", weigh)
    running = start(handler, store_results=True)
    jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(9)])

    async def all_run() -> bool:
        return begun == len(jobs)

    await running.fact(until(all_run, "all run"))
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert max(sizes) < acker.RESULT_BYTES
    assert await queue.get_job_result_bulk([job.id for job in jobs]) == [bytes(size)] * 9


async def test_moves_that_wait_for_a_slow_server_are_not_encoded(
    server: Server,
    queue: Queue,
    redis: Redis,
    keys: Keys,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
) -> None:
    begun, gate = 0, asyncio.Event()

    async def handler(job: Job) -> None:
        nonlocal begun
        begun += 1
        await gate.wait()
        raise UnrecoverableError

    proxy = make_proxy(server.url)
    running = start_at(proxy.url, handler)
    for _ in range(40):
        await queue.add("n", bytes(1_000_000))

    async def all_run() -> bool:
        return begun == 40

    await running.fact(until(all_run, "all run"))
    proxy.stall()
    gate.set()
    await running.ended(40)
    engine = running.worker._engine
    assert engine is not None
    batches: set[Moves] = engine._relocator._inflight

    async def are_posted() -> bool:
        return len(batches) >= 20 and engine.connection.is_congested

    await until(are_posted, "they are on their way")
    frames = sum(len(batch.request.frame) for batch in batches if batch.request is not None)
    assert frames < 20_000_000
    proxy.resume()

    async def are_buried() -> bool:
        return bool(await redis("XLEN", keys.dlq) == 40)

    await until(are_buried, "all are moved")


async def test_events_of_jobs_that_never_ran_are_trimmed_too(
    start: Start, queue: Queue, redis: Redis, keys: Keys
) -> None:
    await queue.set_events_max_len(100)
    for _ in range(2000):
        await redis("XADD", keys.stream, "*", "d", "no envelope")
    start(lambda job: None)

    async def are_buried() -> bool:
        return bool(await redis("XLEN", keys.dlq) == 2000)

    await until(are_buried, "all are buried")
    assert await redis("XLEN", keys.events) < 100 + 100 + TRIM_ENTRIES + MAX_MOVES
