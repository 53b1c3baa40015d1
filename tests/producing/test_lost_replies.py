"""Links that drop before, at or after any command: what a caller is told is what happened.

An add that raised nothing is there exactly once; one that raised OutcomeUnknownError at most once;
one that raised anything else is not there. Other calls answer as if nothing had been lost.
"""

import asyncio
import gc
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui.errors import ChasquiError, OutcomeUnknownError
from chasqui.model.job import RepeatPattern
from chasqui.model.keys import Keys
from chasqui.producing.chunks import PAGE_BITS
from chasqui.producing.new_jobs import NewJobs
from chasqui.queue import Queue
from chasqui.scripts import adding
from tests.fixtures import until
from tests.proxy import Fault, Proxy
from tests.servers import KINDS, Server

pytestmark = pytest.mark.both_loops(on="redis-8.6")

Step = Callable[[Any], Awaitable[Any]]

_BULK = [{"name": "n", "data": n} for n in range(600)]
_MIXED = [
    {"name": "n", "data": n, **[{}, {"delay_ms": 60_000}, {"job_id": f"id-{n}"}][n % 3]}
    for n in range(600)
]

ADDS: dict[str, tuple[int, Step]] = {
    "add": (1, lambda queue: queue.add("n", 1)),
    "add with id": (1, lambda queue: queue.add("n", 1, job_id="mine")),
    "add delayed": (1, lambda queue: queue.add("n", 1, delay_ms=60_000)),
    "add delayed with id": (1, lambda queue: queue.add("n", 1, delay_ms=60_000, job_id="mine")),
    "bulk": (600, lambda queue: queue.add_bulk(_BULK)),
    "mixed bulk": (600, lambda queue: queue.add_bulk(_MIXED)),
}

#: Before it, the call itself, and what it answers whatever is lost.
OTHERS: dict[str, tuple[Step, Step, Any]] = {
    "cancel": (
        lambda queue: queue.add("n", 1, delay_ms=60_000, job_id="mine"),
        lambda queue: queue.cancel_delayed_bulk(["mine", "not mine"]),
        [True, False],
    ),
    "reschedule": (
        lambda queue: queue.add("n", 1, delay_ms=60_000, job_id="mine"),
        lambda queue: queue.reschedule("mine", delay_ms=5000),
        True,
    ),
    "upsert": (
        lambda queue: queue.is_paused(),
        lambda queue: _upsert(queue),
        "n::every:60000",
    ),
    "remove": (
        lambda queue: _upsert(queue),
        lambda queue: queue.remove_repeatable_by_key("n::every:60000"),
        True,
    ),
    "pause": (lambda queue: queue.resume(), lambda queue: queue.pause(), None),
    "resume": (lambda queue: queue.pause(), lambda queue: _resume(queue), False),
    "results": (lambda queue: queue.resume(), lambda queue: queue.get_job_result("x"), None),
    "list": (lambda queue: _upsert(queue), lambda queue: _listed(queue), ["n::every:60000"]),
    "counts": (lambda queue: queue.add("n", 1), lambda queue: _waiting(queue), 1),
    # How many keys it deleted is not among what is promised.
    "obliterate": (lambda queue: queue.add("n", 1), lambda queue: _obliterate(queue), 0),
}

#: What a fault may be put at; the scripts, which are met first, are counted one ahead.
_COMMANDS = ("EVALSHA", "EVAL", "TIME", "SET", "MGET", "DEL", "EXISTS", "SCAN", "UNLINK", "ZRANGE")


async def _upsert(queue: Any) -> str:
    job = await queue.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(60_000))
    key: str = job.id
    return key


async def _resume(queue: Any) -> bool:
    await queue.resume()
    is_paused: bool = await queue.is_paused()
    return is_paused


async def _listed(queue: Any) -> list[str]:
    return [spec.key for spec in await queue.get_repeatable_jobs()]


async def _waiting(queue: Any) -> int:
    waiting: int = (await queue.counts()).waiting
    return waiting


async def _obliterate(queue: Any) -> int:
    await queue.obliterate(force=True)
    return await _waiting(queue)


def jobs_in(redis: redis_py.Redis, keys: Keys) -> list[str]:
    """The ids of all jobs, waiting and delayed."""
    waiting = [fields[b"d"] for _, fields in redis.xrange(keys.stream)]
    delayed = [member[5:] for member in redis.zrange(keys.delayed, 0, -1)]
    return [msgpack.unpackb(envelope)[0] for envelope in (*waiting, *delayed)]


