"""Repeat specs: written as the wire format has them, listed, removed."""

from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui.model.job import (
    BackoffSpec,
    MissedFiresPolicy,
    RepeatableMeta,
    RepeatPattern,
)
from chasqui.model.keys import Keys
from tests.producing.conftest import now_ms


async def test_an_interval(queue: Any, redis: redis_py.Redis, keys: Keys):
    before = now_ms()
    job = await queue.upsert_repeatable_job("mail", {"a": 1}, repeat=RepeatPattern.every(60_000))
    key = "mail::every:60000"
    assert (job.id, job.name, job.data, job.attempt) == (key, "mail", {"a": 1}, 0)
    ((member, score),) = redis.zrange(keys.repeat, 0, -1, withscores=True)
    assert member == key.encode()
    assert before + 60_000 <= score <= now_ms() + 60_000
    payload = msgpack.packb(msgpack.packb({"a": 1}), use_bin_type=True)
    spec = [key, "mail", {"Every": [60_000]}, payload, None, None, None, 0]
    assert redis.hgetall(keys.repeat_spec(key)) == {b"spec": msgpack.packb(spec, use_bin_type=True)}


async def test_every_option(queue: Any, redis: redis_py.Redis, keys: Keys):
    start, end = now_ms() + 10**7, now_ms() + 10**9
    await queue.upsert_repeatable_job(
        "mail",
        1,
        repeat={"kind": "cron", "expression": "0 2 * * *", "tz": "Europe/Berlin"},
        limit=5,
        start_after_ms=start,
        end_before_ms=end,
        attempts=4,
        backoff=BackoffSpec.fixed(7),
        missed_fires=MissedFiresPolicy.fire_all(3),
        job_id="ignored",
        key="nightly",
    )
    stored = redis.hgetall(keys.repeat_spec("nightly"))
    assert msgpack.unpackb(stored[b"spec"])[2:] == [
        {"Cron": ["0 2 * * *", "Europe/Berlin"]},
        msgpack.packb(b"\1"),
        5,
        start,
        end,
        0,
        {"FireAll": [3]},
    ]
    assert msgpack.unpackb(stored[b"retry"]) == [4, ["fixed", 7, None, None, None]]
    (meta,) = await queue.get_repeatable_jobs()
    assert start < meta.next_fire_ms < start + 86_400_000
    assert meta == RepeatableMeta(
        "nightly",
        "mail",
        RepeatPattern.cron("0 2 * * *", tz="Europe/Berlin"),
        meta.next_fire_ms,
        5,
        start,
        end,
        MissedFiresPolicy.fire_all(3),
    )
    # Without them the next upsert takes them away.
    await queue.upsert_repeatable_job("mail", 1, repeat=RepeatPattern.every(5000), key="nightly")
    assert b"retry" not in redis.hgetall(keys.repeat_spec("nightly"))


async def test_add_with_repeat_is_an_upsert(queue: Any, redis: redis_py.Redis, keys: Keys):
    repeat = RepeatPattern.cron("*/5 * * * *")
    job = await queue.add("mail", 1, repeat=repeat, attempts=2, missed_fires={"kind": "fire-once"})
    assert job.id == "mail::cron:*/5 * * * *:UTC"
    again = await queue.add_unique("mail", 1, job_id="x", repeat=repeat)
    assert again.id == job.id
    assert redis.zcard(keys.repeat) == 1
    assert redis.exists(keys.stream) == 0


async def test_an_upsert_keeps_the_count_of_fires(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.upsert_repeatable_job("mail", 1, repeat=RepeatPattern.every(5000))
    redis.hset(keys.repeat_spec(job.id), "fired", 3)
    await queue.upsert_repeatable_job("mail", 2, repeat=RepeatPattern.every(5000))
    assert redis.hget(keys.repeat_spec(job.id), "fired") == b"3"


async def test_listing_and_removing(
    queue: Any, redis: redis_py.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
):
    assert await queue.get_repeatable_jobs() == []
    for seconds in (30, 10, 20):
        await queue.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(seconds * 1000))
    keyed = [f"n::every:{seconds}000" for seconds in (10, 20, 30)]
    assert [meta.key for meta in await queue.get_repeatable_jobs()] == keyed
    assert [meta.key for meta in await queue.get_repeatable_jobs(1)] == keyed[:1]
    assert await queue.get_repeatable_jobs(0) == []
    redis.hset(keys.repeat_spec(keyed[0]), "spec", b"\xc1")
    redis.zadd(keys.repeat, {"no spec": 1, "no hash": 2})
    redis.set(keys.repeat_spec("no hash"), "a string")
    assert [meta.key for meta in await queue.get_repeatable_jobs()] == keyed[1:]
    assert keyed[0] in caplog.text
    assert "no hash" in caplog.text
    assert await queue.remove_repeatable_by_key(keyed[1])
    assert not await queue.remove_repeatable_by_key(keyed[1])
    assert not redis.exists(keys.repeat_spec(keyed[1]))
    assert [meta.key for meta in await queue.get_repeatable_jobs()] == keyed[2:]
