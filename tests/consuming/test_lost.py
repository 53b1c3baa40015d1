"""Entries that are lost while they are in hand, or that the server forgot: none goes without having
been done, and none runs twice at once."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Retry
from chasqui.consuming.acker import Acks
from chasqui.consuming.failures import Failures
from chasqui.consuming.relocator import Moves
from chasqui.metrics import JobOutcome
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from chasqui.transport.request import Script
from tests.consuming.conftest import Redis, Running, at_rest, envelope, until
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
    await running.ended(1)
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
@pytest.mark.usefixtures("hoarding")
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
    held = engine.held
    assert len(held.waiting) > held.low_water
    await redis(*harm, keys.stream, *["default"] * (harm != ["DEL"]))
    await queue.add("n", "after")

    async def is_known() -> bool:
        return bool(held.lost) or not held.is_alive

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


#: The server is back without its tail, its clock behind: another job gets the id of the first.
REUSE = """
local id = redis.call('XRANGE', KEYS[1], '-', '+')[1][1]
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[1], id, 'd', ARGV[1])
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0')
"""


@pytest.mark.fault(10)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.usefixtures("hoarding")
async def test_another_job_under_the_id_of_one_in_hand_is_run(
    start: Start, add_raw: AddRaw, redis: Redis, keys: Keys, slots: int
) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    runs: list[str] = []

    async def handler(job: Job) -> None:
        runs.append(job.id)
        begun.set()
        if job.id == "first":
            await gate.wait()

    options = {"claim_min_idle_ms": LONG_MS, "read_block_ms": 20, "read_count": 10}
    running = start(handler, concurrency=slots, **options)
    await add_raw(envelope(job_id="first"))
    await running.fact(begun.wait())
    await redis("EVAL", REUSE, 1, keys.stream, envelope(job_id="second"), DEFAULT_GROUP)
    engine = running.worker._engine
    assert engine is not None

    async def is_seen() -> bool:
        return bool(engine.held.lost)

    await until(is_seen, "the worker knows that there is another job under this id")
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert runs == ["first", "second"]


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
    await redis("XCLAIM", keys.stream, "default", "rival", 0, entry_id)
    engine = running.worker._engine
    assert engine is not None
    engine.held.must_renew.set()
    await running.fact(told.wait())
    await redis("EVAL", FORGET, 1, keys.stream)
    await delivered_again(redis, keys)
    await queue.add("n", "next")
    await running.fact(next_begun.wait())
    assert not runs
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs == ["stopped", "done"]


# ── Ours, and in nobody's hands ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind",
    [Acks, Moves],
    ids=["ack", "move"],
)
async def test_what_comes_back_while_its_settlement_is_refused_runs_without_one_more_lease(
    server: Server,
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
) -> None:
    """A rival takes the entry over during the run. The settlement is sent for a second time and
    refused, and before we know it the entry is ours again."""
    runs: list[int] = []
    make, answer = kind.__init__, kind.set_result
    claim = (keys.stream, "default")

    def make_repeated(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.was_repeated = True

    def come_back(self: Any, reply: Any) -> None:
        if len(runs) == 1:
            client.xclaim(*claim, "ours", 0, ids)
        answer(self, reply)

    async def handler(job: Job) -> None:
        runs.append(job.attempt)
        if len(runs) == 1:
            pending = client.xpending_range(*claim, "-", "+", 1)
            ids.append(pending[0]["message_id"])
            client.xclaim(*claim, "rival", 0, ids)
            if kind is Moves:
                raise Retry

    monkeypatch.setattr(kind, "__init__", make_repeated)
    monkeypatch.setattr(kind, "set_result", come_back)
    ids: list[bytes] = []
    with redis_py.Redis.from_url(server.url) as client:
        options = {"claim_min_idle_ms": LONG_MS, "read_block_ms": 20, "consumer_id": "ours"}
        running = start(handler, **options)
        await queue.add("n", None)
        await running.next(JobOutcome)
        await running.next(JobOutcome)
        await until(lambda: at_rest(redis, keys), "it is done")
        assert runs == [0, 0]


#: An entry that is a consumer's own, and idle for longer than any lease.
ORPHAN = """
redis.call('XADD', KEYS[1], '*', 'd', ARGV[1])
local read = redis.call('XREADGROUP', 'GROUP', 'default', ARGV[2], 'STREAMS', KEYS[1], '>')
redis.call('XCLAIM', KEYS[1], 'default', ARGV[2], 0, read[1][2][1][1], 'IDLE', 3600000, 'JUSTID')
"""


async def test_what_is_lost_and_runs_on_hides_nothing_that_is_left_behind(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """Where reads cannot claim, what is pending is compared with what is in hand."""
    begun, orphan_begun, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        if job.id == "orphan":
            orphan_begun.set()
        else:
            begun.set()
            await gate.wait()

    running = start(handler, claim_min_idle_ms=LONG_MS, read_block_ms=20, concurrency=2)
    await queue.add("n", None)
    await running.fact(begun.wait())
    engine = running.worker._engine
    assert engine is not None
    ((entry_id, *_),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
    await redis("XACK", keys.stream, "default", entry_id)
    await redis("XDEL", keys.stream, entry_id)

    async def is_known() -> bool:
        engine.held.must_renew.set()
        return entry_id in engine.held.lost and engine.health().lost == 1

    async def has_looked() -> bool:
        return not engine.held.must_recover

    await until(is_known, "it is lost")
    await until(has_looked, "nothing else is looked for")
    await redis(
        "EVAL", ORPHAN, 1, keys.stream, envelope(job_id="orphan"), engine.config.consumer_id
    )

    async def is_taken_up() -> bool:
        engine._reader._takeovers.look_at_s = 0.0
        return orphan_begun.is_set()

    await until(is_taken_up, "the orphan runs beside the lost one")
    gate.set()


async def test_an_entry_that_cannot_be_seen_to_keeps_no_other_from_running(
    queue: Queue, start: Start, add_raw: AddRaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come with one read."""

    def fail(self: Failures, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Failures, "bury", fail)
    ran = asyncio.Event()

    async def handler(job: Job) -> None:
        ran.set()

    await queue.add("n", None)
    await add_raw(None)
    running = start(handler, read_block_ms=20)
    await running.fact(ran.wait())


