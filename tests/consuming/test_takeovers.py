"""Entries that change hands: who was robbed of one does not settle it, who is lost keeps none."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from chasqui import Job, LeaseLostError
from chasqui.consuming import acker
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.metrics import JobOutcome
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from tests.consuming.conftest import Redis, Running, at_rest, envelope, told_done, until
from tests.proxy import Fault, Proxy
from tests.servers import Server

Start = Callable[..., Running]
LEASE_MS = 400
#: For entries that nobody but who is told to may take over.
LONG_MS = 60_000


async def fine(job: Job) -> None:
    pass


def count_beats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each beat that is over."""
    beats: list[int] = []
    beat = Heartbeat.run_once

    def count(self: Heartbeat) -> int:
        beats.append(beat(self))
        return beats[-1]

    monkeypatch.setattr(Heartbeat, "run_once", count)
    return beats


# ── From who still runs it ──────────────────────────────────────────────────────────────────────


@pytest.mark.fault(5)
async def test_a_job_that_was_taken_over_knows_it_and_is_not_settled(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    begun = asyncio.Event()
    told: list[str] = []

    async def handler(job: Job) -> None:
        begun.set()
        while not job.lost:  # noqa: ASYNC110 - as handlers do
            await asyncio.sleep(0.01)
        try:
            job.raise_if_lost()
        except LeaseLostError as error:
            told.append(str(error))
            if job.data == "raise":
                raise

    running = start(handler, claim_min_idle_ms=LONG_MS)
    for ended, data in enumerate(("raise", "return"), start=1):
        begun.clear()
        job = await queue.add("n", data)
        await running.fact(begun.wait())
        ((entry_id, *_),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
        await redis("XCLAIM", keys.stream, "default", "thief", 0, entry_id)
        engine = running.worker._engine
        assert engine is not None
        engine.held.must_renew.set()
        await running.ended(ended)
        assert told.pop() == f"job {job.id} was taken over by another worker"
        ((_, owner, _, _),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
        assert owner == b"thief", "still its new owner's"
        await redis("XACK", keys.stream, "default", entry_id)
        await redis("XDEL", keys.stream, entry_id)
    health = running.worker.health()
    assert health is not None
    assert health.lost == 2
    assert await redis("ZCARD", keys.delayed) == 0
    await running.stop()
    assert not await told_done(redis, keys)
    assert running.metrics.jobs_completed == 0


async def test_what_was_handed_back_by_another_is_not_run_beside_its_own_run(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """A rival takes a running entry over and hands it back, as if it never had been delivered: it
    comes to us once more, runs here already, and runs again only when that is over."""
    begun, gate = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.data)
        begun.set()
        await gate.wait()

    running = start(handler, claim_min_idle_ms=LEASE_MS, read_block_ms=20, concurrency=3)
    await queue.add("n", "taken")
    await running.fact(begun.wait())
    ((entry_id, *_),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
    claim = ("XCLAIM", keys.stream, "default", "rival", 0, entry_id)
    await redis(*claim, "IDLE", 864_000_000, "RETRYCOUNT", 0, "JUSTID")

    engine = running.worker._engine
    assert engine is not None

    async def came_back() -> bool:
        engine._reader._takeovers.look_at_s = 0.0  # where reads cannot claim, a look is due
        ((_, owner, _, _),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
        return bool(owner != b"rival")

    await until(came_back, "it is delivered to us again")
    await queue.add("n", "behind it")

    async def next_one_runs() -> bool:
        return "behind it" in ran

    await until(next_one_runs, "what was read after it runs")
    assert ran == ["taken", "behind it"]
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.usefixtures("hoarding")
async def test_what_was_taken_over_and_comes_back_runs_without_one_more_lease(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    is_running: bool,
) -> None:
    """While the first copy of it still waits, that one makes way; while that runs, it ends as lost
    and the next run begins after it. The lease is longer than any test waits."""
    begun, gate = asyncio.Event(), asyncio.Event()
    runs: Counter[str] = Counter()
    at_once = 0

    async def handler(job: Job) -> None:
        nonlocal at_once
        runs[job.data] += 1
        if job.data == "taken":
            at_once += 1
            assert at_once == 1
        begun.set()
        await gate.wait()
        if job.data == "taken":
            at_once -= 1

    running = start(
        handler, claim_min_idle_ms=120_000, concurrency=1, read_count=10, read_block_ms=20
    )
    if not is_running:
        await queue.add("n", "before it")
        await running.fact(begun.wait())
    await queue.add("n", "taken")

    async def is_delivered() -> bool:
        return bool((await redis("XPENDING", keys.stream, "default"))[0] == 2 - is_running)

    await running.fact(begun.wait())
    await until(is_delivered, "it is in hand")
    engine = running.worker._engine
    assert engine is not None
    ours = engine.config.consumer_id.encode()
    entry_id = (await redis("XPENDING", keys.stream, "default", "-", "+", 2))[-1][0]

    async def owner() -> bytes:
        held = await redis("XPENDING", keys.stream, "default", entry_id, entry_id, 1)
        return bytes(held[0][1])

    claim = ("XCLAIM", keys.stream, "default", "rival", 0, entry_id)
    await redis(*claim)

    async def is_lost() -> bool:
        engine.held.must_renew.set()
        return entry_id in engine.held.lost

    await until(is_lost, "it is known to be lost")
    assert await owner() == b"rival"
    await redis(*claim, "IDLE", 3_600_000, "JUSTID")

    async def came_back() -> bool:
        engine._reader._takeovers.look_at_s = 0.0  # where reads cannot claim, a look is due
        return await owner() == ours and running.metrics.total_reclaimed > 0

    await until(came_back, "the rival is gone and it is delivered to us again")
    gate.set()
    await until(lambda: at_rest(redis, keys), "all is done")
    assert runs["taken"] == 1 + is_running


@pytest.mark.fault(5)
async def test_an_ack_that_waits_takes_nothing_from_a_new_owner(
    queue: Queue, start: Start, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is over and its ack not sent; the entry is taken over; then a beat makes the leases
    certain again, so that acks need no fence."""
    monkeypatch.setattr(acker, "ACK_IDLE_S", 3600)
    beats = count_beats(monkeypatch)

    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        if job.data == "beside":  # acks wait for others only while something runs
            begun.set()
            await gate.wait()

    running = start(handler, claim_min_idle_ms=LONG_MS, events_enabled=False)
    await queue.add("n", "beside")
    await running.fact(begun.wait())
    await queue.add("n", "taken")
    await running.completed(1)
    _, (entry_id, *_) = await redis("XPENDING", keys.stream, "default", "-", "+", 2)
    await redis("XCLAIM", keys.stream, "default", "thief", 0, entry_id)
    taken = len(beats)
    engine = running.worker._engine
    assert engine is not None

    async def has_beaten() -> bool:
        engine.held.must_renew.set()
        return len(beats) > taken + 1

    await until(has_beaten, "a beat began after that, and is over")
    gate.set()
    await running.stop()
    ((left_id, owner, _, _),) = await redis("XPENDING", keys.stream, "default", "-", "+", 2)
    assert (left_id, owner) == (entry_id, b"thief")
    assert await redis("XLEN", keys.stream) == 1
    health = running.worker.health()
    assert health is not None
    assert health.lost == 1


async def test_what_was_taken_over_is_told_once_however_long_it_runs_on(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    beats = count_beats(monkeypatch)
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await gate.wait()

    running = start(handler, claim_min_idle_ms=LEASE_MS)
    await queue.add("n", None)
    await running.fact(begun.wait())
    ((entry_id, *_),) = await redis("XPENDING", keys.stream, "default", "-", "+", 1)
    await redis("XCLAIM", keys.stream, "default", "thief", 0, entry_id)
    taken = len(beats)

    async def has_beaten() -> bool:
        return len(beats) > taken + 3

    await until(has_beaten, "three beats found that it is not ours")
    gate.set()
    await running.next(JobOutcome)
    health = running.worker.health()
    assert health is not None
    assert health.lost == 1
    assert caplog.text.count("taken over by another worker") == 1


# ── From who is lost ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_one_who_never_receives_what_is_its_own_does_not_keep_it(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    start: Start,
    redis: Redis,
    keys: Keys,
) -> None:
    """It asks for that again and again, and each answer is lost: others take it over."""
    await queue.add("n", None)
    await redis("XGROUP", "CREATE", keys.stream, "default", "0")
    await redis("XREADGROUP", "GROUP", "default", "deaf", "STREAMS", keys.stream, ">")
    proxy = make_proxy(server.url)
    for command, script in (("EVALSHA", settling.RECOVER.sha), ("EVAL", b"-- recover:")):
        proxy.fail(Fault.CUT_AFTER, command, times=1_000_000, holding=script)
    start_at(proxy.url, fine, consumer_id="deaf", claim_min_idle_ms=2000)
    rival = start(fine, claim_min_idle_ms=2000, read_block_ms=50)
    await rival.completed(1)
    assert proxy.count("EVALSHA") > 1


#: An entry of one who took it and was lost at once, before any reader of the group could have it.
ABANDON = """
local id = redis.call('XADD', KEYS[1], '*', 'd', ARGV[1])
redis.call('XREADGROUP', 'GROUP', 'default', 'lost', 'STREAMS', KEYS[1], '>')
redis.call('XCLAIM', KEYS[1], 'default', 'lost', 0, id, 'IDLE', 3600000, 'JUSTID')
"""


async def test_a_takeover_is_told_and_what_was_handed_back_is_none(
    queue: Queue, start: Start, redis: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    await redis("XGROUP", "CREATE", keys.stream, "default", "0", "MKSTREAM")
    for idle_ms in (3_600_000, HANDED_BACK_MS):
        for _ in range(3):
            await queue.add("n", idle_ms)
        read = await redis(
            "XREADGROUP", "GROUP", "default", "gone", "COUNT", 3, "STREAMS", keys.stream, ">"
        )
        ((_, entries),) = read.items() if isinstance(read, dict) else read
        ids = [entry_id for entry_id, _ in entries]
        claim = ("XCLAIM", keys.stream, "default", "gone", 0, *ids, "IDLE", idle_ms, "JUSTID")
        await redis(*claim)
    ran: dict[str, int] = {}

    async def handler(job: Job) -> None:
        ran[job.id] = job.data

    running = start(handler, claim_min_idle_ms=LONG_MS)
    await running.completed(6)
    (record,) = [one for one in caplog.records if "took over" in one.message]
    told, _, listed = record.message.partition(" from workers that were lost: ")
    assert (record.levelname, told) == ("WARNING", f"queue {keys.queue}: took over 3 jobs")
    assert listed.split(", ") == [job_id for job_id, idle in ran.items() if idle < HANDED_BACK_MS]


@pytest.mark.slow
async def test_one_who_comes_back_takes_nothing_over_at_once(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis: Redis,
    keys: Keys,
) -> None:
    """Others may have been cut off too: what they hold waits, what is new does not."""
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.data)

    proxy = make_proxy(server.url)
    running = start_at(proxy.url, handler, claim_min_idle_ms=6000)
    await queue.add("n", "before")
    await running.completed(1)
    proxy.is_refusing = True
    proxy.cut()
    await redis("EVAL", ABANDON, 1, keys.stream, envelope("abandoned"))
    await queue.add("n", "new")
    engine = running.worker._engine
    assert engine is not None
    engine._reader._takeovers.look_at_s = 0.0  # where reads cannot claim, a look is due
    proxy.is_refusing = False
    await running.completed(3)
    assert ran == ["before", "new", "abandoned"]


@pytest.mark.slow
async def test_one_whose_links_break_again_and_again_takes_over_all_the_same(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis: Redis,
    keys: Keys,
) -> None:
    proxy = make_proxy(server.url)
    running = start_at(proxy.url, fine, claim_min_idle_ms=600, read_block_ms=20)
    await queue.add("n", "before")
    await running.completed(1)
    proxy.fail(Fault.CUT_BEHIND, "XREADGROUP", times=1000, holding=b"BLOCK")
    await redis("EVAL", ABANDON, 1, keys.stream, envelope("abandoned"))
    await running.completed(2)


async def test_where_reads_cannot_claim_there_is_a_look_at_who_holds_anything(
    valkey_9: Server,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One command, and no script while nobody else does."""
    monkeypatch.setattr("chasqui.consuming.takeovers.LOOK_S", 0.01)
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.data)

    proxy = make_proxy(valkey_9.url)
    options = {"delayed_enabled": False, "run_scheduler": False, "claim_min_idle_ms": 100}
    running = start_at(proxy.url, handler, **options)

    async def looks(count: int) -> None:
        target = proxy.count("XPENDING") + count

        async def seen() -> bool:
            return proxy.count("XPENDING") >= target

        await until(seen, f"{count} looks")

    await looks(2)
    scripts = proxy.count("EVALSHA")
    await looks(3)
    assert proxy.count("EVALSHA") == scripts
    redis = redis_at(valkey_9.url)
    await redis("EVAL", ABANDON, 1, keys.stream, envelope("abandoned"))
    await running.completed(1)
    assert ran == ["abandoned"]
    assert proxy.count("EVALSHA") > scripts
