"""The promoter as it runs: on time by Redis's clock, whoever leads, whatever happens."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from chasqui.errors import UnreachableError
from chasqui.managing.retention import Trimmer
from chasqui.metrics import LockOutcome, PromoterTick
from chasqui.metrics.testing import InMemorySink
from chasqui.model.job import RepeatPattern
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.timed import leader, promoter, wakeup
from chasqui.timed.leader_loop import LeaderLoop
from chasqui.timed.promoter import Promoter, PromoterConfig, PromoterLoop
from chasqui.timed.scheduler import SchedulerLoop
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.timed.facts import (
    ONCE,
    WAIT_S,
    MakePromoter,
    Redis,
    eventually,
    ids_in_stream,
    member,
    put,
    running,
    stream_of,
)
from tests.timed.process import Process

# ── Running ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.both_loops
async def test_a_producers_wake_wakes_it(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_promoter: MakePromoter,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(promoter, "IDLE_POLL_S", 1000.0)
    metrics = InMemorySink()
    async with running(make_promoter(metrics=metrics, lock_ttl_s=1000)):
        async with asyncio.timeout(WAIT_S):
            await metrics.next(PromoterTick)
        far = await queue.add("mail", 1, delay_ms=500_000)
        near = await queue.add("mail", 2, delay_ms=30)
        await stream_of(redis, keys.stream, 1)
        moved = await queue.reschedule(far.id, delay_ms=20)
        assert moved
        await stream_of(redis, keys.stream, 2)
    assert await ids_in_stream(redis, keys) == [near.id, far.id]


async def test_jobs_without_a_wake_are_found(
    keys: Keys, redis: Redis, make_promoter: MakePromoter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(promoter, "IDLE_POLL_S", 0.2)
    metrics = InMemorySink()
    loop = make_promoter(metrics=metrics)
    async with running(loop):
        async with asyncio.timeout(WAIT_S):
            await metrics.next(PromoterTick)
        assert not loop._foreign_until_s
        await put(redis, keys, member("theirs"))
        await stream_of(redis, keys.stream, 1)
        assert loop._foreign_until_s, "from now on it looks more often"


async def test_one_who_leads_before_it_can_be_woken_polls(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_promoter: MakePromoter,
    monkeypatch: pytest.MonkeyPatch,
):
    """It waits for the leader's farewell, and the leader goes without one, as chasquimq's do."""
    monkeypatch.setattr(promoter, "IDLE_POLL_S", 1000.0)
    monkeypatch.setattr(leader, "FOLLOW_S", 0.01)
    await redis("SET", keys.promoter_lock, "other", "EX", 1000)
    loop = make_promoter()
    async with running(loop):

        async def listens() -> bool:
            return loop._wake_list.is_waiting_for(loop.lock.freed)

        await eventually(listens)
        await redis("DEL", keys.promoter_lock)

        async def leads() -> bool:
            return loop.lock.is_held

        await eventually(leads)
        await queue.add("mail", 1, delay_ms=20)
        await stream_of(redis, keys.stream, 1)


@pytest.mark.parametrize("score", ["-inf", "-5", "0.5", "253402300799000", "1e300", "inf"])
async def test_due_times_of_every_size_are_understood(
    keys: Keys, redis: Redis, make_promoter: MakePromoter, score: str
):
    """Those that can never come keep nobody back."""
    await redis("ZADD", keys.delayed, score, member("odd"))
    loop = make_promoter()
    looked = await loop.run_once()
    assert looked is not None
    is_due = float(score) < 10
    assert (looked.count, looked.depth) == ((1, 0) if is_due else (0, 1))
    await loop._heed(await loop._look())
    await put(redis, keys, member("now"))
    await loop._heed(await loop._look())
    assert await ids_in_stream(redis, keys) == ["odd", "now"][0 if is_due else 1 :]


async def test_no_job_comes_early(keys: Keys, queue: Queue, redis: Redis, make_promoter: Any):
    await queue.add_bulk([{"name": "mail", "data": i, "delay_ms": 1 + 7 * i} for i in range(40)])
    pairs = await redis("ZRANGE", keys.delayed, 0, -1, "WITHSCORES")
    due = {one[8:]: int(score) for one, score in pairs}
    async with running(make_promoter()):
        await stream_of(redis, keys.stream, 40)
    for entry_id, fields in await redis("XRANGE", keys.stream, "-", "+"):
        assert int(entry_id.split(b"-")[0]) >= due[fields[1]]


async def test_it_goes_on_after_errors(
    keys: Keys,
    redis: Redis,
    make_promoter: MakePromoter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("chasqui.timed.leader_loop.RETRY_S", 0.01)
    await redis("SET", keys.stream, "no stream")
    await put(redis, keys, member("a"))
    async with running(make_promoter()):

        async def told() -> bool:
            return "WRONGTYPE" in caplog.text

        await eventually(told)
        await redis("DEL", keys.stream)
        await stream_of(redis, keys.stream, 1)
    warnings = [record for record in caplog.records if record.name == "chasqui.timed.leader_loop"]
    assert len([one for one in warnings if one.levelname == "WARNING"]) == 1, "told once"


@pytest.mark.fault(6)
async def test_it_goes_on_after_the_server_was_away(
    private_server: Callable[..., Server], queue_name: str, keys: Keys
):
    server = private_server("redis-8.6", appendonly="yes", appendfsync="always")
    metrics = InMemorySink()
    engine = Promoter(server.url, queue_name, metrics=metrics)
    task = asyncio.create_task(engine.run())
    async with asyncio.timeout(WAIT_S), Queue(queue_name, redis_url=server.url) as queue:
        await metrics.next(PromoterTick)
        await queue.add("mail", {}, delay_ms=300)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await queue.add("mail", {}, delay_ms=10)
        while metrics.total_promoted < 2:
            await metrics.next(PromoterTick)
        engine.shutdown()
        await task
    assert metrics.total_promoted == 2


async def test_many_queues_share_one_connection(
    server: Server, queue_name: str, redis: Redis, connect: Callable[..., Connection]
):
    shared = connect(server.url)
    stop = asyncio.Event()
    names = [f"{queue_name}-{i}" for i in range(5)]
    tasks = []
    for name in names:
        loops: list[LeaderLoop] = [
            PromoterLoop(Keys(name), shared, connect(server.url)),
            SchedulerLoop(Keys(name), shared, connect(server.url)),
        ]
        tasks += [asyncio.create_task(loop.run(stop)) for loop in loops]
    for name in names:
        async with Queue(name, redis_url=server.url) as queue:
            await queue.add("mail", {}, delay_ms=20)
    for name in names:
        await stream_of(redis, Keys(name).stream, 1)
    stop.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert not shared.is_closed


async def test_a_queue_that_is_broken_keeps_no_other_back(
    server: Server,
    queue_name: str,
    redis: Redis,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
):
    """Both on one connection, in one process."""
    monkeypatch.setattr("chasqui.timed.leader_loop.RETRY_S", 0.01)
    shared, url = connect(server.url), server.url
    broken, sound = Keys(f"{queue_name}-broken"), Keys(f"{queue_name}-sound")
    await redis("SET", broken.stream, "no stream")
    async with contextlib.AsyncExitStack() as stack:
        for keys in (broken, sound):
            await put(redis, keys, member("old"))
            queue = await stack.enter_async_context(Queue(keys.queue, redis_url=url))
            pattern = RepeatPattern.every(20)
            await queue.upsert_repeatable_job("r", 1, repeat=pattern, limit=2, missed_fires=ONCE)
            await stack.enter_async_context(running(PromoterLoop(keys, shared, connect(url))))
            await stack.enter_async_context(running(SchedulerLoop(keys, shared, connect(url))))
        await stream_of(redis, sound.stream, 3)
        assert await redis("TYPE", broken.stream) == b"string"
        await redis("DEL", broken.stream)
        await stream_of(redis, broken.stream, 3)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_million_others_change_nothing_in_what_a_promotion_does(
    private_server: Callable[..., Server],
    server: Server,
    queue_name: str,
    keys: Keys,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
):
    """The server runs the same commands, each of which takes the logarithm of the set's size."""
    monkeypatch.setattr(Trimmer, "wrote", lambda *_: None)  # that depends on the clock
    own = private_server(server.kind.name)
    connection = connect(own.url)
    loop = PromoterLoop(keys, connection, connect(own.url))

    async def redis(*arguments: Any) -> Any:
        return await connection.execute(*arguments, effect=Effect.READ)

    async def calls_to_promote() -> dict[str, str]:
        await put(redis, keys, *(member(f"{i:04}") for i in range(1000)))
        await loop.run_once()  # the lock, the script, the first batch
        await redis("CONFIG", "RESETSTAT")
        for _ in range(3):
            await loop.run_once()
        stats = (await redis("INFO", "commandstats")).decode()
        pairs = (line.split(":") for line in stats.splitlines() if line.startswith("cmdstat_"))
        counts = {name: told.split(",")[0] for name, told in pairs}
        counts.pop("cmdstat_config|resetstat", None)
        counts.pop("cmdstat_config", None)
        return counts

    await put(redis, keys, member("far"), due_ms=9 * 10**15)
    alone = await calls_to_promote()
    far = "for i = 1, 10000 do redis.call('ZADD', KEYS[1], 9e15 + i, ARGV[1] .. i) end"
    for i in range(100):
        await connection.execute("EVAL", far, 1, keys.delayed, f"{i}-", effect=Effect.ONCE)
    assert await calls_to_promote() == alone
    assert await redis("ZCARD", keys.delayed) == 1_000_001
    assert await redis("XLEN", keys.stream) == 2000


