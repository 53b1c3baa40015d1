"""The promoter, batch by batch: due jobs go into the stream once, in order, and nothing is lost."""

import struct

import pytest

from chasqui._core.envelope import encode_delayed_member
from chasqui.errors import ServerError
from chasqui.metrics import DlqRouted
from chasqui.metrics.testing import InMemorySink
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts.timing import Promoted
from tests.timed.facts import (
    MakePromoter,
    Redis,
    entries,
    ids_in_stream,
    member,
    put,
    running,
    stream_of,
)


async def test_due_jobs_go_into_the_stream_in_due_order_and_others_stay(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    members = {name: member(f"id-{name}", name) for name in ("third", "first", "second", "")}
    await redis("ZADD", keys.delayed, 3, members["third"], 1, members["first"])
    await redis("ZADD", keys.delayed, 2, members["second"], 4, members[""])
    await redis("ZADD", keys.delayed, 2**52, member("later"))
    promoted = await make_promoter().run_once()
    assert promoted is not None
    assert (promoted.count, promoted.malformed, promoted.depth, promoted.lag_ms) == (4, 0, 1, 0)
    assert promoted.next_due_s is not None
    assert promoted.next_due_s > 3600
    moved = await entries(redis, keys.stream)
    assert [entry.get(b"n") for entry in moved] == [b"first", b"second", b"third", None]
    for entry in moved:
        name = entry.get(b"n", b"").decode()
        assert entry[b"d"] == members[name][4 + len(name) :]


async def test_nothing_to_do_is_told_as_such(make_promoter: MakePromoter):
    assert await make_promoter().run_once() == Promoted(0, 0, 0, 0, None)


async def test_the_markers_of_promoted_jobs_go_and_their_events_carry_the_name(
    keys: Keys, queue: Queue, redis: Redis, make_promoter: MakePromoter
):
    jobs = [await queue.add("mail", {}, delay_ms=1, job_id=f"job-{i}") for i in range(3)]
    loop = make_promoter()
    async with running(loop):
        await stream_of(redis, keys.stream, 3)
        # In the step that promotes them.
        assert not await redis("EXISTS", *(keys.didx(job.id) for job in jobs))
    events = await entries(redis, keys.events)
    assert [event[b"id"].decode() for event in events] == [job.id for job in jobs]
    assert {(event[b"e"], event[b"n"]) for event in events} == {(b"waiting", b"mail")}
    assert all(list(event) == [b"e", b"id", b"ts", b"n", b"created"] for event in events)
    assert [int(event[b"created"]) for event in events] == [job.created_at_ms for job in jobs]


async def test_an_event_tells_when_a_job_was_created_only_if_its_id_does_not(
    keys: Keys, queue: Queue, redis: Redis, make_promoter: MakePromoter
):
    ids = [None, "x", None, "y" * 26, "z" * 40, None]
    jobs = [await queue.add("", {"n": i}, delay_ms=1, job_id=one) for i, one in enumerate(ids)]
    async with running(make_promoter()):
        await stream_of(redis, keys.stream, len(jobs))
    told = {event[b"id"].decode(): event for event in await entries(redis, keys.events)}
    for job, own in zip(jobs, ids, strict=True):
        expected = None if own is None else b"%d" % job.created_at_ms
        assert told[job.id].get(b"created") == expected


async def test_events_can_be_left_out(keys: Keys, redis: Redis, make_promoter: MakePromoter):
    await put(redis, keys, member("a"))
    async with running(make_promoter(has_events=False)):
        await stream_of(redis, keys.stream, 1)
    assert not await redis("EXISTS", keys.events)


@pytest.mark.parametrize("size", [1, 26, 31, 32, 255, 256])
async def test_ids_of_every_length_are_found_in_the_envelope(
    keys: Keys, redis: Redis, make_promoter: MakePromoter, size: int
):
    job_id = "x" * size
    await put(redis, keys, member(job_id))
    await redis("SET", keys.didx(job_id), "its member")
    async with running(make_promoter()):
        await stream_of(redis, keys.events, 1)
    assert (await entries(redis, keys.events))[0][b"id"].decode() == job_id
    assert not await redis("EXISTS", keys.didx(job_id))


async def test_batches_are_no_larger_than_asked_for(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    await put(redis, keys, *(member(f"{i:03}") for i in range(600)))
    loop = make_promoter()
    looks = [await loop.run_once() for _ in range(4)]
    assert [look and look.count for look in looks] == [256, 256, 88, 0]
    assert looks[0] is not None
    assert (looks[0].depth, looks[0].next_due_s) == (344, 0)
    assert looks[0].lag_ms > 10**12, "since 1970"
    assert await ids_in_stream(redis, keys) == [f"{i:03}" for i in range(600)]


async def test_large_jobs_go_in_smaller_batches(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    for i in range(40):
        await put(redis, keys, member(f"{i:02}", payload=b"\xc4\x00" * 150_000))
    loop = make_promoter()
    first = await loop.run_once()
    assert first is not None
    assert first.count == 32
    second = await loop.run_once()
    assert second is not None
    assert (second.count, second.depth) == (8, 0)


async def test_what_is_no_member_goes_to_the_dead_letter_queue_whole(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    bad = [b"", b"\x01", b"\x00\x00\x00", b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"four"]
    await put(redis, keys, *bad, member("good"))
    metrics = InMemorySink()
    loop = make_promoter(metrics=metrics)
    async with running(loop):
        await stream_of(redis, keys.events, 6)
    assert await ids_in_stream(redis, keys) == ["good"]
    dead = await entries(redis, keys.dlq)
    assert {entry[b"d"] for entry in dead} == set(bad)
    assert {entry[b"reason"] for entry in dead} == {b"malformed"}
    assert all(entry[b"detail"] for entry in dead)
    assert not await redis("EXISTS", keys.delayed)
    assert metrics.dlq_count("malformed") == 5
    assert metrics.all(DlqRouted)[0] == DlqRouted("malformed", 0, "")
    events = await entries(redis, keys.events)
    assert sorted(event[b"e"] for event in events) == [b"dlq"] * 5 + [b"waiting"]


async def test_what_cannot_be_buried_holds_up_no_job(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    """It stays until the dead-letter queue takes it, and the reason is told meanwhile."""
    bad = [bytes([n]) for n in range(40)]  # more than are read at a time
    await put(redis, keys, member("before"), *bad)
    await put(redis, keys, *(member(f"{n:02}") for n in range(40)), due_ms=2)
    await redis("SET", keys.dlq, "no stream")
    loop = make_promoter()
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await loop.run_once()
    assert sorted(await ids_in_stream(redis, keys)) == [*(f"{n:02}" for n in range(40)), "before"]
    assert set(await redis("ZRANGE", keys.delayed, 0, -1)) == set(bad)
    await redis("DEL", keys.dlq)
    promoted = await loop.run_once()
    assert promoted is not None
    assert (promoted.count, promoted.malformed, promoted.depth) == (0, 40, 0)


async def test_an_envelope_that_does_not_decode_is_the_workers_to_judge(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    odd = [b"", b"\x94", b"\x94\xd9", b"\x94\xda\x01", b"garbage", b"\x94\xbf"]
    await put(redis, keys, *(encode_delayed_member("n", envelope) for envelope in odd))
    promoted = await make_promoter().run_once()
    assert promoted is not None
    assert (promoted.count, promoted.malformed) == (6, 0)
    assert {entry[b"d"] for entry in await entries(redis, keys.stream)} == set(odd)


async def test_the_stream_is_trimmed_where_that_was_asked_for(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    await put(redis, keys, *(member(f"{i:04}") for i in range(1000)))
    loop = make_promoter(max_stream_len=100, batch=1000)
    await loop.run_once()
    assert 100 <= await redis("XLEN", keys.stream) < 500


@pytest.mark.fault(28)
async def test_nothing_is_lost_where_the_stream_cannot_take_it(
    keys: Keys, redis: Redis, make_promoter: MakePromoter
):
    await put(redis, keys, *(member(f"{i}") for i in range(3)))
    await redis("SET", keys.stream, "no stream")
    loop = make_promoter()
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await loop.run_once()
    assert await redis("ZCARD", keys.delayed) == 3
    await redis("DEL", keys.stream)
    await loop.run_once()
    assert await ids_in_stream(redis, keys) == ["0", "1", "2"]
