"""Schedulers as they run, several at once: each fire time fires once, whoever leads."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from chasqui._core.envelope import decode_envelope
from chasqui._core.ulid import UlidFactory
from chasqui.errors import UnreachableError
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import timing
from chasqui.timed import leader, scheduler
from chasqui.timed.fire_calls import FIRES_PER_CALL, Owed, fire_calls, read_spec
from chasqui.timed.fire_plan import plan_fires
from chasqui.timed.scheduler import Scheduler, SchedulerConfig
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.timed.facts import (
    ONCE,
    WAIT_S,
    MakeScheduler,
    Redis,
    entries,
    eventually,
    fires,
    make_due,
    now_ms,
    running,
    score,
    stream_of,
)
from tests.timed.process import Process

# ── Two at once ─────────────────────────────────────────────────────────────────────────────────


async def believes_to_lead(connection: object, *, is_freed: bool = False) -> bool:
    return True


@pytest.mark.fault(33)
async def test_schedulers_that_all_believe_to_lead_fire_each_fire_time_once(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
):
    policy = MissedFiresPolicy.fire_all(5_000)
    for i in range(5):
        job = await queue.upsert_repeatable_job(
            f"r{i}", i, repeat=RepeatPattern.every(10), missed_fires=policy, limit=1_000
        )
        await make_due(redis, keys, job.id, ago_ms=20_000)
    loops = [make_scheduler() for _ in range(3)]
    for loop in loops:
        monkeypatch.setattr(loop.lock, "hold", believes_to_lead)
    await asyncio.gather(*(loop._fire_due() for loop in loops))
    # A round ends early if another scheduler has moved its specs on: all three may have.
    await loops[0]._fire_due()
    found = await fires(redis, keys)
    assert sorted(found) == sorted([0, 1, 2, 3, 4] * 1_000)


@pytest.mark.fault(33)
async def test_a_fire_computed_from_an_older_score_does_nothing(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(90_000))
    stale_ms = await make_due(redis, keys, job.id, ago_ms=0)
    loop = make_scheduler()
    await loop.run_once()
    after = await score(redis, keys, job.id)
    fires = [(stale_ms, b"envelope")]
    spec = timing.SpecFires(job.id.encode(), stale_ms, stale_ms + 1_000, "r", fires)
    request = timing.fire(keys, [spec], None)
    assert (await loop.connection.submit(request))[1:] == [0, 1]
    assert await redis("XLEN", keys.stream) == 1
    assert await score(redis, keys, job.id) == after


@pytest.mark.parametrize("change", ["removed", "written anew"])
async def test_a_spec_that_is_changed_between_two_steps_of_its_fires_fires_no_further(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler, change: str
):
    policy = MissedFiresPolicy.fire_all(1000)

    async def write() -> str:
        job = await queue.upsert_repeatable_job(
            "r", 1, repeat=RepeatPattern.every(60_000), missed_fires=policy
        )
        return job.id

    key = await write()
    due_ms = await make_due(redis, keys, key, ago_ms=60_000 * 600)
    loop = make_scheduler()
    content = await redis("HMGET", keys.repeat_spec(key), "spec", "fired", "retry")
    now = await now_ms(redis)
    spec, fired = read_spec(content, due_ms)
    plan = plan_fires(spec, due_ms, now, fired)
    calls = fire_calls([Owed(key.encode(), due_ms, spec, plan)], now, UlidFactory())
    first, second, *_ = (timing.fire(keys, call, None) for call in calls)
    assert (await loop.connection.submit(first))[1:] == [FIRES_PER_CALL, 0]
    if change == "removed":
        assert await queue.remove_repeatable_by_key(key)
    else:
        await write()
    after = await score(redis, keys, key)
    assert (await loop.connection.submit(second))[1:] == [0, 1]
    assert await redis("XLEN", keys.stream) == FIRES_PER_CALL
    assert await score(redis, keys, key) == after
    assert await redis("EXISTS", keys.repeat_spec(key)) == (change != "removed")


async def test_writers_of_one_key_leave_the_spec_and_the_time_of_one_of_them(
    server: Server, keys: Keys, queue: Queue, queue_name: str, redis: Redis
):
    intervals_ms = (10**9, 2 * 10**9)

    async def write(queue: Queue, interval_ms: int) -> None:
        pattern = RepeatPattern.every(interval_ms)
        await queue.upsert_repeatable_job("r", interval_ms, repeat=pattern, key="one")

    async with Queue(queue_name, redis_url=server.url) as other:
        for _ in range(10):
            await asyncio.gather(*map(write, (queue, other), intervals_ms))
            (meta,) = await queue.get_repeatable_jobs()
            assert meta.pattern.interval_ms in intervals_ms
            away_ms = meta.next_fire_ms - await now_ms(redis)
            assert 0 <= meta.pattern.interval_ms - away_ms < 10**9


async def test_a_fire_of_the_future_waits_in_the_delayed_set(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(1_000_000))
    due_ms = await score(redis, keys, job.id)
    assert due_ms is not None
    spec = timing.SpecFires(job.id.encode(), due_ms, None, "r", [(due_ms, b"envelope")])
    request = timing.fire(keys, [spec], None)
    assert (await make_scheduler().connection.submit(request))[1:] == [1, 0]
    ((member, at),) = await redis("ZRANGE", keys.delayed, 0, -1, "WITHSCORES")
    assert (member, int(at)) == (b"\x01\x00\x00\x00renvelope", due_ms)
    assert await redis("LLEN", keys.wake) == 1


@pytest.mark.parametrize(
    "command", ["EVALSHA", "TIME", "ZRANGEBYSCORE", "HMGET", "ZCOUNT", "GETEX", "ZCARD"]
)
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda one: one.name)
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_cut_link_loses_and_doubles_no_fire(
    server: Server,
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    fault: Fault,
    nth: int,
):
    monkeypatch.setattr(leader, "_RENEW_SHARE", 0.01)
    monkeypatch.setattr(scheduler, "EMPTY_POLL_S", 0.01)
    policy = MissedFiresPolicy.fire_all(5_000)
    # ZCARD is the look at a queue without specs; most others go on while there is one.
    left = 0 if command == "ZCARD" else 1
    if left:
        await queue.upsert_repeatable_job("far", 0, repeat=RepeatPattern.every(1_000_000))
    for i in range(2):
        job = await queue.upsert_repeatable_job(
            f"r{i}", i, repeat=RepeatPattern.every(10), missed_fires=policy, limit=500
        )
        await make_due(redis, keys, job.id, ago_ms=20_000)
    proxy = make_proxy(server.url)
    proxy.fail(fault, command, nth=nth)
    async with running(make_scheduler(url=proxy.url, batch=1, lock_ttl_s=1, tick_interval_ms=10)):

        async def are_done() -> bool:
            return bool(await redis("ZCARD", keys.repeat) == left)

        await eventually(are_done)
        # The one that was cut, and at least one that was not.
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count(command) > nth)
    assert sorted(await fires(redis, keys)) == [0] * 500 + [1] * 500


# ── Running ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.both_loops
async def test_specs_fire_while_it_runs_and_new_ones_are_seen(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    await queue.upsert_repeatable_job("far", 0, repeat=RepeatPattern.every(1_000_000))
    async with running(make_scheduler(tick_interval_ms=20)):

        async def leads() -> bool:
            return bool(await redis("EXISTS", keys.scheduler_lock))

        await eventually(leads)
        await queue.upsert_repeatable_job("near", 1, repeat=RepeatPattern.every(50), limit=5)
        await stream_of(redis, keys.stream, 5)

        async def is_gone() -> bool:
            return bool(await redis("ZCARD", keys.repeat) == 1)

        await eventually(is_gone)
    assert await fires(redis, keys) == [1] * 5
    assert not await redis("EXISTS", keys.scheduler_lock), "handed over at the end"


async def test_where_there_is_no_spec_nobody_leads(
    server: Server,
    keys: Keys,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(scheduler, "EMPTY_POLL_S", 0.01)
    proxy = make_proxy(server.url)
    async with running(make_scheduler(url=proxy.url, tick_interval_ms=10)):
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("ZCARD") > 2)
    assert proxy.count("EVALSHA") == 0
    assert not await redis("EXISTS", keys.scheduler_lock)


async def test_followers_take_over_at_once_when_the_leader_leaves(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(leader, "FOLLOW_S", 1000.0)
    await queue.upsert_repeatable_job("far", 0, repeat=RepeatPattern.every(1_000_000))
    first, second = make_scheduler(lock_ttl_s=1000), make_scheduler(lock_ttl_s=1000)

    async def first_leads() -> bool:
        return first.lock.is_held

    async def second_waits() -> bool:
        return second._wake_list.is_waiting_for(second.lock.freed)

    async def second_leads() -> bool:
        return second.lock.is_held

    stop = asyncio.Event()
    async with running(first):
        await eventually(first_leads)
        task = asyncio.create_task(second.run(stop))
        await eventually(second_waits)

        async def listens() -> bool:
            return b"cmd=blpop" in (await redis("CLIENT", "LIST", "TYPE", "NORMAL"))

        await eventually(listens)
    await eventually(second_leads)
    stop.set()
    async with asyncio.timeout(WAIT_S):
        await task
    assert not await redis("EXISTS", keys.scheduler_lock)


async def test_a_wake_is_taken_also_where_nothing_is_left_to_fire(
    make_scheduler: MakeScheduler,
):
    """A wake that is left ends every sleep at once."""
    loop = make_scheduler()
    loop._wake_list.listen(loop.lock.freed, 0.01)
    await asyncio.wait({loop._wake_list._waiting}, timeout=WAIT_S)
    assert await loop._turn() > 0
    assert loop._wake_list._waiting is None or not loop._wake_list._waiting.done()
    await loop._end()


async def test_a_standalone_scheduler_runs_until_it_is_shut_down(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue
):
    await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(20))
    engine = Scheduler(server.url, queue_name, holder_id="alone", tick_interval_ms=50)
    task = asyncio.create_task(engine.run())
    await stream_of(redis, keys.stream, 2)
    assert await redis("GET", keys.scheduler_lock) == b"alone"
    engine.shutdown()
    async with asyncio.timeout(WAIT_S):
        await task
    assert not await redis("EXISTS", keys.scheduler_lock)


async def test_a_standalone_scheduler_tells_at_once_that_there_is_no_server():
    with pytest.raises(UnreachableError):
        await Scheduler("redis://127.0.0.1:1", "q").run()


def test_settings_are_checked():
    for name in ("tick_interval_ms", "batch", "max_stream_len", "lock_ttl_s"):
        with pytest.raises(ValueError, match=name):
            SchedulerConfig(**{name: 0})


# ── In processes of their own ───────────────────────────────────────────────────────────────────


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [-3600, 3600])
async def test_the_clock_of_the_worker_does_not_matter(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue, offset_s: int
):
    await queue.upsert_repeatable_job("far", 0, repeat=RepeatPattern.every(1_000_000))
    await queue.upsert_repeatable_job("near", 1, repeat=RepeatPattern.every(200), limit=3)
    with Process("scheduler", server.url, queue_name, "off", offset_s):
        await stream_of(redis, keys.stream, 3)

        async def is_gone() -> bool:
            return bool(await redis("ZCARD", keys.repeat) == 1)

        await eventually(is_gone)
    assert await fires(redis, keys) == [1] * 3
    before = await now_ms(redis)
    for entry in await entries(redis, keys.stream):
        assert before - 60_000 < decode_envelope(entry[b"d"]).created_at_ms <= before


@pytest.mark.fault(33)
@pytest.mark.fault(34)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "fate"), [("worker", "killed"), ("worker", "stopped"), ("scheduler", "ended")]
)
async def test_of_three_schedulers_one_leads_and_another_takes_over(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue, role: str, fate: str
):
    """10,000 fire time, some of them while nobody leads: fires = fire_times.

    Other specs have all their fire_times while nobody leads: those go by their policy.
    """
    await queue.pause()
    policy = MissedFiresPolicy.fire_all(10_000)
    specs = [(RepeatPattern.every(2), 5_000), (RepeatPattern.every(2), 5_000)]
    specs.append((RepeatPattern.cron("* * * * * *"), 10))
    for i, (pattern, limit) in enumerate(specs):
        await queue.upsert_repeatable_job(
            f"r{i}", i, repeat=pattern, missed_fires=policy, limit=limit
        )
    expected = {i: limit for i, (_, limit) in enumerate(specs)}
    with (
        Process(role, server.url, queue_name, "a") as a,
        Process(role, server.url, queue_name, "b") as b,
        Process(role, server.url, queue_name, "c") as c,
    ):
        await stream_of(redis, keys.stream, 100)

        async def is_renewed() -> bool:
            return bool(await redis("PTTL", keys.scheduler_lock) > 4500)

        await eventually(is_renewed)
        holder = (await redis("GET", keys.scheduler_lock)).decode()
        leading = next(one for one in (a, b, c) if one.holder == holder)

        async def other_leads() -> bool:
            if not await redis("EXISTS", keys.repeat):
                return True  # all was fired already: nobody needs to lead
            return (await redis("GET", keys.scheduler_lock)) not in (None, holder.encode())

        if fate == "killed":
            leading.kill()
        elif fate == "ended":
            assert leading.end() == 0
        else:
            leading.stop()
        if fate != "ended":
            expected |= await add_specs_for_the_gap(queue, redis, keys)
        await eventually(other_leads)
        if fate == "stopped":
            leading.resume()

        async def all_gone() -> bool:
            return not await redis("EXISTS", keys.repeat)

        async with asyncio.timeout(40):
            while not await all_gone():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert Counter(await fires(redis, keys)) == Counter(expected)


async def add_specs_for_the_gap(queue: Queue, redis: Redis, keys: Keys) -> dict[str, int]:
    """Write specs that are over before the dead leader's lock; how often each has to fire."""
    expected = {}
    # As long a lock as all this takes on a busy machine, too.
    assert await redis("PEXPIRE", keys.scheduler_lock, 8_000) == 1
    end_ms = await now_ms(redis) + 6_000
    policies = (MissedFiresPolicy.fire_all(1000), ONCE, MissedFiresPolicy.skip())
    patterns = ((RepeatPattern.every(50), 50), (RepeatPattern.cron("* * * * * *"), 1000))
    for pattern, step_ms in patterns:
        for policy in policies:
            name = f"{pattern.kind} {policy.kind}"
            job = await queue.upsert_repeatable_job(
                name, name, repeat=pattern, missed_fires=policy, end_before_ms=end_ms
            )
            first_ms = await score(redis, keys, job.id)
            assert first_ms is not None
            fire_times = (end_ms - first_ms) // step_ms + 1
            assert fire_times > 1
            expected[name] = {"fire-all": fire_times, "fire-once": 1, "skip": 0}[policy.kind]
    assert await redis("PTTL", keys.scheduler_lock) > end_ms - await now_ms(redis)
    return expected