async def test_events_that_cannot_be_written_keep_no_job_back(
    keys: Keys, redis: Redis, make_promoter: MakePromoter, caplog: pytest.LogCaptureFixture
):
    await redis("SET", keys.events, "no stream")
    await put(redis, keys, *(member(f"{i:03}") for i in range(600)))
    async with running(make_promoter()):
        await stream_of(redis, keys.stream, 600)
    told = [one for one in caplog.records if "events" in one.message]
    assert len(told) == 1


@pytest.mark.fault(16)
@pytest.mark.slow
@pytest.mark.parametrize("command", ["EVALSHA", "BLPOP", "ZCOUNT", "XADD", "GETEX"])
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda one: one.name)
async def test_a_cut_link_loses_and_doubles_no_job(
    server: Server,
    keys: Keys,
    redis: Redis,
    queue: Queue,
    make_promoter: MakePromoter,
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    fault: Fault,
):
    monkeypatch.setattr(leader, "_RENEW_SHARE", 0.01)
    monkeypatch.setattr(wakeup, "RETRY_S", 0.01)
    monkeypatch.setattr(promoter, "IDLE_POLL_S", 0.002)
    proxy = make_proxy(server.url)
    proxy.fail(fault, command, nth=2, times=2)
    ids: list[str] = []
    async with running(make_promoter(url=proxy.url, lock_ttl_s=1, poll_interval_ms=2)):
        # Some commands come with a batch of jobs only, and a slow machine promotes many at once.
        while len(ids) < 10 or proxy.count(command) <= 3:
            jobs = [await queue.add("mail", i, delay_ms=1 + 20 * i) for i in range(3)]
            ids += [job.id for job in jobs]
            await stream_of(redis, keys.stream, len(ids))
    assert sorted(await ids_in_stream(redis, keys)) == sorted(ids)