# ── A consumer is deleted ───────────────────────────────────────────────────────────────────────


class Fails(Exception):
    pass


@pytest.mark.fault(26)
@pytest.mark.parametrize("end", ["done", "result", "retried", "buried"])
@pytest.mark.parametrize("is_renewed", [False, True])
async def test_a_job_whose_consumer_was_deleted_under_it_comes_to_its_end(
    queue: Queue, start: Start, redis: Redis, keys: Keys, end: str, is_renewed: bool
) -> None:
    """It is in the stream and pending for nobody: whoever runs it sees to it."""
    begun, gate = asyncio.Event(), asyncio.Event()
    runs = 0

    async def handler(job: Job) -> str | None:
        nonlocal runs
        runs += 1
        begun.set()
        await gate.wait()
        if end in ("retried", "buried") and job.attempt == 0:
            raise Fails
        return "returned" if end == "result" else None

    running = start(handler, claim_min_idle_ms=LONG_MS, store_results=end == "result")
    attempts = 1 if end == "buried" else 2
    added = await queue.add("n", None, attempts=attempts, backoff=10)
    await running.fact(begun.wait())
    engine = running.worker._engine
    assert engine is not None
    await redis("XGROUP", "DELCONSUMER", keys.stream, DEFAULT_GROUP, engine.config.consumer_id)
    assert (await redis("XPENDING", keys.stream, DEFAULT_GROUP))[0] == 0
    if is_renewed:

        async def is_ours_again() -> bool:
            engine.held.must_renew.set()
            return bool((await redis("XPENDING", keys.stream, DEFAULT_GROUP))[0])

        await until(is_ours_again, "a beat makes it ours again")
        assert not engine.held.lost
    gate.set()
    if end == "buried":
        await running.buried(1)
    else:
        await running.completed(1)
    await until(lambda: at_rest(redis, keys), "nothing is left of it")
    assert runs == 1 + (end == "retried")
    if end == "result":
        assert await running.result(queue, added.id) == "returned"


@pytest.mark.fault(26)
@pytest.mark.usefixtures("hoarding")
async def test_jobs_whose_consumer_was_deleted_are_handed_back_by_a_drain(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """One that the deadline cuts short, and those that wait behind it."""
    begun = asyncio.Event()

    async def endless(job: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def handler(job: Job) -> None:
        pass

    await queue.add_bulk([{"name": "n", "data": i} for i in range(5)])
    options = {"claim_min_idle_ms": LONG_MS, "concurrency": 1, "read_count": 5}
    running = start(endless, **options, shutdown_deadline_s=0.1)
    await running.fact(begun.wait())
    engine = running.worker._engine
    assert engine is not None
    assert len(engine.held.ids()) == 5
    await redis("XGROUP", "DELCONSUMER", keys.stream, DEFAULT_GROUP, engine.config.consumer_id)
    await running.stop()
    heir = start(handler, **options)
    await heir.completed(5)
    await until(lambda: at_rest(redis, keys), "nothing is left of them")


@pytest.mark.fault(10)
@pytest.mark.parametrize("script", [settling.ACK, settling.COMPLETE], ids=repr)
async def test_an_ack_leaves_another_job_under_its_id_that_was_not_delivered(
    redis: Redis, keys: Keys, script: Script
) -> None:
    done = await redis("XADD", keys.stream, "*", "d", "")
    await redis("XGROUP", "CREATE", keys.stream, "g", "0")
    await redis("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.stream, ">")
    other = await redis("XADD", keys.stream, "*", "d", "")
    words = [done, other] if script is settling.ACK else ["c", 1, "", "", done, "", other, ""]
    await redis("EVAL", script.source, 1, keys.stream, "g", *words)
    assert [entry_id for entry_id, _ in await redis("XRANGE", keys.stream, "-", "+")] == [other]
