"""Clocks that jump by an hour, the server's or a worker's: jobs run, and when they should."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from chasqui import (
    Job,
    OutcomeUnknownError,
    RepeatPattern,
    ServerError,
    sync,
)
from chasqui.model import clock
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import adding, settling
from chasqui.timed import promoter
from chasqui.timed.promoter import PromoterConfig, PromoterLoop
from chasqui.timed.scheduler import SchedulerConfig, SchedulerLoop
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.consuming.conftest import Redis, Running, until
from tests.crash.conftest import Fleet, WorkerProcess, eventually
from tests.faults.careless import careless
from tests.faults.clock import HOUR_S, ClockServer, build_clock
from tests.ledger import Audit
from tests.proxy import Fault, Proxy
from tests.servers import KINDS, Server
from tests.timed.facts import eventually as becomes_true
from tests.timed.facts import running as runs

IN_FLIGHT = 20
WORKERS = ("one", "two", "three")
LEASE_MS = 4000


@pytest.fixture(params=KINDS)
def clock_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClockServer]:
    with ClockServer(request.param, build_clock(tmp_path), tmp_path / "clock") as server:
        request.node.user_properties.append(("server", request.param))
        yield server


# ── The server's ────────────────────────────────────────────────────────────────────────────────


def jump_while_jobs_run(clock_server: ClockServer, fleet: Fleet, jump_s: int) -> Audit:
    """The server's clock is set while three workers run jobs; the books when all is done."""
    options = {"concurrency": 3 * IN_FLIGHT, "claim_min_idle_ms": LEASE_MS}
    workers = [fleet.start(who, **options) for who in WORKERS]
    fleet.started(*WORKERS)
    held = fleet.add("hold", IN_FLIGHT)
    eventually(lambda: fleet.ledger.count("start") == IN_FLIGHT, "all run")
    last_id = _last_id(fleet)
    clock_server.jump(jump_s)
    later = fleet.add("quick", 50)
    assert _last_id(fleet) > last_id, "ids rise"
    eventually(lambda: _ended(fleet) >= set(later), "what was added later runs")
    outlast_a_lease(fleet, held)
    return all_done(fleet, workers)


def latecomers_after_a_jump(
    clock_server: ClockServer,
    fleet: Fleet,
    joined: Callable[[Fleet, str, list[int]], None],
    target: str = "tests.crash.workers:make",
) -> Audit:
    """The server's clock is put forward while one worker runs all jobs. Then others come, the next
    when the one before has `joined`; the books when all is done."""
    options: dict[str, Any] = {"concurrency": IN_FLIGHT, "claim_min_idle_ms": LEASE_MS}
    first, *others = WORKERS
    workers = [fleet.start(first, target=target, **options)]
    fleet.started(first)
    held = fleet.add("hold", IN_FLIGHT)
    run_all(fleet, first, held)
    clock_server.jump(HOUR_S)
    for who in others:
        workers.append(fleet.start(who, target=target, **options))
        joined(fleet, who, held)
    return all_done(fleet, workers)


def run_all(fleet: Fleet, who: str, numbers: list[int]) -> None:
    """Return when this worker runs these jobs."""

    def has_begun() -> bool:
        return {fact.n for fact in fleet.ledger.read("start") if fact.who == who} >= set(numbers)

    eventually(has_begun, f"{who} runs them all")


def outlast_a_lease(fleet: Fleet, held: list[int]) -> None:
    renewals = Renewals(fleet)
    eventually(lambda: renewals.fewest(held) >= 4, "a lease and more has passed")


def all_done(fleet: Fleet, workers: list[WorkerProcess]) -> Audit:
    for worker in workers:
        worker.open_gate()
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    return fleet.audit()


def judge(found: Audit, held: list[int]) -> None:
    """What is in flight may run once more, nothing else."""
    assert found.faults == {}
    assert found.extra_runs <= len(held), "more runs than were in flight"
    assert set(found.extra) <= set(held)


def _last_id(fleet: Fleet) -> tuple[int, ...]:
    last_id = fleet.client.xinfo_stream(fleet.keys.stream)["last-generated-id"]
    return tuple(map(int, last_id.split(b"-")))