async def test_followers_take_over_at_once_when_the_leader_leaves(
    keys: Keys,
    redis: Redis,
    make_promoter: MakePromoter,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(leader, "FOLLOW_S", 1000.0)
    first, second = InMemorySink(), InMemorySink()
    async with asyncio.timeout(WAIT_S):
        async with running(make_promoter(metrics=first, lock_ttl_s=1000)):
            assert await first.next(LockOutcome) is LockOutcome.ACQUIRED
            follower = make_promoter(metrics=second, lock_ttl_s=1000)
            stop = asyncio.Event()
            task = asyncio.create_task(follower.run(stop))
            assert await second.next(LockOutcome) is LockOutcome.HELD

            async def listens() -> bool:
                return b"cmd=blpop" in (await redis("CLIENT", "LIST", "TYPE", "NORMAL"))

            await eventually(listens)
        assert await second.next(LockOutcome) is LockOutcome.ACQUIRED
        stop.set()
        await task
    assert not await redis("EXISTS", keys.promoter_lock)


async def test_the_outcome_of_the_lock_is_told_on_change_only(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    metrics = InMemorySink()
    loop = make_promoter(metrics=metrics)
    await loop.run_once()
    await loop.run_once()
    await redis("SET", keys.promoter_lock, "other", "EX", 1000)
    loop.lock._renew_at_s = 0.0
    assert await loop.run_once() is None
    assert await loop.run_once() is None
    told = [LockOutcome.ACQUIRED, LockOutcome.LOST, LockOutcome.HELD]
    assert metrics.all(LockOutcome) == told
    assert metrics.all(PromoterTick) == [PromoterTick(0, 0, 0)] * 2


async def test_a_standalone_promoter_runs_until_it_is_shut_down(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue
):
    engine = Promoter(server.url, queue_name, holder_id="alone")
    task = asyncio.create_task(engine.run())
    await queue.add("mail", {}, delay_ms=10)
    await stream_of(redis, keys.stream, 1)
    assert await redis("GET", keys.promoter_lock) == b"alone"
    await asyncio.to_thread(engine.shutdown)
    async with asyncio.timeout(WAIT_S):
        await task
    assert not await redis("EXISTS", keys.promoter_lock)
    engine.shutdown()


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_cancelled_twice_it_leaves_no_link(
    server: Server, queue_name: str, make_proxy: Callable[[str], Proxy], turns: int
):
    """The second time comes while it lets go: one turn of the loop later, or a few."""
    proxy = make_proxy(server.url)
    run = asyncio.ensure_future(Promoter(proxy.url, queue_name).run())
    await asyncio.to_thread(proxy.wait_for, lambda: b"BLPOP" in proxy.commands)
    run.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait({run})
    await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)


async def test_a_standalone_promoter_tells_at_once_that_there_is_no_server():
    with pytest.raises(UnreachableError):
        await Promoter("redis://127.0.0.1:1", "q").run()


async def test_a_promoter_shut_down_before_it_ran_does_nothing():
    engine = Promoter("redis://127.0.0.1:1", "q")
    engine.shutdown()
    await engine.run()


def test_settings_are_checked():
    for name in ("poll_interval_ms", "batch", "max_stream_len", "lock_ttl_s"):
        with pytest.raises(ValueError, match=name):
            PromoterConfig(**{name: 0})


# ── In processes of their own ───────────────────────────────────────────────────────────────────


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [-3600, 3600])
async def test_the_clock_of_the_worker_does_not_matter(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue, offset_s: int
):
    late = await queue.add("mail", {}, delay_ms=1_000_000)
    with Process("promoter", server.url, queue_name, "off", offset_s):

        async def leads() -> bool:
            return bool(await redis("GET", keys.promoter_lock) == b"off")

        await eventually(leads)
        soon = await queue.add("mail", {}, delay_ms=100)
        await stream_of(redis, keys.stream, 1)
    assert await ids_in_stream(redis, keys) == [soon.id]
    assert await redis("EXISTS", keys.didx(late.id))


