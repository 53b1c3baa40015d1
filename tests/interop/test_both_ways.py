"""One queue, two implementations: what one adds, the other runs, lists, cancels and replays."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import redis as redis_py

from chasqui.model.job import BackoffSpec, MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.servers import Server

Peer = Callable[[str], Any]
DATA = {"to": "ada", "n": [1, -5, 2.5, None, True], "ü": "ä" * 300}


# ── Ours, then theirs ───────────────────────────────────────────────────────────────────────────


async def test_its_worker_runs_what_we_add(queue: Queue, peer: Peer):
    jobs = [
        await queue.add("mail", DATA),
        await queue.add("", 5),
        await queue.add("mail", 1, attempts=3, backoff=BackoffSpec.exponential(5, max_ms=9)),
        await queue.add("mail", 2, job_id="mine"),
        await queue.add("later", 3, delay_ms=150),
        await queue.add("later", 4, delay=timedelta(milliseconds=80), job_id="mine, later"),
        *await queue.add_bulk(
            [
                {"name": "bulk", "data": 6},
                {"name": "bulk", "data": 7, "delay_ms": 60},
                {"name": "bulk", "data": 8, "job_id": "bulk-8", "attempts": 2},
            ]
        ),
    ]
    seen = peer(f"work({len(jobs)}, store_results=True)")
    assert sorted(seen, key=lambda one: one[0]) == sorted(
        ([job.id, job.name, job.data, 0] for job in jobs), key=lambda one: one[0]
    )
    # and ours reads what its worker stored
    results = await queue.get_job_result_bulk([job.id for job in jobs])
    assert results == [{"done": job.data} for job in jobs]
    assert await jobs[0].wait_for_result(timeout=1) == {"done": DATA}
    counts = await queue.counts()
    assert (counts.waiting, counts.pending, counts.delayed) == (0, 0, 0)


class Tracing:
    """Makes no spans, and carries a context all the same."""

    CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    @contextmanager
    def sending(self, queue: str, job_ids: Sequence[str]) -> Iterator[str]:
        yield self.CONTEXT

    @contextmanager
    def processing(self, *arguments: Any) -> Iterator[str]:
        yield self.CONTEXT


async def test_its_worker_runs_what_is_traced(
    queue: Queue, redis_86: Server, queue_name: str, peer: Peer
):
    async with Queue(queue_name, redis_url=redis_86.url, tracing=Tracing()) as traced:
        jobs = [
            await traced.add("mail", DATA),
            await traced.add("", 5),
            await traced.add("later", 6, delay_ms=30),
            await traced.add("mail", 7, job_id="mine"),
        ]
    with redis_py.Redis.from_url(redis_86.url) as redis:
        fields = [entry for _, entry in redis.xrange(Keys(queue_name).stream)]
    assert {entry[b"traceparent"].decode() for entry in fields} == {Tracing.CONTEXT}
    seen = peer(f"work({len(jobs)})")
    assert sorted(one[:3] for one in seen) == sorted([job.id, job.name, job.data] for job in jobs)


async def test_it_honours_the_limits_of_our_jobs(queue: Queue, peer: Peer):
    job = await queue.add("mail", 1, attempts=1)
    other = await queue.add("mail", 2)
    seen = peer("work(2, failing=2)")
    assert {one[0] for one in seen} == {job.id, other.id}
    dead = [one async for one in queue.iter_dlq()]
    assert {one.job_id for one in dead} == {job.id, other.id}
    assert [one["name"] for one in peer("queue.peek_dlq()")] == ["mail", "mail"]


async def test_it_lists_and_cancels_what_we_delay(queue: Queue, peer: Peer):
    jobs = [
        await queue.add("n", 1, delay_ms=60_000),
        await queue.add("n", 2, delay_ms=60_000, job_id="mine"),
        *await queue.add_bulk([{"name": "n", "data": 3, "delay_ms": 60_000}]),
    ]
    assert peer("producer.cancel_delayed('nobody')") is False
    for job in jobs:
        assert peer(f"queue.cancel_delayed({job.id!r})") is True
    assert (await queue.counts()).delayed == 0
    assert (await queue.add("n", 2, delay_ms=60_000, job_id="mine")).is_new
    # A delayed id of ours is taken for it too.
    peer("queue.add_unique('n', 2, job_id='mine', delay_ms=60000)")
    assert (await queue.counts()).delayed == 1


async def test_it_lists_fires_and_removes_our_repeatables(queue: Queue, peer: Peer):
    await queue.upsert_repeatable_job("tick", DATA, repeat=RepeatPattern.every(40), limit=3)
    await queue.upsert_repeatable_job(
        "nightly",
        1,
        repeat=RepeatPattern.cron("0 2 * * *", tz="Europe/Berlin"),
        missed_fires=MissedFiresPolicy.fire_all(3),
        attempts=4,
        end_before_ms=4_000_000_000_000,
    )
    listed = peer("queue.get_repeatable_jobs()")
    ours = await queue.get_repeatable_jobs()
    assert [one["key"] for one in listed] == [one.key for one in ours]
    nightly = listed[1]
    assert nightly["pattern"]["expression"] == "0 2 * * *"
    assert nightly["missed_fires"] == {"kind": "fire-all", "max_catchup": 3}
    assert nightly["end_before_ms"] == 4_000_000_000_000
    assert nightly["next_fire_ms"] == ours[1].next_fire_ms
    seen = peer("work(3)")
    assert [one[1:] for one in seen] == [["tick", DATA, 0]] * 3
    assert peer(f"queue.remove_repeatable_by_key({nightly['key']!r})") is True
    assert "nightly" not in [one.job_name for one in await queue.get_repeatable_jobs()]


async def test_it_replays_what_we_know_as_dead(queue: Queue, peer: Peer):
    job = await queue.add("mail", 1)
    peer("work(1, failing=1)")
    assert peer("queue.replay_dlq()") == 1
    assert (await queue.counts()).dlq == 0
    assert peer("work(1)")[0] == [job.id, "mail", 1, 0]


# ── Theirs, then ours ───────────────────────────────────────────────────────────────────────────


async def test_we_count_list_and_cancel_what_it_adds(queue: Queue, peer: Peer):
    peer("queue.add('mail', {'a': 1})")
    peer("queue.add('later', 1, delay_ms=60000, job_id='mine')")
    peer("queue.add('later', 2, delay_ms=60000)")
    counts = await queue.counts()
    assert (counts.waiting, counts.delayed) == (1, 2)
    assert not (await queue.add("later", 1, delay_ms=60_000, job_id="mine")).is_new
    assert await queue.reschedule("mine", delay_ms=90_000)
    assert await queue.cancel_delayed("mine")
    assert not await queue.cancel_delayed("mine")
    assert peer("queue.add('later', 1, delay_ms=60000, job_id='mine')")[0] == "mine"
    assert (await queue.counts()).delayed == 2


async def test_we_see_and_replay_what_died_with_it(
    queue: Queue, peer: Peer, redis: redis_py.Redis, keys: Keys
):
    for n in range(3):
        peer(f"queue.add('mail', {n}, attempts=2)")
    redis.xadd(keys.stream, {"x": "y"})  # no job at all
    seen = peer("work(3, failing=3)")
    assert len(seen) == 3
    dead = [one async for one in queue.iter_dlq()]
    reasons = {one.reason for one in dead}
    assert len(dead) == 4
    assert "malformed" in reasons
    assert peer("queue.peek_dlq()") == [
        {**one, "payload": one["payload"].hex()} for one in await queue.peek_dlq()
    ]
    assert sorted(one.data for one in dead if one.payload is not None) == [0, 1, 2]
    assert await queue.replay_dlq(reason="malformed") == 0
    assert await queue.replay_dlq(where=lambda one: one.payload is not None and one.data == 1) == 1
    assert await queue.replay_dlq() == 2
    assert [one[3] for one in peer("work(3)")] == [0, 0, 0]


async def test_we_read_its_results(queue: Queue, peer: Peer):
    job_id = peer("queue.add('mail', [1, 'x'])")[0]
    peer("work(1, store_results=True)")
    assert await queue.get_job_result(job_id) == {"done": [1, "x"]}


async def test_we_list_and_remove_its_repeatables(
    queue: Queue, peer: Peer, redis: redis_py.Redis, keys: Keys
):
    peer("queue.upsert_repeatable_job('tick', 1, repeat=RepeatPattern.every(60000), limit=9)")
    peer(
        "queue.upsert_repeatable_job('nightly', 1, repeat=RepeatPattern.cron('0 2 * * *'),"
        " missed_fires=MissedFiresPolicy.fire_once())"
    )
    listed = await queue.get_repeatable_jobs()
    assert [(one.key, one.limit) for one in listed] == [
        ("tick::every:60000", 9),
        ("nightly::cron:0 2 * * *:UTC", None),
    ]
    assert listed[1].missed_fires == MissedFiresPolicy.fire_once()
    # The same spec from us has the same key and the same bytes.
    before = redis.hgetall(keys.repeat_spec("tick::every:60000"))
    await queue.upsert_repeatable_job("tick", 1, repeat=RepeatPattern.every(60_000), limit=9)
    assert redis.hgetall(keys.repeat_spec("tick::every:60000")) == before
    for one in listed:
        assert await queue.remove_repeatable_by_key(one.key)
    assert peer("queue.get_repeatable_jobs()") == []


async def test_both_produce_into_one_queue_at_once(queue: Queue, peer: Peer):
    ours = await queue.add_bulk([{"name": "ours", "data": n} for n in range(600)])
    theirs = peer("queue.add_bulk([{'name': 'theirs', 'data': n} for n in range(600)])")
    started = time.monotonic()
    seen = peer("work(1200, concurrency=100)")
    assert {one[0] for one in seen} == {job.id for job in ours} | {one[0] for one in theirs}
    assert len(seen) == 1200, f"after {time.monotonic() - started:.1f} s"