@pytest.fixture
def break_it(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    queue_name: str,
    redis: redis_py.Redis,
) -> Callable[..., Any]:
    """Carries out a step with a fault at its nth command; gives the keys, and what came of it."""
    numbers = itertools.count()

    async def run(
        step: Step, fault: Fault | None, nth: int, *, before: Step | None = None, is_cold: bool
    ) -> tuple[Keys, Any, list[bytes]]:
        keys = Keys(f"{queue_name}-{next(numbers)}")
        proxy = make_proxy(server.url)
        # Only an answer that never comes costs this much.
        timeout_s = 0.3 if fault is Fault.SWALLOW else 10.0
        queue = make_queue(keys.queue, redis_url=proxy.url, request_timeout_s=timeout_s)
        await queue.is_paused()
        if before is not None:
            await before(queue)
        if is_cold:
            redis.script_flush()
        start = len(proxy.commands)
        if fault is not None:
            for name in _COMMANDS:
                count = nth if name == "EVALSHA" else nth - 1
                if count > 0:
                    proxy.fail(fault, name, nth=count)
        outcome: Any
        try:
            outcome = await step(queue)
        except ChasquiError as error:
            outcome = error
        seen = proxy.commands[start:]
        await queue.close()
        proxy.close()
        return keys, outcome, seen

    return run


CASES = [
    (fault, nth, is_cold)
    for is_cold in (False, True)
    for nth in (1, 2, 3)
    for fault in (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.SWALLOW, Fault.GARBAGE)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDS)
async def test_an_add_tells_the_truth(
    name: str, break_it: Callable[..., Any], redis: redis_py.Redis
):
    count, step = ADDS[name]
    unknown = 0
    for fault, nth, is_cold in CASES:
        keys, outcome, seen = await break_it(step, fault, nth, is_cold=is_cold)
        there = jobs_in(redis, keys)
        told = f"{fault} at {nth}, cold: {is_cold}, {outcome!r:.200}, saw {seen}"
        assert len(there) == len(set(there)), told
        if isinstance(outcome, OutcomeUnknownError):
            unknown += 1
            assert len(there) <= count, told
            assert fault is Fault.SWALLOW, told  # a link that drops is made good
        elif isinstance(outcome, Exception):
            assert there == [], told
        else:
            jobs = outcome if isinstance(outcome, list) else [outcome]
            assert sorted(job.id for job in jobs) == sorted(there), told
            assert all(job.is_new for job in jobs), told
    assert unknown > 0


@pytest.mark.fault(16)
@pytest.mark.parametrize("name", OTHERS)
async def test_other_calls_answer_the_same(name: str, break_it: Callable[..., Any]):
    before, step, expected = OTHERS[name]
    repeated = 0
    for nth in (1, 2):
        for fault in (Fault.CUT_BEFORE, Fault.CUT_AFTER):
            for is_cold in (False, True):
                _, outcome, seen = await break_it(step, fault, nth, before=before, is_cold=is_cold)
                assert outcome == expected, f"{fault} at {nth}, cold: {is_cold}, saw {seen}"
                repeated += len(set(seen)) < len(seen)
    assert repeated > 0


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
async def test_a_replay_counts_each_job_once(
    fault: Fault,
    queue_name: str,
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
    bury: Callable[..., list[str]],
):
    bury(600)
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    proxy.fail(fault, "XRANGE", nth=2)
    proxy.fail(fault, "EVALSHA", nth=2)
    assert await queue.replay_dlq(1000) == 600
    assert redis.xlen(keys.stream) == 600
    assert redis.xlen(keys.dlq) == 0


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
async def test_dead_jobs_are_listed_and_deleted_whole(
    fault: Fault,
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
    bury: Callable[..., list[str]],
):
    bury(600)
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    proxy.fail(fault, "XRANGE", nth=2)
    assert len(await queue.peek_dlq(1000)) == 600
    proxy.fail(fault, "XRANGE", nth=2)
    proxy.fail(fault, "EVALSHA", nth=2)
    deleted = await queue.delete_dlq(1000)
    assert proxy.accepted == 4
    assert redis.xlen(keys.dlq) == 0
    # What was deleted before its answer was lost is not counted.
    assert deleted == 600 if fault is Fault.CUT_BEFORE else 0 < deleted < 600


@pytest.mark.fault(17)
@pytest.mark.parametrize("direction", ["to server", "to client"])
async def test_a_bulk_whose_link_dies_in_the_middle(
    direction: str,
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    queue_name: str,
    redis: redis_py.Redis,
):
    """No duplicate and no gap, wherever in its 5,000 jobs the cut falls."""
    entries = [{"name": "n", "data": n} for n in range(5000)]
    places = (1, 30_000, 111_111, 250_000) if direction == "to server" else (1, 5, 30, 70)
    for place in places:
        keys = Keys(f"{queue_name}-{place}")
        proxy = make_proxy(server.url)
        queue = make_queue(keys.queue, redis_url=proxy.url)
        await queue.is_paused()
        proxy.cut_after_bytes(place, to_server=direction == "to server")
        jobs = await queue.add_bulk(entries)
        assert proxy.accepted == 2
        there = [msgpack.unpackb(fields[b"d"]) for _, fields in redis.xrange(keys.stream)]
        assert sorted(fields[0] for fields in there) == [job.id for job in jobs]
        assert sorted(msgpack.unpackb(fields[1]) for fields in there) == list(range(5000))