class Renewals:
    """How often the idle time of each job has begun anew."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._idle_ms: dict[int, int] = {}
        self._seen: Counter[int] = Counter()

    def fewest(self, numbers: list[int]) -> int:
        idle_ms = self._fleet.census().pending
        self._seen.update(n for n, idle in idle_ms.items() if idle < self._idle_ms.get(n, 0))
        self._idle_ms = idle_ms
        return min(self._seen[n] for n in numbers)


@pytest.mark.fault(30)
@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_the_servers_clock_jumps_while_jobs_run(
    clock_server: ClockServer, make_fleet: Callable[[str], Fleet], jump_s: int
) -> None:
    """An hour ahead every lease seems over, an hour back none."""
    fleet = make_fleet(clock_server.url)
    found = jump_while_jobs_run(clock_server, fleet, jump_s)
    judge(found, fleet.added[:IN_FLIGHT])


@pytest.mark.fault(30)
def test_who_comes_after_a_jump_finds_leases_renewed(
    clock_server: ClockServer, make_fleet: Callable[[str], Fleet]
) -> None:
    """Whoever has an entry now keeps it, by the new clock."""

    def joined(fleet: Fleet, who: str, held: list[int]) -> None:
        fleet.started(who)
        outlast_a_lease(fleet, held)

    fleet = make_fleet(clock_server.url)
    judge(latecomers_after_a_jump(clock_server, fleet, joined), fleet.added)


@pytest.mark.fault(30, control=True)
def test_without_renewals_whoever_comes_runs_all_again(
    clock_server: ClockServer, make_fleet: Callable[[str], Fleet]
) -> None:
    fleet = make_fleet(clock_server.url)
    target = "tests.faults.workers:forgetful"
    found = latecomers_after_a_jump(clock_server, fleet, run_all, target)
    with pytest.raises(AssertionError, match="more runs than were in flight"):
        judge(found, fleet.added)


def _ended(fleet: Fleet) -> set[int]:
    return {fact.n for fact in fleet.ledger.read("end")}


@pytest.mark.fault(30, control=True)
def test_ids_made_of_a_clock_are_refused_when_it_goes_back(
    clock_server: ClockServer,
    make_fleet: Callable[[str], Fleet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_clock = """
    local time = server.call('TIME')
    local id = string.format('%.0f-%d', time[1] * 1000, server.call('XLEN', key))
    return ask(name, key, id, select(4, ...))
    """
    monkeypatch.setattr(adding, "ADD", careless(adding.ADD, "XADD", instead=by_clock))
    with pytest.raises(ServerError, match="equal or smaller"):
        jump_while_jobs_run(clock_server, make_fleet(clock_server.url), -HOUR_S)


@pytest.mark.fault(30)
async def test_what_is_due_when_the_servers_clock_has_jumped_does_not_wait_for_the_old_time(
    clock_server: ClockServer,
    queue_name: str,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half an hour away for the timers of the leaders, half an hour ago for the server."""
    monkeypatch.setattr(promoter, "IDLE_POLL_S", 0.05)
    keys, url = Keys(queue_name), clock_server.url
    redis = connect(url)
    loops = [
        PromoterLoop(keys, connect(url), connect(url), PromoterConfig(poll_interval_ms=50)),
        SchedulerLoop(keys, connect(url), connect(url), SchedulerConfig(tick_interval_ms=50)),
    ]
    half_ms = HOUR_S * 500
    async with Queue(queue_name, redis_url=url) as queue:
        await queue.add("delayed", None, delay_ms=half_ms)
        await queue.upsert_repeatable_job("spec", None, repeat=RepeatPattern.every(half_ms))
        async with runs(loops[0]), runs(loops[1]):

            async def both_lead() -> bool:
                locks = (keys.promoter_lock, keys.scheduler_lock)
                return bool(await redis.execute("EXISTS", *locks, effect=Effect.READ) == 2)

            await becomes_true(both_lead)
            await asyncio.to_thread(clock_server.jump, HOUR_S - 60)

            async def both_came() -> bool:
                return bool(await redis.execute("XLEN", keys.stream, effect=Effect.READ) == 2)

            await becomes_true(both_came)


@pytest.mark.fault(30)
async def test_a_clock_that_is_set_back_within_a_takeover_loses_nothing(
    server: Server, redis: Redis, keys: Keys
) -> None:
    """The look for silent workers sees the old time, what takes their entries over the new one."""
    await redis("XGROUP", "CREATE", keys.stream, "g", "0", "MKSTREAM")
    await redis("XADD", keys.stream, "*", "d", "")
    await redis("XREADGROUP", "GROUP", "g", "silent", "STREAMS", keys.stream, ">")
    script = careless(
        settling.RECLAIM, "XPENDING", instead="return ask(name, key, a, '-', '+', 10)"
    )
    await redis("EVAL", script.source, 1, keys.stream, "g", "other", HOUR_S * 1000, 10)
    count, *_ = await redis("XPENDING", keys.stream, "g")
    assert count == 1, "it is in the stream and nobody's"


