"""The dead-letter queue: looked through, replayed, deleted, by every way to say which."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui.errors import PayloadError
from chasqui.model.keys import Keys
from tests.proxy import Proxy

Bury = Callable[..., list[str]]


async def listed(queue: Any, **options: Any) -> list[Any]:
    return [job async for job in queue.iter_dlq(**options)]


async def test_a_replayed_job_is_not_answered_with_the_result_of_another(
    queue: Any, redis: redis_py.Redis, keys: Keys, bury: Bury
):
    bury(3)
    for number in range(3):
        redis.set(keys.result(f"job-{number}"), msgpack.packb(number))
    assert await queue.replay_dlq(2) == 2
    found = await queue.get_job_result_bulk([f"job-{number}" for number in range(3)])
    assert found == [None, None, 2]


async def test_peek(queue: Any, redis: redis_py.Redis, keys: Keys, bury: Bury):
    assert await queue.peek_dlq() == []
    (first,) = bury(1)
    redis.xadd(keys.dlq, {"d": b"", "source_id": "2-2", "reason": "malformed", "detail": "é"})
    bury(30)
    whole, broken, *_ = found = await queue.peek_dlq()
    assert len(found) == 20
    assert list(whole.items()) == [
        ("dlq_id", first),
        ("source_id", "1-1"),
        ("reason", "failed"),
        ("detail", None),
        ("payload", msgpack.packb(["job-0", msgpack.packb(0), 1, 3])),
        ("name", "mail"),
    ]
    assert (broken["payload"], broken["detail"], broken["name"]) == (b"", "é", "")
    assert len(await queue.peek_dlq(limit=1000)) == 32
    assert await queue.peek_dlq(0) == []


async def test_what_is_known_of_a_dead_job(queue: Any, redis: redis_py.Redis, keys: Keys):
    redis.xadd(
        keys.dlq,
        {
            "d": msgpack.packb(["id", msgpack.packb({"a": 1}), 5, 2]),
            "source_id": "7-7",
            "reason": "retries_exhausted",
            "error": "ValueError: no",
            "traceback": "Traceback",
            "attempts": "3",
            "failed_at": "1234",
            "consumer": "c-1",
        },
    )
    redis.xadd(keys.dlq, {"d": b"\xc1", "source_id": "8-8", "reason": "decode_failed"})
    whole, broken = await listed(queue)
    assert (whole.job_id, whole.data, whole.attempt) == ("id", {"a": 1}, 2)
    assert (whole.error, whole.traceback, whole.attempts) == ("ValueError: no", "Traceback", 3)
    assert (whole.failed_at_ms, whole.consumer) == (1234, "c-1")
    assert (broken.job_id, broken.payload, broken.envelope) == ("", None, b"\xc1")
    with pytest.raises(PayloadError):
        _ = broken.data


async def test_all_of_them_whatever_their_number(queue: Any, bury: Bury):
    ids = bury(2300)
    assert [job.dlq_id for job in await listed(queue)] == ids
    assert len(await queue.peek_dlq(2200)) == 2200


async def test_by_every_condition(queue: Any, bury: Bury):
    a, b, c = (
        bury(5, "mail", "failed"),
        bury(5, "mail", "timeout", first=5),
        bury(5, "ship", "failed", first=10),
    )

    async def ids(**options: Any) -> list[str]:
        return [job.dlq_id for job in await listed(queue, **options)]

    assert await ids(name="mail") == a + b
    assert await ids(reason="failed") == a + c
    assert await ids(name="mail", reason="failed") == a
    assert await ids(where=lambda job: job.data % 5 == 4) == [a[4], b[4], c[4]]
    assert await ids(ids=[c[0], a[1], "1-1", a[1]]) == [a[1], c[0]]
    assert await ids(ids=[c[0], a[1]], name="mail") == [a[1]]
    assert await ids(ids=[]) == []
    for since, until in ((a[0], c[4]), (b[0], b[4]), (c[0], c[4])):
        low, high = (int(one.partition("-")[0]) for one in (since, until))
        times = {
            "since": datetime.fromtimestamp(low / 1000, UTC),
            "until": datetime.fromtimestamp(high / 1000, UTC).replace(tzinfo=None),
        }
        inside = [one for one in a + b + c if low <= int(one.partition("-")[0]) <= high]
        assert await ids(**times) == inside
        assert await ids(ids=a + b + c, **times) == inside
    assert await ids(since=datetime(2100, 1, 1)) == []
    assert await ids(until=datetime(1950, 1, 1)) == []


async def test_replay(queue: Any, redis: redis_py.Redis, keys: Keys, bury: Bury):
    bury(3)
    redis.xadd(keys.dlq, {"d": b"\xc1", "source_id": "8-8", "reason": "decode_failed"})
    redis.xadd(
        keys.dlq,
        {"d": msgpack.packb(["x", b"\1", 1, 9, [5, None]]), "source_id": "9-9", "reason": "r"},
    )
    assert await queue.replay_dlq(2) == 2
    assert await queue.replay_dlq() == 2
    assert await queue.replay_dlq() == 0
    assert [fields for _, fields in redis.xrange(keys.stream)] == [
        *(
            {b"d": msgpack.packb([f"job-{n}", msgpack.packb(n), 1, 0]), b"n": b"mail"}
            for n in range(3)
        ),
        {b"d": msgpack.packb(["x", b"\1", 1, 0, [5, None]])},
    ]
    assert redis.xlen(keys.dlq) == 1  # the one that cannot be read


async def test_a_replay_trims_where_adds_do(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys, bury: Bury
):
    bury(1000)
    assert await make_queue(max_stream_len=10).replay_dlq(1000) == 1000
    assert redis.xlen(keys.stream) < 300  # whole nodes of the stream go


@pytest.mark.parametrize("verb", ["replay_dlq", "delete_dlq"])
async def test_moving_by_every_condition(
    verb: str, queue: Any, redis: redis_py.Redis, keys: Keys, bury: Bury
):
    take = getattr(queue, verb)
    a, b = bury(5, "mail"), bury(5, "ship", "timeout", first=5)
    assert await take(dry_run=True) == 10
    assert await take(3, dry_run=True) == 3
    assert await take(name="ship", dry_run=True) == 5
    assert redis.xlen(keys.dlq) == 10
    assert await take(ids=[a[3], b[0], "5-5"]) == 2
    assert await take(reason="timeout", limit=1) == 1
    assert await take(where=lambda job: job.data == 0) == 1
    assert await take(since=datetime(2100, 1, 1)) == 0
    assert await take(name="mail") == 3
    left = [dlq_id.decode() for dlq_id, _ in redis.xrange(keys.dlq)]
    assert left == b[2:]
    assert redis.xlen(keys.stream) == (7 if verb == "replay_dlq" else 0)
    with pytest.raises(ZeroDivisionError):
        await take(where=lambda job: 1 / 0)
    assert redis.xlen(keys.dlq) == 3


@pytest.mark.parametrize("verb", ["replay_dlq", "delete_dlq"])
async def test_moving_past_one_page(
    verb: str, queue: Any, redis: redis_py.Redis, keys: Keys, bury: Bury
):
    ids = bury(2300)
    take = getattr(queue, verb)
    assert await take(2100, where=lambda job: job.data % 2 == 0) == 1150
    assert await take(2100, ids=ids[:1300]) == 650
    assert await take(10**9) == 500
    assert redis.xlen(keys.dlq) == 0
    if verb == "replay_dlq":
        assert redis.xlen(keys.stream) == 2300


@pytest.mark.parametrize(
    "times",
    [{}, {"until": datetime(2100, 1, 1)}, {"since": datetime(2020, 1, 1)}],
    ids=["ever", "until", "since"],
)
async def test_a_job_that_fails_again_is_not_replayed_again(
    times: dict[str, Any], queue: Any, bury: Bury
):
    """Else one call would turn in a circle for as long as its limit allows."""
    bury(1200)
    seen = 0

    def where(job: Any) -> bool:
        nonlocal seen
        seen += 1
        bury(1, first=seen)  # as if a worker had failed the one before by now
        return True

    assert await queue.replay_dlq(2500, where=where, **times) == 1200


async def test_nor_within_a_small_limit(queue: Any, bury: Bury):
    """The second page holds what the first page's jobs became."""
    bury(501)

    def where(job: Any) -> bool:
        bury(1, first=1)
        return job.data != 0

    assert await queue.replay_dlq(500, where=where) == 500
    bury(3)
    assert await queue.replay_dlq(ids=iter([(await queue.peek_dlq(1))[0]["dlq_id"]])) == 1


