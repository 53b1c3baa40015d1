"""Delayed jobs, results, counts, pause, backlog, and the end of a queue."""

import asyncio
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui._core.envelope import encode_delayed_member, encode_envelope
from chasqui.errors import NotSupportedError, PayloadError, PayloadTooLargeError, QueueFullError
from chasqui.model.keys import Keys
from chasqui.scripts import adding
from tests.producing.conftest import now_ms
from tests.proxy import Proxy
from tests.servers import Server


@pytest.mark.parametrize("options", [{}, {"job_id": "mine"}], ids=["own id", "given id"])
async def test_a_delayed_job_is_cancelled(
    options: dict[str, Any], queue: Any, redis: redis_py.Redis, keys: Keys
):
    job = await queue.add("mail", 1, delay_ms=60_000, **options)
    assert await queue.cancel_delayed(job.id)
    assert not await queue.cancel_delayed(job.id)
    assert redis.exists(keys.delayed, keys.didx(job.id), keys.dlid(job.id)) == 0
    assert (await queue.add("mail", 1, delay_ms=60_000, **options)).is_new


async def test_what_cannot_be_cancelled(queue: Any, redis: redis_py.Redis, keys: Keys):
    now = await queue.add("mail", 1)
    due = await queue.add("mail", 1, delay_ms=60_000, job_id="due")
    redis.zrem(keys.delayed, redis.get(keys.didx("due")))  # what a promotion does
    assert await queue.cancel_delayed_bulk([now.id, due.id, "nobody's", ""]) == [False] * 4
    assert redis.exists(keys.dlid("due"))  # it runs: its id stays taken