# ── A worker's ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the wall clock of this process be off by so many seconds."""
    off_s = 0
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + off_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + off_s * 10**9)

    def set_off(seconds: int) -> None:
        nonlocal off_s
        off_s = seconds

    return set_off


@pytest.mark.fault(31)
@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_workers_clock_jumps_while_jobs_run(
    queue: Queue,
    start: Callable[..., Running],
    redis: Redis,
    keys: Keys,
    jump: Callable[[int], None],
    jump_s: int,
) -> None:
    """Long runs, retries and delayed jobs: each comes as often as if nothing had happened."""
    runs: Counter[str] = Counter()
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        runs[job.name] += 1
        if job.name == "long":
            jump(jump_s)
            await gate.wait()
            job.raise_if_lost()
        if job.name == "again" and job.attempt == 0:
            raise ValueError("not yet")

    running = start(handler, claim_min_idle_ms=10_000, read_block_ms=50)
    await queue.add("long", None)
    await queue.add("again", None, backoff=50)
    await queue.add("later", None, delay_ms=100)
    await queue.add("far", None, delay_ms=HOUR_S * 500)
    await running.completed(2)
    gate.set()
    await running.completed(3)
    assert runs == {"long": 1, "again": 2, "later": 1}
    assert running.metrics.total_reclaimed == 0
    assert await redis("ZCARD", keys.delayed) == 1, "half an hour has not passed"


@pytest.fixture
async def hold(
    queue: Queue, start_at: Callable[..., Running]
) -> AsyncIterator[Callable[..., Awaitable[Job]]]:
    """Starts a worker and gives the job that it runs, until the end of the test."""
    gate = asyncio.Event()

    async def hold(url: str, lease_ms: int) -> Job:
        held: asyncio.Future[Job] = asyncio.get_running_loop().create_future()

        async def handler(job: Job) -> None:
            if not held.done():
                held.set_result(job)
            await gate.wait()

        running = start_at(url, handler, claim_min_idle_ms=lease_ms)
        await queue.add("held", None)
        return cast(Job, await running.fact(held))

    yield hold
    gate.set()


async def ends_by_a_jump(
    server: Server, hold: Callable[..., Awaitable[Job]], jump: Callable[[int], None]
) -> bool:
    """Whether a lease that has just begun is over when the worker's clock is put forward."""
    job = await hold(server.url, HOUR_S * 500)
    assert not job.lost
    jump(HOUR_S)
    return job.lost


@pytest.mark.fault(31)
async def test_a_workers_clock_ends_no_lease(
    server: Server, hold: Callable[..., Awaitable[Job]], jump: Callable[[int], None]
) -> None:
    assert not await ends_by_a_jump(server, hold, jump)


@pytest.mark.fault(31)
async def test_a_workers_clock_prolongs_no_lease(
    server: Server,
    make_proxy: Callable[[str], Proxy],
    hold: Callable[..., Awaitable[Job]],
    jump: Callable[[int], None],
) -> None:
    """Whoever cannot renew it knows when it is over, though the clock says it has not begun."""
    proxy = make_proxy(server.url)
    job = await hold(proxy.url, 400)
    jump(-HOUR_S)
    proxy.is_refusing = True
    proxy.cut()

    async def is_lost() -> bool:
        return job.lost

    try:
        await until(is_lost, "the lease is over")
    finally:
        proxy.is_refusing = False


@pytest.mark.fault(31, control=True)
async def test_a_lease_by_the_wall_clock_ends_when_that_jumps(
    server: Server,
    hold: Callable[..., Awaitable[Job]],
    jump: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "boot_s", lambda: time.time())
    monkeypatch.setattr(clock, "boot_ns", lambda: time.time_ns())
    assert await ends_by_a_jump(server, hold, jump)


