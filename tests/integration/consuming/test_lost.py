"""Entries that are lost while they are in hand, or that the server forgot: none goes without having
been done, and none runs twice at once."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from chasqui import Job
from chasqui.keys import Keys
from chasqui.metrics import JobOutcome
from chasqui.queue import Queue
from tests.integration.consuming.conftest import Redis, Running, at_rest, envelope, until
from tests.proxy import Proxy
from tests.servers import Server

Start = Callable[..., Running]
AddRaw = Callable[..., Awaitable[bytes]]
LEASE_MS = 400
#: Longer than any test waits.
LONG_MS = 120_000


# ── Handlers that are told ──────────────────────────────────────────────────────────────────────


@pytest.mark.fault(15)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "thread", "batch"])
@pytest.mark.parametrize("way", ["return", "raise"])
async def test_a_job_whose_handler_was_told_that_it_may_be_lost_runs_again(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis: Redis,
    keys: Keys,
    kind: str,
    way: str,
) -> None:
    """The server is out of reach for longer than the lease, and nobody is there to take the job
    over: its handler stops, for somebody may have."""
    begun = threading.Event()
    runs: list[str] = []

    def plain(job: Job) -> None:
        if begun.is_set():
            runs.append("done")
            return
        begun.set()
        while not job.lost:
            time.sleep(0.01)
        runs.append("stopped")
        if way == "raise":
            job.raise_if_lost()

    async def handler(job: Job) -> None:
        if not begun.is_set():
            begun.set()
            while not job.lost:  # noqa: ASYNC110 - as handlers do
                await asyncio.sleep(0.01)
            begun.clear()
        plain(job)

    async def batch(jobs: list[Job]) -> None:
        await handler(jobs[0])

    proxy = make_proxy(server.url)
    chosen = {"async": handler, "thread": plain, "batch": batch}[kind]
    options = {"batch": 1} if kind == "batch" else {}
    running = start_at(proxy.url, chosen, claim_min_idle_ms=LEASE_MS, **options)
    await queue.add("n", None)
    await running.fact(asyncio.to_thread(begun.wait))
    proxy.stall()
    await running.next(JobOutcome)
    proxy.resume()
    await until(lambda: at_rest(redis, keys), "it is done")
    assert runs == ["stopped", "done"]
    assert await redis("XLEN", keys.dlq) == 0


# ── The group goes ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(["XGROUP", "DESTROY"], marks=pytest.mark.fault(25)),
        pytest.param(["DEL"], marks=pytest.mark.fault(22)),
    ],
    ids=lambda words: words[-1].lower(),
)
async def test_a_group_that_goes_while_there_is_no_room_for_a_read_is_made_again(
    queue: Queue, start: Start, redis: Redis, keys: Keys, harm: list[str]
) -> None:
    """All slots are taken and enough is waiting, so nobody reads; then the leases cannot be renewed
    any more, and what waits may not begin without."""
    begun, gate = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.data)
        begun.set()
        await gate.wait()

    await queue.add_bulk([{"name": "n", "data": f"before {i}"} for i in range(10)])
    running = start(handler, claim_min_idle_ms=LEASE_MS, concurrency=1, read_count=10)
    await running.fact(begun.wait())
    engine = running.worker._engine
    assert engine is not None
    holdings = engine.holdings
    assert len(holdings.waiting) > holdings.low_water
    await redis(*harm, keys.stream, *["default"] * (harm != ["DEL"]))
    await queue.add("n", "after")

    async def is_known() -> bool:
        return bool(holdings.lost) or not holdings.is_alive

    await until(is_known, "a beat met no group")
    gate.set()

    async def is_run() -> bool:
        return "after" in ran

    await until(is_run, "what was added since then runs")
    await until(lambda: at_rest(redis, keys), "all is done")
    if harm != ["DEL"]:
        assert {f"before {i}" for i in range(10)} < set(ran)


# ── The server forgets ──────────────────────────────────────────────────────────────────────────

#: As after a failover to a replica that never heard of the deliveries.
FORGET = """
for _, held in ipairs(redis.call('XPENDING', KEYS[1], 'default', '-', '+', 1000)) do
  redis.call('XACK', KEYS[1], 'default', held[1])
end
redis.call('XGROUP', 'SETID', KEYS[1], 'default', '0')
"""


async def delivered_again(redis: Redis, keys: Keys) -> None:
    async def is_pending() -> bool:
        return bool((await redis("XPENDING", keys.stream, "default"))[0])

    await until(is_pending, "it is delivered once more")


@pytest.mark.fault(10)
@pytest.mark.parametrize("attempt", [0, 1])
async def test_a_delivery_that_the_server_forgot_is_not_run_beside_itself(
    start: Start, add_raw: AddRaw, redis: Redis, keys: Keys, attempt: int
) -> None:
    begun, next_begun, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runs: Counter[str] = Counter()

    async def handler(job: Job) -> None:
        runs[job.id] += 1
        (begun if job.id == "forgotten" else next_begun).set()
        await gate.wait()

    running = start(handler, claim_min_idle_ms=LONG_MS, read_block_ms=20, concurrency=3)
    await add_raw(envelope(job_id="forgotten", attempt=attempt))
    await running.fact(begun.wait())
    await redis("EVAL", FORGET, 1, keys.stream)
    await delivered_again(redis, keys)
    await add_raw(envelope(job_id="next"))
    await running.fact(next_begun.wait())
    gate.set()
    await running.completed(2)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert runs == {"forgotten": 1, "next": 1}


@pytest.mark.fault(10)
async def test_a_lost_run_is_not_acknowledged_though_its_entry_comes_as_new(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """Its handler knows that it is lost and stops; meanwhile a free slot could take the copy."""
    begun, told, next_begun, gate = (asyncio.Event() for _ in range(4))
    runs: list[str] = []

    async def handler(job: Job) -> None:
        if job.data == "next":
            next_begun.set()
        elif begun.is_set():
            runs.append("done")
        else:
            begun.set()
            while not job.lost:  # noqa: ASYNC110 - as handlers do
                await asyncio.sleep(0.01)
            told.set()
            await gate.wait()
            runs.append("stopped")

    running = start(handler, claim_min_idle_ms=LONG_MS, read_block_ms=20, concurrency=3)
    await queue.add("n", "forgotten")
    await running.fact(begun.wait())
    ((entry_id, *_),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
    await redis("XACK", keys.stream, "default", entry_id)
    engine = running.worker._engine
    assert engine is not None
    engine._heartbeat.beat_now()
    await running.fact(told.wait())
    await redis("EVAL", FORGET, 1, keys.stream)
    await delivered_again(redis, keys)
    await queue.add("n", "next")
    await running.fact(next_begun.wait())
    assert not runs
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == ["stopped", "done"]