async def test_only_the_id_of_a_job_that_never_ran_is_free_again(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    sizes, names = (0, 100, 300, 70_000), ("a", "b" * 40, "c" * 256)
    for size, job_id, attempt in itertools.product(sizes, names, (0, 1, 200, 70_000)):
        redis.set(keys.dlid(job_id), "1")
        envelope = encode_envelope(job_id, b"x" * size, now_ms(), attempt)
        member = encode_delayed_member("näme", envelope)
        redis.zadd(keys.delayed, {member: now_ms() + 60_000})
        redis.set(keys.didx(job_id), member)
        assert await queue.cancel_delayed(job_id)
        assert redis.exists(keys.dlid(job_id)) == (attempt > 0)


async def test_a_member_that_is_no_job_is_cancelled(queue: Any, redis: redis_py.Redis, keys: Keys):
    for member in (b"", b"abc", b"\x00\x00\x00\x00", b"\xff" * 9, b"\x00\x00\x00\x00\x94\xc0"):
        redis.set(keys.dlid("odd"), "1")
        redis.set(keys.didx("odd"), member)
        redis.zadd(keys.delayed, {member: 2**50})
        assert await queue.cancel_delayed("odd")
        assert redis.exists(keys.delayed, keys.didx("odd")) == 0


async def test_many_are_cancelled_at_once(queue: Any, redis: redis_py.Redis, keys: Keys):
    entries = [
        {"name": "n", "data": n, "delay_ms": 60_000, **({"job_id": f"i{n}"} if n % 2 else {})}
        for n in range(601)
    ]
    jobs = await queue.add_bulk(entries)
    wanted = [job.id for job in jobs if job.data % 3]
    mixed = [one for job_id in wanted for one in (job_id, f"not-{job_id}")]
    assert await queue.cancel_delayed_bulk(mixed) == [True, False] * len(wanted)
    assert redis.zcard(keys.delayed) == 601 - len(wanted)
    assert await queue.cancel_delayed_bulk([]) == []


async def test_ids_of_any_iterable(queue: Any, redis: redis_py.Redis, keys: Keys):
    ids = [(await queue.add("n", n, delay_ms=60_000)).id for n in range(3)]
    redis.set(keys.result(ids[0]), b"\x05")
    assert await queue.get_job_result_bulk(one for one in ids) == [5, None, None]
    assert await queue.cancel_delayed_bulk(dict.fromkeys(ids).keys()) == [True] * 3


async def test_a_delayed_job_is_rescheduled(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.add("mail", 1, delay_ms=60_000, job_id="mine")
    member = redis.get(keys.didx("mine"))

    def due() -> int:
        assert redis.zcard(keys.delayed) == 1
        return int(redis.zscore(keys.delayed, member))

    assert await queue.reschedule(job.id, delay_ms=7_200_000)
    assert due() - now_ms() == pytest.approx(7_200_000, abs=5000)
    assert 10_790 <= redis.ttl(keys.didx("mine")) <= 10_800
    assert 10_790 <= redis.ttl(keys.dlid("mine")) <= 10_800
    assert await queue.reschedule(job.id, delay=timedelta(seconds=30))
    assert due() - now_ms() == pytest.approx(30_000, abs=5000)
    assert await queue.reschedule(job.id, delay_ms=datetime.now() - timedelta(days=9))
    assert due() <= now_ms()
    redis.zrem(keys.delayed, member)
    assert not await queue.reschedule(job.id, delay_ms=1)
    assert not await queue.reschedule("nobody's", delay_ms=1)
    assert redis.zcard(keys.delayed) == 0


async def test_a_reschedule_that_is_sent_again_is_told_what_the_first_did(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    job = await queue.add("mail", 1, delay_ms=60_000)
    member = redis.get(keys.didx(job.id))
    names = [keys.delayed, keys.didx(job.id), keys.dlid(job.id), keys.wake]
    names += [keys.trace(job.id), keys.traces, keys.flags("producer", 1)]
    again = (adding.RESCHEDULE.source, len(names), *names, 600_000, 1, 600)
    assert redis.eval(*again) == 1
    due = redis.zscore(keys.delayed, member)
    assert redis.eval(*again) == 1
    assert redis.zscore(keys.delayed, member) == due
    redis.zrem(keys.delayed, member)  # what a promotion does
    assert redis.eval(*again) == 1


async def test_a_new_earliest_job_wakes_the_promoter(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.add("mail", 1, delay_ms=60_000)
    assert redis.rpop(keys.wake) == b"1"
    await queue.add("mail", 2, delay_ms=70_000)
    assert not redis.exists(keys.wake)
    await queue.reschedule(job.id, delay_ms=50_000)
    await queue.add("mail", 3, delay_ms=40_000)
    assert redis.llen(keys.wake) == 1  # it is awake already
    assert 0 < redis.ttl(keys.wake) <= 60  # nobody may be there to take it


async def test_results(queue: Any, redis: redis_py.Redis, keys: Keys):
    redis.set(keys.result("a"), msgpack.packb({"x": [1, b"y"]}))
    assert await queue.get_job_result("a") == {"x": [1, b"y"]}
    assert await queue.get_job_result("b") is None
    assert await queue.get_job_result_bulk(["b", "a", "b"]) == [None, {"x": [1, b"y"]}, None]
    assert await queue.get_job_result_bulk([]) == []
    assert await queue.wait_for_result("a") == {"x": [1, b"y"]}
    with pytest.raises(TimeoutError, match="job b has no result"):
        await queue.wait_for_result("b", timeout=0.05, poll_interval=0.01)


@pytest.mark.slow
async def test_results_beyond_what_one_command_takes(queue: Any, redis: redis_py.Redis, keys: Keys):
    """A server takes a command of a million words; Redis 6.2 hangs up on a longer one."""
    last = (1 << 20) + 1
    for number in (0, 4999, 5000, last):
        redis.set(keys.result(str(number)), msgpack.packb(number))
    found = await queue.get_job_result_bulk([str(number) for number in range(last + 1)])
    assert len(found) == last + 1
    assert [value for value in found if value is not None] == [0, 4999, 5000, last]
    assert found[4999:5001] == [4999, 5000]


async def test_a_result_that_cannot_be_read_is_named(queue: Any, redis: redis_py.Redis, keys: Keys):
    redis.set(keys.result("whole"), msgpack.packb(1))
    redis.set(keys.result("broken"), b"\xc1")
    redis.set(keys.result("long"), msgpack.packb(bytes(1 << 20)))
    with pytest.raises(PayloadError, match="result of job broken cannot be read"):
        await queue.get_job_result_bulk(iter(["whole", "gone", "broken"]))
    with pytest.raises(PayloadTooLargeError, match="result of job long takes"):
        await queue.get_job_result_bulk(["whole", "long"])


async def test_a_result_is_waited_for(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.add("mail", 1)
    waiting = asyncio.create_task(queue.wait_for_result(job.id, poll_interval=0.01))
    while not (await queue.counts()).waiting:  # other calls go on meanwhile
        pass
    redis.set(keys.result(job.id), msgpack.packb("done"))
    assert await waiting == "done"


async def test_counts(
    queue: Any, redis: redis_py.Redis, keys: Keys, bury: Callable[..., list[str]]
):
    nothing = await queue.counts()
    assert (nothing.waiting, nothing.oldest_ms) == (0, 0)
    redis.xadd(keys.stream, {"d": b""}, id=f"{now_ms() - 600_000}-0")
    await queue.add_bulk([{"name": "n", "data": n} for n in range(4)])
    await queue.add("n", 1, delay_ms=60_000)
    await queue.upsert_repeatable_job("n", 1, repeat={"kind": "every", "interval_ms": 60_000})
    bury(3)
    redis.xgroup_create(keys.stream, "default", "0")
    redis.xreadgroup("default", "me", {keys.stream: ">"}, count=2)
    redis.xgroup_create(keys.stream, "other", "0")
    await queue.pause()
    counts = await queue.counts()
    assert (counts.waiting, counts.pending, counts.delayed) == (3, 2, 1)
    assert (counts.dlq, counts.repeatables, counts.is_paused) == (3, 1, True)
    assert counts.oldest_ms == pytest.approx(600_000, abs=60_000)
    assert (await queue.counts("other")).pending == 0
    redis.xtrim(keys.stream, maxlen=0, approximate=False)
    assert (await queue.counts()).waiting == 0


async def test_counts_are_one_round_trip(
    queue_at: Callable[..., Any], server: Server, make_proxy: Callable[[str], Proxy]
):
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url)
    await queue.counts()  # now the server knows the script
    before = len(proxy.reads)
    await queue.counts()
    assert proxy.reads[before:] == [1]


async def test_pause_and_resume(queue: Any, redis: redis_py.Redis, keys: Keys):
    assert not await queue.is_paused()
    await queue.pause()
    await queue.pause()
    assert await queue.is_paused()
    assert redis.ttl(keys.paused) == -1
    await queue.resume()
    await queue.resume()
    assert not await queue.is_paused()


async def test_a_queue_is_obliterated(
    make_queue: Callable[..., Any],
    queue_name: str,
    redis: redis_py.Redis,
    keys: Keys,
    bury: Callable[..., list[str]],
):
    queue, neighbour = make_queue(), make_queue(f"{queue_name}-2")
    await neighbour.add("n", 1, job_id="a")
    for fill, empty in (
        (lambda: queue.add("n", 1), keys.stream),
        (lambda: queue.add("n", 1, delay_ms=60_000), keys.delayed),
        (lambda: asyncio.to_thread(bury, 1), keys.dlq),
    ):
        await fill()
        with pytest.raises(NotSupportedError, match="force=True"):
            await queue.obliterate()
        redis.delete(empty)
    await queue.add("n", 1)
    redis.xgroup_create(keys.stream, "default", "0")
    redis.xreadgroup("default", "me", {keys.stream: ">"})
    with pytest.raises(NotSupportedError, match="0 waiting, 1 pending"):
        await queue.obliterate()
    redis.delete(keys.stream)
    assert await queue.obliterate() > 0
    assert list(redis.scan_iter(keys.pattern)) == []
    await queue.add_bulk([{"name": "n", "data": n, "job_id": str(n)} for n in range(3000)])
    assert await queue.obliterate(force=True) > 3000
    assert list(redis.scan_iter(keys.pattern)) == []
    assert (await neighbour.counts()).waiting == 1
    assert await queue.obliterate() == 0


# ── Backlog ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("names", [1, 2], ids=["one name", "two names"])
async def test_a_full_queue_refuses(
    names: int, make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
):
    queue = make_queue(max_backlog=600)
    plain = [{"name": f"n{n % names}", "data": n} for n in range(301)]
    await queue.add_bulk(plain[:300])
    with pytest.raises(QueueFullError, match="is full: 300 jobs wait, max_backlog is 600") as full:
        await queue.add_bulk(plain)
    assert (full.value.depth, full.value.limit) == (300, 600)
    mixed = [{"name": "n", "data": n, "job_id": str(n)} for n in range(301)]
    with pytest.raises(QueueFullError):
        await queue.add_bulk(mixed)
    assert redis.xlen(keys.stream) == 300
    await queue.add_bulk(mixed[:300])
    for options in ({}, {"job_id": "x"}, {"attempts": 2}):
        with pytest.raises(QueueFullError):
            await queue.add("n", 1, **options)
    delayed = [{"name": "n", "data": n, "delay_ms": 60_000} for n in range(700)]
    await queue.add_bulk(delayed)  # they wait elsewhere
    with pytest.raises(QueueFullError):
        await queue.add_bulk([*delayed, {"name": "n", "data": 1}])
    assert (redis.xlen(keys.stream), redis.zcard(keys.delayed)) == (600, 700)


@pytest.mark.parametrize("delay_ms", [3_600_000, datetime(2040, 1, 1)], ids=["delay", "moment"])
async def test_delayed_jobs_take_no_room_in_a_mixed_bulk(
    delay_ms: Any, make_queue: Callable[..., Any]
):
    queue = make_queue(max_backlog=1, max_delay_secs=0)
    delayed = {"name": "n", "data": 1, "delay_ms": delay_ms}
    await queue.add_bulk([delayed, {"name": "n", "data": 2}, {**delayed, "job_id": "mine"}])
    counts = await queue.counts()
    assert (counts.waiting, counts.delayed) == (1, 2)
    with pytest.raises(QueueFullError):
        await queue.add_bulk([delayed, {"name": "n", "data": 2}])


async def test_a_full_queue_is_waited_for(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Server,
    redis: redis_py.Redis,
    keys: Keys,
):
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url, max_backlog=2, on_full="wait")
    await queue.add_bulk([{"name": "n", "data": n} for n in range(2)])
    before = proxy.count("EVALSHA")
    waiting = asyncio.create_task(queue.add("n", 2, job_id="third"))
    # Refused twice: it comes once more.
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("EVALSHA") >= before + 3)
    assert not waiting.done()
    redis.xtrim(keys.stream, maxlen=1, approximate=False)
    assert (await waiting).id == "third"
    assert redis.xlen(keys.stream) == 2
    with pytest.raises(ValueError, match="3 jobs at once never fit into max_backlog=2"):
        await queue.add_bulk([{"name": "n", "data": n} for n in range(3)])