@pytest.mark.fault(32)
@pytest.mark.fault(34)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "fate"), [("worker", "killed"), ("worker", "stopped"), ("promoter", "ended")]
)
async def test_of_three_promoters_one_leads_and_another_takes_over(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue, role: str, fate: str
):
    """The leader is killed, stopped until another leads, or ended, while jobs come due."""
    await queue.pause()
    jobs = await queue.add_bulk(
        [{"name": "mail", "data": i, "delay_ms": 1 + i * 20} for i in range(400)]
    )
    with (
        Process(role, server.url, queue_name, "a") as a,
        Process(role, server.url, queue_name, "b") as b,
        Process(role, server.url, queue_name, "c") as c,
    ):
        await stream_of(redis, keys.stream, 20)
        holder = (await redis("GET", keys.promoter_lock)).decode()
        leading = next(one for one in (a, b, c) if one.holder == holder)

        async def other_leads() -> bool:
            return (await redis("GET", keys.promoter_lock)) not in (None, holder.encode())

        if fate == "killed":
            leading.kill()
        elif fate == "ended":
            assert leading.end() == 0
        else:
            leading.stop()
        await eventually(other_leads)
        if fate == "stopped":
            leading.resume()
        await stream_of(redis, keys.stream, 400)
    found = await ids_in_stream(redis, keys)
    assert len(found) == 400
    assert set(found) == {job.id for job in jobs}


@pytest.mark.slow
async def test_it_is_quiet_while_nothing_is_scheduled(
    server: Server, make_promoter: MakePromoter, make_proxy: Callable[[str], Proxy]
):
    proxy = make_proxy(server.url)
    async with running(make_promoter(url=proxy.url)):
        await asyncio.to_thread(proxy.wait_for, lambda: b"BLPOP" in proxy.commands)
        before = len(proxy.commands)
        await asyncio.sleep(5)
        assert len(proxy.commands) - before <= 10, proxy.commands[before:]