# ── The machine's ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets this process find that its machine has slept for so many seconds. Only the clock that
    counts them tells: to all timers it is as if nothing had been."""
    slept_s = 0
    real, real_ns = clock.boot_s, clock.boot_ns
    monkeypatch.setattr(clock, "boot_s", lambda: real() + slept_s)
    monkeypatch.setattr(clock, "boot_ns", lambda: real_ns() + slept_s * 10**9)

    def wake_after(seconds: int) -> None:
        nonlocal slept_s
        slept_s += seconds

    return wake_after


@pytest.mark.fault(31)
async def test_a_lease_ends_while_the_machine_sleeps(
    server: Server, hold: Callable[..., Awaitable[Job]], sleep: Callable[[int], None]
) -> None:
    """Before any renewal could tell."""
    job = await hold(server.url, HOUR_S * 500)
    assert not job.lost
    sleep(HOUR_S)
    assert job.lost


@pytest.mark.fault(31)
@pytest.mark.parametrize("is_sync", [False, True])
async def test_an_add_is_not_sent_again_after_a_long_sleep(
    clock_server: ClockServer,
    queue_name: str,
    make_proxy: Callable[[str], Proxy],
    sleep: Callable[[int], None],
    is_sync: bool,
) -> None:
    """The machine slept before the answer came. The server has forgotten by now that it had it."""
    proxy = make_proxy(clock_server.url)
    proxy.fail(Fault.SWALLOW, "EVAL")

    def add_in_thread() -> Job:
        with sync.Queue(queue_name, redis_url=proxy.url) as queue:
            return queue.add("job", None)

    async with Queue(queue_name, redis_url=proxy.url) as queue:
        add = asyncio.to_thread(add_in_thread) if is_sync else queue.add("job", None)
        adding = asyncio.ensure_future(add)
        async with Queue(queue_name, redis_url=clock_server.url) as other:

            async def is_in() -> bool:
                return (await other.counts()).waiting > 0

            await until(is_in, "the job is in")
            await asyncio.to_thread(clock_server.jump, 2 * HOUR_S)
            sleep(2 * HOUR_S)
            proxy.cut()
            with pytest.raises(OutcomeUnknownError):
                await adding
            assert (await other.counts()).waiting == 1


# ── A scheduler's ───────────────────────────────────────────────────────────────────────────────


async def fires_of(redis: Redis, queue: Queue, keys: Keys, loop: SchedulerLoop) -> int:
    """How often a spec fires whose first slot is three quarters of an hour away."""
    pattern = RepeatPattern.every(HOUR_S * 750)
    await queue.upsert_repeatable_job("far", None, repeat=pattern)
    await loop.run_once()
    return int(await redis("XLEN", keys.stream)) + int(await redis("ZCARD", keys.delayed))


@pytest.mark.fault(31)
@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_schedulers_clock_fires_nothing(
    server: Server,
    connect: Callable[..., Any],
    redis: Redis,
    queue: Queue,
    keys: Keys,
    jump: Callable[[int], None],
    jump_s: int,
) -> None:
    jump(jump_s)
    loop = SchedulerLoop(keys, connect(server.url), connect(server.url))
    assert await fires_of(redis, queue, keys, loop) == 0


@pytest.mark.fault(31, control=True)
async def test_a_scheduler_that_went_by_its_own_clock_is_caught(
    server: Server,
    connect: Callable[..., Any],
    redis: Redis,
    queue: Queue,
    keys: Keys,
    jump: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chasqui.timed.scheduler.time_us", lambda told: time.time_ns() // 1000)
    loop = SchedulerLoop(keys, connect(server.url), connect(server.url))
    jump(HOUR_S)
    assert await fires_of(redis, queue, keys, loop) == 1


@pytest.mark.fault(30)
def test_jobs_of_a_worker_that_died_before_the_clock_was_set_back_are_taken_over(
    clock_server: ClockServer, make_fleet: Callable[[str], Fleet]
) -> None:
    """To the server they have just been delivered, for an hour; workers that live keep theirs."""
    fleet = make_fleet(clock_server.url)
    fleet.add("hold", 10)
    options = {"claim_min_idle_ms": 1000, "concurrency": 5, "read_block_ms": 200}
    doomed, living = fleet.start("doomed", **options), fleet.start("living", **options)
    eventually(lambda: fleet.ledger.count("start") == 10, "all run")
    doomed.kill()
    clock_server.jump(-HOUR_S)
    heir = fleet.start("heir", **options | {"concurrency": 20})
    heir.open_gate()
    fleet.ended(5)
    living.open_gate()
    eventually(lambda: fleet.census().is_empty, "all is done")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 5, "those of the dead one only"