async def test_chunks_are_known_across_pages_of_the_bitmap(
    server: Any,
    queue_name: str,
    make_proxy: Callable[[str], Proxy],
    redis: redis_py.Redis,
    keys: Keys,
):
    proxy = make_proxy(server.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        encoder = queue._operations.encoder
        encoder._own[os.getpid()] = (encoder.producer_id, itertools.count(PAGE_BITS - 3))
        for n in range(6):
            if n in (2, 3):  # the last of one page and the first of the next
                proxy.fail(Fault.CUT_AFTER, "EVALSHA")
            await queue.add("n", n)
        page_keys = [keys.applied(encoder.producer_id, page) for page in (0, 1)]
    assert [redis.bitcount(key) for key in page_keys] == [3, 3]
    assert all(3500 < redis.ttl(key) <= 3600 for key in page_keys)
    assert len(set(jobs_in(redis, keys))) == redis.xlen(keys.stream) == 6


@pytest.mark.fault(16)
@pytest.mark.slow
@pytest.mark.parametrize("command", ["EVAL", "WAITAOF"])
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_durable_add_whose_link_dies(
    kind: str,
    command: str,
    fault: Fault,
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    private_server: Callable[..., Server],
    keys: Keys,
):
    server = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable=True)
    jobs = [await queue.add("n", 0)]
    for options in ({}, {"job_id": "mine"}, {"delay_ms": 60_000}):
        proxy.fail(fault, command)
        jobs.append(await queue.add("n", 1, **options))
    proxy.fail(fault, command)
    jobs += await queue.add_bulk(_BULK)
    with redis_py.Redis.from_url(server.url) as redis:
        assert sorted(jobs_in(redis, keys)) == sorted(job.id for job in jobs)


@pytest.mark.fault(14)
@pytest.mark.slow
async def test_a_server_that_goes_away_for_good(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
):
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url, request_timeout_s=2)
    await queue.add("n", 0)
    proxy.is_refusing = True
    proxy.fail(Fault.CUT_AFTER, "EVALSHA")
    with pytest.raises(OutcomeUnknownError):
        await queue.add("n", 1)
    assert redis.xlen(keys.stream) == 2
    with pytest.raises(ConnectionError):  # nothing of it was sent
        await queue.add("n", 2)
    proxy.is_refusing = False
    while True:  # dials are spaced out by now
        try:
            await queue.add("n", 3)
            break
        except ConnectionError:
            assert redis.xlen(keys.stream) == 2
    assert redis.xlen(keys.stream) == 3


async def test_a_bulk_that_is_closed_in_its_middle(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
):
    """Some chunks are in, others were not even made: it is not said that nothing was added."""
    stray: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    await queue.is_paused()
    proxy.delay_s = 0.01
    entries = [{"name": "n", "data": "x" * 100_000} for n in range(300)]
    adding = asyncio.create_task(queue.add_bulk(entries))
    await until(lambda: redis.xlen(keys.stream) > 0)
    await queue.close()
    with pytest.raises(OutcomeUnknownError):
        await adding
    del adding
    gc.collect()
    assert stray == []


@pytest.mark.parametrize("count", [3, 300], ids=["one chunk", "several"])
async def test_a_bulk_for_whose_jobs_there_is_no_memory(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys, count: int,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """They are made after it was sent: it is not said that nothing was added."""

    def refuse(*_: object) -> list[Any]:
        raise MemoryError

    queue = make_queue()
    await queue.add_bulk(_BULK[:1])  # there is a link, and the server has the script
    monkeypatch.setattr(NewJobs, "jobs", refuse)
    with pytest.raises(OutcomeUnknownError):
        await queue.add_bulk(_BULK[:count])
    await until(lambda: redis.xlen(keys.stream) == 1 + count)


async def test_a_queue_closed_with_adds_in_flight(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
):
    stray: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    await queue.add("n", "first")
    proxy.stall()
    adds = [asyncio.create_task(queue.add("n", n)) for n in range(4)]
    adds.append(asyncio.create_task(queue.add_bulk(_BULK)))
    for _ in range(3):
        await asyncio.sleep(0)  # a turn to begin, and one to be written in
    await queue.close()
    outcomes = await asyncio.gather(*adds, return_exceptions=True)
    proxy.resume()
    assert all(isinstance(outcome, ChasquiError) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, OutcomeUnknownError) for outcome in outcomes), outcomes
    del adds, outcomes
    gc.collect()
    assert stray == []


@pytest.mark.fault(21)
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_memory_is_told_by_a_server_that_has_none(
    kind: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    """The repeat of an add that is in, and one for which there is no room."""
    server, keys = private_server(kind), Keys(queue_name)
    with redis_py.Redis.from_url(server.url) as redis:

        def add(bit: int, most: int | str = "") -> Any:
            names = (keys.stream, keys.applied("producer", 0))
            arguments = (bit, 600, "", most, 1, "mail", b"envelope")
            return redis.eval(adding.ADD.source, len(names), *names, *arguments)

        assert add(1) == 1
        redis.config_set("maxmemory", 1)
        assert add(1) == 0
        assert add(2, 1) == [1]
        with pytest.raises(redis_py.ResponseError, match="maxmemory"):
            add(2)
        redis.config_set("maxmemory", 0)
        assert add(2) == 1
        assert redis.xlen(keys.stream) == 2