async def test_what_is_held_is_bounded_in_bytes(queue: Any, redis: redis_py.Redis, keys: Keys):
    """Half a hundred jobs of a megabyte are fewer than fit into a page."""
    payload = bytes(1 << 20)
    for number in range(50):
        redis.xadd(keys.dlq, {"d": msgpack.packb([f"job-{number}", payload, 1, 3]), "n": "big"})

    async def look_through() -> int:
        return sum([len(job.envelope) >> 20 async for job in queue.iter_dlq()])

    async def peak_mb(deed: Awaitable[int], outcome: int) -> float:
        tracemalloc.start()
        try:
            assert await deed == outcome
            return tracemalloc.get_traced_memory()[1] / (1 << 20)
        finally:
            tracemalloc.stop()

    try:
        assert await peak_mb(queue.replay_dlq(1), 1) < 10
        assert await peak_mb(queue.delete_dlq(1), 1) < 10
        assert await peak_mb(queue.replay_dlq(name="small"), 0) < 40
        assert await peak_mb(look_through(), 48) < 40
        assert await peak_mb(queue.delete_dlq(8), 8) < 20
        assert await peak_mb(queue.replay_dlq(name="big"), 40) < 40
        assert redis.xlen(keys.stream) == 41
    finally:
        redis.delete(keys.dlq, keys.stream)


