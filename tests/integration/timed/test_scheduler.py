"""The scheduler: each slot of a spec fires once, exactly on its time, whoever leads."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import scheduler, scripts
from chasqui._core.envelope import decode_envelope
from chasqui.errors import UnreachableError
from chasqui.job import MissedFiresPolicy, RepeatPattern
from chasqui.keys import FIRED, Keys
from chasqui.payload import decode
from chasqui.queue import Queue
from chasqui.request import Effect
from chasqui.scheduler import Fired, Scheduler, SchedulerConfig, SchedulerDuty
from tests.integration.timed.facts import (
    WAIT_S,
    Redis,
    entries,
    eventually,
    running,
    stream_of,
)
from tests.integration.timed.process import Process
from tests.proxy import Fault, Proxy
from tests.servers import Server

MakeScheduler = Callable[..., SchedulerDuty]

EVERY_MINUTE = RepeatPattern.cron("* * * * *")
MINUTE_MS = 60_000
#: For tests that may be held up, or begin just before a full minute.
ONCE = MissedFiresPolicy.fire_once()


async def now_ms(redis: Redis) -> int:
    seconds, micros = await redis("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def score(redis: Redis, keys: Keys, key: str) -> int | None:
    found = await redis("ZSCORE", keys.repeat, key)
    return None if found is None else int(float(found))


async def make_due(redis: Redis, keys: Keys, key: str, *, ago_ms: int) -> int:
    """Let a spec have been due for a while; since when."""
    due_ms = await now_ms(redis) - ago_ms
    await redis("ZADD", keys.repeat, due_ms, key)
    return due_ms


async def fires(redis: Redis, keys: Keys) -> list[Any]:
    """The decoded payloads of all fires."""
    found = await entries(redis, keys.stream)
    return [decode(decode_envelope(entry[b"d"]).payload) for entry in found]


# ── One look ────────────────────────────────────────────────────────────────────────────────────


async def test_a_fire_carries_name_payload_and_limits_of_its_spec(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job(
        "report", {"for": "ada"}, repeat=EVERY_MINUTE, attempts=7, backoff=250, missed_fires=ONCE
    )
    due_ms = await make_due(redis, keys, job.id, ago_ms=0)
    fired = await make_scheduler().run_once()
    assert fired is not None
    assert (fired.count, fired.unreadable) == (1, 0)
    (entry,) = await entries(redis, keys.stream)
    assert entry[b"n"] == b"report"
    envelope = decode_envelope(entry[b"d"])
    assert decode(envelope.payload) == {"for": "ada"}
    assert envelope.attempt == 0
    assert envelope.retry is not None
    assert (envelope.retry[0], envelope.retry[1] and envelope.retry[1][:2]) == (7, ("fixed", 250))
    assert due_ms <= envelope.created_at_ms <= await now_ms(redis)
    assert await redis("HGET", keys.repeat_spec(job.id), FIRED) == b"1"


async def test_the_next_fire_is_on_the_beat_to_the_millisecond(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    cron = await queue.upsert_repeatable_job("cron", 1, repeat=EVERY_MINUTE, missed_fires=ONCE)
    every = await queue.upsert_repeatable_job("every", 2, repeat=RepeatPattern.every(90_000))
    # With a stray part of a second, as chasquimq leaves it.
    await make_due(redis, keys, cron.id, ago_ms=137)
    due_ms = await make_due(redis, keys, every.id, ago_ms=1_234)
    fired = await make_scheduler().run_once()
    assert fired is not None
    assert fired.count == 2
    assert await score(redis, keys, every.id) == due_ms + 90_000
    next_ms = await score(redis, keys, cron.id)
    assert next_ms is not None
    assert next_ms % MINUTE_MS == 0
    assert fired.next_due_s is not None
    assert 0 <= fired.next_due_s <= 60


async def test_a_spec_that_is_not_due_does_not_fire(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(1_000_000))
    before = await score(redis, keys, job.id)
    fired = await make_scheduler().run_once()
    assert fired is not None
    assert fired.count == 0
    assert fired.next_due_s is not None
    assert fired.next_due_s > 900
    assert await score(redis, keys, job.id) == before
    assert not await redis("EXISTS", keys.stream)


async def test_without_specs_there_is_nothing_to_do(make_scheduler: MakeScheduler):
    assert await make_scheduler().run_once() == Fired(0, 0, None)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (None, 0),
        (MissedFiresPolicy.skip(), 0),
        (MissedFiresPolicy.fire_once(), 1),
        (MissedFiresPolicy.fire_all(1000), 1000),
        (MissedFiresPolicy.fire_all(4), 4),
    ],
    ids=["default", "skip", "once", "all", "capped"],
)
@pytest.mark.parametrize("kind", ["every", "cron"])
async def test_missed_fires_go_by_their_policy_and_the_beat_goes_on(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    policy: MissedFiresPolicy | None,
    most: int,
    kind: str,
):
    pattern = EVERY_MINUTE if kind == "cron" else RepeatPattern.every(MINUTE_MS)
    job = await queue.upsert_repeatable_job("r", 1, repeat=pattern, missed_fires=policy)
    due_ms = (await now_ms(redis) // MINUTE_MS - 10) * MINUTE_MS
    await redis("ZADD", keys.repeat, due_ms, job.id)
    fired = await make_scheduler().run_once()
    assert fired is not None
    next_ms = await score(redis, keys, job.id)
    assert next_ms is not None
    slots, rest = divmod(next_ms - due_ms, MINUTE_MS)
    assert slots in (11, 12), "12 if a minute began meanwhile"
    assert rest == 0
    assert fired.count == min(most, slots)
    assert await redis("XLEN", keys.stream) == fired.count


@pytest.mark.parametrize("pattern", [RepeatPattern.every(1), RepeatPattern.cron("* * * * * *")])
async def test_ten_thousand_missed_slots_fire_once_each(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler, pattern: RepeatPattern
):
    """The policy allows for more; the limit says how many are left."""
    job = await queue.upsert_repeatable_job(
        "r", 1, repeat=pattern, missed_fires=MissedFiresPolicy.fire_all(20_000), limit=10_000
    )
    await make_due(redis, keys, job.id, ago_ms=20_000_000)
    fired = await make_scheduler().run_once()
    assert fired is not None
    assert fired.count == 10_000
    found = await entries(redis, keys.stream)
    assert len({decode_envelope(entry[b"d"]).id for entry in found}) == 10_000
    assert await score(redis, keys, job.id) is None, "its limit is reached"
    assert not await redis("EXISTS", keys.repeat_spec(job.id))


async def test_a_spec_goes_when_its_limit_is_reached(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(90_000), limit=2)
    duty = make_scheduler()
    for expected in (1, 1, 0):
        if await score(redis, keys, job.id) is not None:
            await make_due(redis, keys, job.id, ago_ms=0)
        fired = await duty.run_once()
        assert fired is not None
        assert fired.count == expected
    assert await redis("EXISTS", keys.repeat, keys.repeat_spec(job.id)) == 0


async def test_a_spec_goes_after_its_end(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    end_ms = await now_ms(redis) + 300
    job = await queue.upsert_repeatable_job(
        "r", 1, repeat=RepeatPattern.every(200), end_before_ms=end_ms, missed_fires=ONCE
    )
    await make_due(redis, keys, job.id, ago_ms=0)
    duty = make_scheduler()
    await duty.run_once()
    await redis("ZADD", keys.repeat, end_ms, job.id)

    async def is_gone() -> bool:
        await duty.run_once()
        return await score(redis, keys, job.id) is None

    await eventually(is_gone)
    assert await redis("XLEN", keys.stream) == 2
    assert not await redis("EXISTS", keys.repeat_spec(job.id))


async def test_the_stream_is_trimmed_where_that_was_asked_for(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    policy = MissedFiresPolicy.fire_all(1000)
    job = await queue.upsert_repeatable_job(
        "r", 1, repeat=RepeatPattern.every(1), missed_fires=policy
    )
    await make_due(redis, keys, job.id, ago_ms=10_000)
    fired = await make_scheduler(max_stream_len=100).run_once()
    assert fired is not None
    assert fired.count == 1000
    assert 100 <= await redis("XLEN", keys.stream) < 500


@pytest.mark.parametrize(
    "content",
    [
        {"spec": b"\xc1"},
        {"spec": b"garbage"},
        {"other": b"field"},
        {},
        "cron that is none",
        "count that is none",
    ],
    ids=str,
)
async def test_a_spec_that_cannot_be_read_is_told_once_and_left_alone(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    caplog: pytest.LogCaptureFixture,
    content: Any,
):
    bad = await queue.upsert_repeatable_job("bad", 1, repeat=EVERY_MINUTE, missed_fires=ONCE)
    hash_key = keys.repeat_spec(bad.id)
    if content == "cron that is none":
        spec = await redis("HGET", hash_key, "spec")
        await redis("HSET", hash_key, "spec", spec.replace(b"* * * * *", b"* * * * x"))
    elif content == "count that is none":
        await redis("HSET", hash_key, "fired", "many")
    else:
        await redis("DEL", hash_key)
        for name, value in content.items():
            await redis("HSET", hash_key, name, value)
    good = await queue.upsert_repeatable_job("good", 2, repeat=RepeatPattern.every(90_000))
    due_ms = await make_due(redis, keys, bad.id, ago_ms=90)
    # A page of one: what cannot be read must not keep the others from being seen.
    duty = make_scheduler(batch=1)
    with caplog.at_level(logging.ERROR, "chasqui"):
        for _ in range(3):
            await make_due(redis, keys, good.id, ago_ms=0)
            fired = await duty.run_once()
            assert fired is not None
            assert (fired.count, fired.unreadable) == (1, 1)
    assert await fires(redis, keys) == [2, 2, 2]
    assert len(caplog.records) == 1
    assert await score(redis, keys, bad.id) == due_ms
    # Written anew, it fires again.
    await queue.upsert_repeatable_job("bad", 1, repeat=EVERY_MINUTE, missed_fires=ONCE)
    await redis("HDEL", hash_key, "fired")
    await make_due(redis, keys, bad.id, ago_ms=0)
    fired = await duty.run_once()
    assert fired is not None
    assert fired.unreadable == 0
    assert (await fires(redis, keys))[-1] == 1


async def test_a_member_that_is_no_text_is_left_alone(
    keys: Keys, redis: Redis, make_scheduler: MakeScheduler
):
    await redis("ZADD", keys.repeat, 1, b"\xff\xfe")
    fired = await make_scheduler().run_once()
    assert fired == Fired(0, 1, None)


# ── Two at once ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(33)
async def test_schedulers_that_all_believe_to_lead_fire_each_slot_once(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    policy = MissedFiresPolicy.fire_all(5_000)
    for i in range(5):
        job = await queue.upsert_repeatable_job(
            f"r{i}", i, repeat=RepeatPattern.every(10), missed_fires=policy, limit=1_000
        )
        await make_due(redis, keys, job.id, ago_ms=20_000)
    duties = [make_scheduler() for _ in range(3)]
    await asyncio.gather(*(duty._fire_due() for duty in duties))
    found = await fires(redis, keys)
    assert sorted(found) == sorted([0, 1, 2, 3, 4] * 1_000)


@pytest.mark.fault(33)
async def test_a_fire_computed_from_an_older_score_does_nothing(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(90_000))
    stale_ms = await make_due(redis, keys, job.id, ago_ms=0)
    duty = make_scheduler()
    await duty.run_once()
    after = await score(redis, keys, job.id)
    request = scripts.call(
        scripts.FIRE,
        [keys.stream, keys.delayed, keys.repeat, keys.repeat_spec(job.id), keys.wake],
        [job.id, stale_ms, stale_ms + 1_000, "", "r", stale_ms, b"envelope"],
        Effect.IDEMPOTENT,
    )
    assert await duty.connection.submit(request) == -1
    assert await redis("XLEN", keys.stream) == 1
    assert await score(redis, keys, job.id) == after


async def test_a_fire_of_the_future_waits_in_the_delayed_set(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    job = await queue.upsert_repeatable_job("r", 1, repeat=RepeatPattern.every(1_000_000))
    due_ms = await score(redis, keys, job.id)
    assert due_ms is not None
    request = scripts.call(
        scripts.FIRE,
        [keys.stream, keys.delayed, keys.repeat, keys.repeat_spec(job.id), keys.wake],
        [job.id, due_ms, "", "", "r", due_ms, b"envelope"],
        Effect.IDEMPOTENT,
    )
    assert await make_scheduler().connection.submit(request) == 1
    ((member, at),) = await redis("ZRANGE", keys.delayed, 0, -1, "WITHSCORES")
    assert (member, int(at)) == (b"\x01\x00\x00\x00renvelope", due_ms)
    assert await redis("LLEN", keys.wake) == 1


@pytest.mark.parametrize("command", ["EVALSHA", "TIME", "ZRANGEBYSCORE", "HMGET"])
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda one: one.name)
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_cut_link_loses_and_doubles_no_fire(
    server: Server,
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
    command: str,
    fault: Fault,
    nth: int,
):
    policy = MissedFiresPolicy.fire_all(5_000)
    job = await queue.upsert_repeatable_job(
        "r", 1, repeat=RepeatPattern.every(10), missed_fires=policy, limit=1_000
    )
    await make_due(redis, keys, job.id, ago_ms=20_000)
    proxy = make_proxy(server.url)
    proxy.fail(fault, command, nth=nth)
    async with running(make_scheduler(url=proxy.url)):

        async def is_gone() -> bool:
            return await score(redis, keys, job.id) is None

        await eventually(is_gone)
    assert await redis("XLEN", keys.stream) == 1_000


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
@pytest.mark.parametrize("fate", ["killed", "stopped", "ended"])
async def test_of_three_schedulers_one_leads_and_another_takes_over(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue, fate: str
):
    """10,000 slots, some of them while nobody leads: fires = slots."""
    policy = MissedFiresPolicy.fire_all(10_000)
    specs = [(RepeatPattern.every(4), 4_990), (RepeatPattern.every(4), 4_990)]
    specs.append((RepeatPattern.cron("* * * * * *"), 20))
    for i, (pattern, limit) in enumerate(specs):
        await queue.upsert_repeatable_job(
            f"r{i}", i, repeat=pattern, missed_fires=policy, limit=limit
        )
    with (
        Process("scheduler", server.url, queue_name, "a") as a,
        Process("scheduler", server.url, queue_name, "b") as b,
        Process("scheduler", server.url, queue_name, "c") as c,
    ):
        await stream_of(redis, keys.stream, 100)
        holder = (await redis("GET", keys.scheduler_lock)).decode()
        leading = next(one for one in (a, b, c) if one.holder == holder)

        async def other_leads() -> bool:
            return (await redis("GET", keys.scheduler_lock)) not in (None, holder.encode())

        if fate == "killed":
            leading.kill()
        elif fate == "ended":
            assert leading.end() == 0
        else:
            leading.stop()
        await eventually(other_leads)
        if fate == "stopped":
            await asyncio.sleep(10)
            leading.resume()

        async def all_gone() -> bool:
            return not await redis("EXISTS", keys.repeat)

        async with asyncio.timeout(40):
            while not await redis("XLEN", keys.stream) >= 10_000:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await eventually(all_gone)
    found = await fires(redis, keys)
    assert [found.count(i) for i in range(3)] == [4_990, 4_990, 20]
