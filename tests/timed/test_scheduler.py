"""The scheduler, look by look: each fire time of a spec fires once, exactly on its time."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from chasqui._core.envelope import decode_envelope
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import FIRED, Keys
from chasqui.model.payload import decode
from chasqui.queue import Queue
from chasqui.timed.scheduler import Fired
from tests.proxy import Proxy
from tests.servers import Server
from tests.timed.facts import (
    EVERY_MINUTE,
    MINUTE_MS,
    ONCE,
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
    fire_times, rest = divmod(next_ms - due_ms, MINUTE_MS)
    assert fire_times in (11, 12), "12 if a minute began meanwhile"
    assert rest == 0
    assert fired.count == min(most, fire_times)
    assert await redis("XLEN", keys.stream) == fired.count


@pytest.mark.parametrize("pattern", [RepeatPattern.every(1), RepeatPattern.cron("* * * * * *")])
async def test_ten_thousand_missed_fire_times_fire_once_each(
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
    loop = make_scheduler()
    for expected in (1, 1, 0):
        if await score(redis, keys, job.id) is not None:
            await make_due(redis, keys, job.id, ago_ms=0)
        fired = await loop.run_once()
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
    loop = make_scheduler()
    await loop.run_once()
    await redis("ZADD", keys.repeat, end_ms, job.id)

    async def is_gone() -> bool:
        await loop.run_once()
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
        "count with a stroke",
        "count with a zero before it",
        "retry that is none",
        "no hash",
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
    elif content == "count with a stroke":  # a number for Python, none for Redis
        await redis("HSET", hash_key, "fired", "1_0")
    elif content == "count with a zero before it":
        await redis("HSET", hash_key, "fired", "07")
    elif content == "retry that is none":
        await redis("HSET", hash_key, "retry", "garbage")
    elif content == "no hash":
        await redis("DEL", hash_key)
        await redis("SET", hash_key, "a string")
    else:
        await redis("DEL", hash_key)
        for name, value in content.items():
            await redis("HSET", hash_key, name, value)
    good = await queue.upsert_repeatable_job("good", 2, repeat=RepeatPattern.every(90_000))
    due_ms = await make_due(redis, keys, bad.id, ago_ms=90)
    # A page of one: what cannot be read must not keep the others from being seen.
    loop = make_scheduler(batch=1)
    with caplog.at_level(logging.ERROR, "chasqui"):
        for _ in range(3):
            await make_due(redis, keys, good.id, ago_ms=0)
            fired = await loop.run_once()
            assert fired is not None
            assert (fired.count, fired.unreadable) == (1, 1)
    assert await fires(redis, keys) == [2, 2, 2]
    assert [record.name for record in caplog.records].count("chasqui.timed.scheduler") == 1
    assert await score(redis, keys, bad.id) == due_ms
    # Written anew, it fires again.
    if content == "no hash":
        await redis("DEL", hash_key)
    await queue.upsert_repeatable_job("bad", 1, repeat=EVERY_MINUTE, missed_fires=ONCE)
    await redis("HDEL", hash_key, "fired")
    await make_due(redis, keys, bad.id, ago_ms=0)
    fired = await loop.run_once()
    assert fired is not None
    assert fired.unreadable == 0
    assert (await fires(redis, keys))[-1] == 1


async def test_a_member_that_is_no_text_is_left_alone(
    keys: Keys, redis: Redis, make_scheduler: MakeScheduler
):
    await redis("ZADD", keys.repeat, 1, b"\xff\xfe")
    fired = await make_scheduler().run_once()
    assert fired == Fired(0, 1, None)


@pytest.mark.parametrize("score", ["-inf", "-0.5", "-7000"])
async def test_a_spec_whose_time_is_none_is_left_alone(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler, score: str
):
    odd = await queue.upsert_repeatable_job("odd", 1, repeat=EVERY_MINUTE)
    good = await queue.upsert_repeatable_job("good", 2, repeat=RepeatPattern.every(90_000))
    await redis("ZADD", keys.repeat, score, odd.id)
    await make_due(redis, keys, good.id, ago_ms=0)
    fired = await make_scheduler().run_once()
    assert fired is not None
    assert (fired.count, fired.unreadable) == (1, 1)
    assert await fires(redis, keys) == [2]
    assert float(await redis("ZSCORE", keys.repeat, odd.id)) == float(score)


@pytest.mark.parametrize("score", ["inf", "1e300", "253402300799000"])
async def test_a_spec_that_is_ages_away_keeps_nobody_back(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler, score: str
):
    far = await queue.upsert_repeatable_job("far", 1, repeat=EVERY_MINUTE)
    await redis("ZADD", keys.repeat, score, far.id)
    async with running(make_scheduler(tick_interval_ms=10)):
        await queue.upsert_repeatable_job("near", 2, repeat=RepeatPattern.every(30), limit=1)
        await stream_of(redis, keys.stream, 1)
    assert await fires(redis, keys) == [2]
    assert float(await redis("ZSCORE", keys.repeat, far.id)) == float(score)


async def test_large_fires_go_in_smaller_steps(
    server: Server,
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
):
    policy = MissedFiresPolicy.fire_all(1000)
    job = await queue.upsert_repeatable_job(
        "r", "x" * 500_000, repeat=RepeatPattern.every(10), missed_fires=policy, limit=20
    )
    await make_due(redis, keys, job.id, ago_ms=10_000)
    proxy = make_proxy(server.url)
    fired = await make_scheduler(url=proxy.url).run_once()
    assert fired is not None
    assert fired.count == await redis("XLEN", keys.stream) == 20
    steps = proxy.count("EVALSHA") + proxy.count("EVAL")
    assert steps >= 4, "the lock, and eight fires at a time"