async def test_a_small_limit_finds_the_one_behind_many_that_cannot_be_meant(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
    bury: Bury,
):
    pipeline = redis.pipeline(transaction=False)
    for _ in range(1000):
        pipeline.xadd(keys.dlq, {"d": b"\xc1", "source_id": "8-8", "reason": "decode_failed"})
    pipeline.execute()
    replayed, left = bury(2)
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    assert await queue.replay_dlq(1) == 1
    assert proxy.count("XRANGE") < 20
    gone = [f"1-{number}" for number in range(1000)]
    before = len(proxy.reads)
    assert await queue.delete_dlq(1, ids=[*gone, replayed]) == 0
    assert await queue.delete_dlq(1, ids=[*gone, left]) == 1
    assert len(proxy.reads) - before < 50
    assert redis.xlen(keys.dlq) == 1000


async def kill(redis: redis_py.Redis, keys: Keys) -> None:
    """Move what waits, or is delayed, to the dead-letter queue, as a worker would."""
    found = [fields[b"d"] for _, fields in redis.xrange(keys.stream)]
    for member in redis.zrange(keys.delayed, 0, -1):
        found.append(member[4 + int.from_bytes(member[:4], "little") :])
    redis.delete(keys.stream, keys.delayed)
    for envelope in found:
        redis.xadd(keys.dlq, {"d": envelope, "n": "mail", "source_id": "1-1", "reason": "failed"})


@pytest.mark.parametrize("delay_ms", [None, 60_000])
async def test_a_deleted_dead_job_frees_its_id(
    queue: Any, redis: redis_py.Redis, keys: Keys, delay_ms: int | None
):
    async def add() -> bool:
        return (await queue.add("mail", 1, job_id="mine", delay_ms=delay_ms)).is_new

    assert await add()
    await kill(redis, keys)
    assert not await add(), "while it is dead its id is taken"
    assert await queue.delete_dlq(dry_run=True) == 1
    assert not await add()
    assert await queue.delete_dlq() == 1
    assert await add()


async def test_a_deleted_dead_job_leaves_the_id_of_a_newer_job_alone(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    first = await queue.add("mail", 1, job_id="mine")
    await kill(redis, keys)
    redis.delete(keys.unique("mine"))  # its time is over
    while (newer := await queue.add("mail", 2, job_id="mine")).created_at_ms == first.created_at_ms:
        redis.delete(keys.unique("mine"))
    assert newer.is_new
    assert await queue.delete_dlq() == 1
    assert not (await queue.add("mail", 3, job_id="mine")).is_new


async def test_dead_jobs_that_cannot_be_read_are_deleted(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    for fields in ({"d": b"no envelope", "reason": "x"}, {"reason": "malformed"}):
        redis.xadd(keys.dlq, fields)
    assert await queue.delete_dlq() == 2
    assert redis.xlen(keys.dlq) == 0


@pytest.mark.parametrize("delay_ms", [None, 60_000])
async def test_an_id_is_freed_by_hand(queue: Any, delay_ms: int | None):
    assert (await queue.add("mail", 1, job_id="mine", delay_ms=delay_ms)).is_new
    assert await queue.free_job_id("mine")
    assert not await queue.free_job_id("mine")
    assert (await queue.add("mail", 2, job_id="mine", delay_ms=delay_ms)).is_new
    with pytest.raises(TypeError, match="job_ids"):
        await queue.free_job_id(5)


async def test_two_replays_at_once_double_nothing(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys, bury: Bury
):
    bury(1500)
    queues = [make_queue() for _ in range(3)]
    counts = await asyncio.gather(*(queue.replay_dlq(10_000) for queue in queues))
    assert sum(counts) == 1500
    assert redis.xlen(keys.stream) == 1500
    assert redis.xlen(keys.dlq) == 0
