"""What an add leaves in Redis, byte for byte."""

import asyncio
import enum
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import pytest
import redis as redis_py

from chasqui.errors import QueueFullError
from chasqui.model.config import Endpoint
from chasqui.model.job import BackoffSpec
from chasqui.model.keys import Keys
from chasqui.producer import Producer
from chasqui.producing import job_options, new_jobs
from chasqui.producing.chunks import ChunkEncoder
from chasqui.producing.coalescing import TURN_JOBS
from chasqui.queue import Queue
from chasqui.scripts import adding
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Request
from tests.producing.conftest import now_ms
from tests.proxy import Proxy
from tests.servers import Server

pytestmark = pytest.mark.both_loops(on="redis-8.6")

DATA = {"to": "ada@example.com", "n": [1, 2.5, None, True, b"x"]}


def envelope(job: Any, data: object, *retry: object) -> bytes:
    payload = msgpack.packb(data, use_bin_type=True)
    fields = [job.id, payload, job.created_at_ms, 0, *retry]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def entries(redis: redis_py.Redis, keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in redis.xrange(keys.stream)]


def members(redis: redis_py.Redis, keys: Keys) -> list[tuple[bytes, int]]:
    return [(m, int(s)) for m, s in redis.zrange(keys.delayed, 0, -1, withscores=True)]


async def test_an_immediate_job(queue: Any, redis: redis_py.Redis, keys: Keys):
    before = now_ms()
    job = await queue.add("mail", DATA)
    assert (job.name, job.data, job.attempt, job.is_new) == ("mail", DATA, 0, True)
    assert before <= job.created_at_ms <= now_ms()
    assert len(job.id) == 26
    ((_, fields),) = redis.xrange(keys.stream)
    assert list(fields.items()) == [(b"d", envelope(job, DATA)), (b"n", b"mail")]
    assert redis.exists(keys.dlid(job.id), keys.didx(job.id), keys.unique(job.id)) == 0


async def test_a_job_without_a_name(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.add("", None)
    assert job.name == ""
    assert entries(redis, keys) == [{b"d": envelope(job, None)}]


@pytest.mark.parametrize(
    ("options", "retry"),
    [
        ({"attempts": 7}, [7, None]),
        ({"backoff": 250}, [None, ["fixed", 250, None, None, None]]),
        (
            {"attempts": 2, "backoff": BackoffSpec.exponential(10, max_ms=99, jitter_ms=3)},
            [2, ["exponential", 10, 99, 2.0, 3]],
        ),
        ({"backoff": {"kind": "fixed", "delay_ms": 5}}, [None, ["fixed", 5, None, None, None]]),
    ],
)
async def test_a_job_with_limits_of_its_own(
    options: dict[str, Any], retry: list[Any], queue: Any, redis: redis_py.Redis, keys: Keys
):
    jobs = [await queue.add("mail", 1, **options)]
    jobs += await queue.add_bulk([{"name": "mail", "data": 1, **options}])
    assert entries(redis, keys) == [{b"d": envelope(job, 1, retry), b"n": b"mail"} for job in jobs]


@pytest.mark.parametrize(
    "delay",
    [{"delay_ms": 60_000}, {"delay_ms": 60_000.9}, {"delay": timedelta(minutes=1)}],
    ids=["int", "float", "timedelta"],
)
async def test_a_delayed_job(delay: dict[str, Any], queue: Any, redis: redis_py.Redis, keys: Keys):
    before = now_ms()
    job = await queue.add("mail", DATA, **delay)
    ((member, due),) = members(redis, keys)
    assert member == b"\x04\0\0\0mail" + envelope(job, DATA)
    assert before + 60_000 <= due <= now_ms() + 60_000
    assert redis.get(keys.didx(job.id)) == member
    assert 3655 <= redis.ttl(keys.didx(job.id)) <= 3660
    assert redis.exists(keys.dlid(job.id), keys.stream) == 0


async def test_a_delayed_job_with_an_id(queue: Any, redis: redis_py.Redis, keys: Keys):
    job = await queue.add("mail", 1, delay_ms=150, job_id="mine")
    assert job.id == "mine"
    ((member, _),) = members(redis, keys)
    assert redis.get(keys.didx("mine")) == member
    created, came = redis.get(keys.dlid("mine")).split()
    assert int(created) == job.created_at_ms
    assert 1_700_000_000_000 < int(came) < (redis.time()[0] + 1) * 1000
    for key in (keys.didx("mine"), keys.dlid("mine")):
        assert 3595 <= redis.ttl(key) <= 3601
    assert not (await queue.add("mail", 1, delay_ms=5, job_id="mine")).is_new
    assert not (await queue.add("mail", 1, job_id="mine")).is_new
    assert redis.zcard(keys.delayed) == 1


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2040, 3, 25, 2, 30, 0, 123_456, ZoneInfo("Europe/Berlin")),
        datetime(2040, 10, 28, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2040, 10, 28, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2040, 6, 1, 12),
        datetime(2040, 6, 1, 12, tzinfo=UTC),
    ],
    ids=["skipped", "twice, first", "twice, second", "naive", "utc"],
)
async def test_a_moment(
    moment: datetime, make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
):
    queue = make_queue(max_delay_secs=0)
    await queue.add("mail", 1, delay_ms=moment)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    assert members(redis, keys)[0][1] == int(aware.timestamp() * 1000)


@pytest.mark.parametrize(
    "delay",
    [
        {"delay_ms": 0},
        {"delay_ms": 0.9},
        {"delay": timedelta(microseconds=999)},
        {"delay_ms": datetime(1960, 1, 1)},
        {"delay_ms": datetime(2026, 1, 1)},
        {"delay_ms": datetime.min.replace(tzinfo=UTC)},
    ],
)
async def test_no_delay_is_now(
    delay: dict[str, Any], queue: Any, redis: redis_py.Redis, keys: Keys
):
    job = await queue.add("mail", 1, **delay)
    assert entries(redis, keys) == [{b"d": envelope(job, 1), b"n": b"mail"}]
    assert redis.exists(keys.delayed, keys.didx(job.id)) == 0


@pytest.mark.parametrize("ahead_s", [3600, -3600])
async def test_a_moment_is_past_by_the_servers_clock(
    ahead_s: int,
    queue: Any,
    redis: redis_py.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
):
    """A producer's clock that is off neither runs jobs before their time nor holds them up."""
    now = datetime.now(UTC).replace(microsecond=0)
    clock = SimpleNamespace(time_ns=lambda: time.time_ns() + ahead_s * 10**9)
    for module in (job_options, new_jobs):
        monkeypatch.setattr(module, "time", clock)
    past, soon = now - timedelta(minutes=30), now + timedelta(minutes=30)
    moments = [("past", past), ("soon", soon)]
    bulk = [{"name": name, "data": 1, "delay_ms": moment} for name, moment in moments]
    bulk += [{**entry, "job_id": f"order-{entry['name']}"} for entry in bulk]
    jobs = await queue.add_bulk([*bulk, {"name": "past", "data": 1}])
    assert [entry[b"n"] for entry in entries(redis, keys)] == [b"past"] * 3
    assert [due for _, due in members(redis, keys)] == [int(soon.timestamp() * 1000)] * 2
    taken = [job.is_new for job in await queue.add_bulk(bulk[2:])]
    assert taken == [False, False]
    assert redis.exists(keys.unique("order-past"), keys.dlid("order-soon")) == 2
    assert redis.exists(keys.dlid("order-past"), keys.didx(jobs[0].id)) == 0
    assert await queue.reschedule(jobs[1].id, delay_ms=soon + timedelta(minutes=10))
    assert await queue.reschedule(jobs[3].id, delay_ms=soon - timedelta(minutes=10))
    dues = sorted(due for _, due in members(redis, keys))
    assert dues == [int((soon.timestamp() + 600 * sign) * 1000) for sign in (-1, 1)]


async def test_a_past_moment_counts_for_the_backlog(make_queue: Callable[..., Any]):
    queue = make_queue(max_backlog=1)
    await queue.add("mail", 1, delay_ms=datetime(2026, 1, 1))
    with pytest.raises(QueueFullError):
        await queue.add("mail", 1, delay_ms=datetime(2026, 1, 1))


async def test_a_unique_job_is_added_once(queue: Any, redis: redis_py.Redis, keys: Keys):
    first = await queue.add_unique("mail", 1, job_id="order-1")
    again = await queue.add_unique("mail", 2, job_id="order-1")
    delayed = await queue.add_unique("mail", 3, job_id="order-1", delay_ms=1000)
    assert [job.is_new for job in (first, again, delayed)] == [True, False, False]
    assert [job.id for job in (first, again, delayed)] == ["order-1"] * 3
    assert entries(redis, keys) == [{b"d": envelope(first, 1), b"n": b"mail"}]
    assert redis.exists(keys.delayed) == 0
    assert 86_390 <= redis.ttl(keys.unique("order-1")) <= 86_400


async def test_how_long_an_id_stays_unique(queue: Any, redis: redis_py.Redis, keys: Keys):
    await queue.add("mail", 1, job_id="a", unique_for=90)
    await queue.add("mail", 1, job_id="b", unique_for=7200, delay_ms=1000)
    await queue.add_bulk([{"name": "mail", "data": 1, "job_id": "c"}], unique_for=30.5)
    assert 85 <= redis.ttl(keys.unique("a")) <= 90
    assert 7195 <= redis.ttl(keys.dlid("b")) <= 7200
    assert 25 <= redis.ttl(keys.unique("c")) <= 31  # never shorter than asked
    assert await queue.reschedule("b", delay_ms=10)
    assert redis.ttl(keys.dlid("b")) > 7190
    redis.delete(keys.unique("a"))  # as if the time were over
    assert (await queue.add("mail", 1, job_id="a")).is_new


@pytest.mark.parametrize("options", [{}, {"delay_ms": 60_000}], ids=["now", "later"])
async def test_a_new_job_is_not_answered_with_the_result_of_an_earlier_one(
    options: dict[str, Any], queue: Any, redis: redis_py.Redis, keys: Keys
):
    for job_id in ("a", "b"):
        await queue.add("mail", 1, job_id=job_id, **options)
        redis.set(keys.result(job_id), msgpack.packb("the first"))
    assert not (await queue.add("mail", 2, job_id="a", **options)).is_new
    assert await queue.get_job_result("a") == "the first"
    redis.delete(*(name(one) for name in (keys.unique, keys.dlid) for one in "ab"))  # time is over
    assert (await queue.add("mail", 2, job_id="a", **options)).is_new
    (job,) = await queue.add_bulk([{"name": "mail", "data": 2, "job_id": "b", **options}])
    assert job.is_new
    assert await queue.get_job_result_bulk(["a", "b"]) == [None, None]


async def test_an_add_that_comes_twice_spares_the_result_of_its_job(
    server: Server, redis: redis_py.Redis, keys: Keys
):
    """As after a lost reply: by then the job may be done."""
    encoder = ChunkEncoder(keys)
    jobs = job_options.one("mail", 1, job_id="a")
    request, _ = encoder.encode(jobs, now_ms())
    connection = BlockingConnection(Endpoint.parse(server.url), key=keys.stream)
    for frame, stored in ((request.frame, b"done"), (request.frame, None)):
        sent = Request(frame, Effect.IDEMPOTENT, script=adding.ADD_MIXED)
        assert connection.call(sent) == b"1"
        if stored is not None:
            redis.set(keys.result("a"), stored)
    connection.close()
    assert redis.get(keys.result("a")) == b"done"
    assert redis.xlen(keys.stream) == 1


async def test_any_mix_in_bulk_is_one_round_trip(
    make_queue: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    server: Any,
    redis: redis_py.Redis,
    keys: Keys,
):
    proxy = make_proxy(server.url)
    queue = make_queue(redis_url=proxy.url)
    await queue.add("first", 0)  # greets the server, loads one script
    await queue.add("first", 0, job_id="0")  # and the other
    handshake = len(proxy.commands)
    jobs = await queue.add_bulk(
        [
            {"name": "a", "data": 1},
            {"name": "b", "data": 2, "attempts": 3},
            {"name": "c", "data": 3, "delay_ms": 60_000},
            {"name": "d", "data": 4, "job_id": "mine"},
            {"name": "", "data": 5, "delay": timedelta(hours=1), "job_id": "later", "backoff": 9},
            {"name": "d", "data": 6, "job_id": "mine"},
            {"name": "e", "data": 7, "delay_ms": None, "job_id": None},
        ]
    )
    assert proxy.commands[handshake:] == [b"EVALSHA"]
    assert [job.name for job in jobs] == ["a", "b", "c", "d", "", "d", "e"]
    assert [job.is_new for job in jobs] == [True, True, True, True, True, False, True]
    assert [jobs[3].id, jobs[4].id, jobs[5].id] == ["mine", "later", "mine"]
    assert entries(redis, keys)[2:] == [
        {b"d": envelope(jobs[0], 1), b"n": b"a"},
        {b"d": envelope(jobs[1], 2, [3, None]), b"n": b"b"},
        {b"d": envelope(jobs[3], 4), b"n": b"d"},
        {b"d": envelope(jobs[6], 7), b"n": b"e"},
    ]
    retry = [None, ["fixed", 9, None, None, None]]
    assert [member for member, _ in members(redis, keys)] == [
        b"\1\0\0\0c" + envelope(jobs[2], 3),
        b"\0\0\0\0" + envelope(jobs[4], 5, retry),
    ]


async def test_a_large_bulk_keeps_its_order(queue: Any, redis: redis_py.Redis, keys: Keys):
    jobs = await queue.add_bulk([{"name": "n", "data": n} for n in range(2003)])
    assert [fields[b"d"] for fields in entries(redis, keys)] == [
        envelope(job, n) for n, job in enumerate(jobs)
    ]
    assert len({job.id for job in jobs}) == 2003
    assert sorted(job.id for job in jobs) == [job.id for job in jobs]


async def test_chunks_are_cut_by_size_too(queue: Any, redis: redis_py.Redis, keys: Keys):
    sizes = [900_000, 300_000, 800_000, 10, 1_000_000, 1_000_000, 5]
    await queue.add_bulk([{"name": "n", "data": b"x" * size} for size in sizes])
    stored = [len(fields[b"d"]) for fields in entries(redis, keys)]
    assert [size // 1000 for size in stored] == [size // 1000 for size in sizes]


class Name(enum.StrEnum):
    WELCOME = "welcome"


async def test_a_name_and_an_id_that_are_more_than_text(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    await queue.add(Name.WELCOME, 1, job_id=Name.WELCOME)
    job = await queue.add(Name.WELCOME, 1)
    assert type(job.name) is str
    assert (await queue.add(Name.WELCOME, 2, job_id="welcome")).is_new is False
    await queue.add_bulk([{"name": Name.WELCOME, "data": 1, "job_id": Name.WELCOME, "delay_ms": 5}])
    (first, second) = entries(redis, keys)
    assert first[b"n"] == second[b"n"] == b"welcome"
    assert msgpack.unpackb(first[b"d"])[0] == "welcome"


async def test_a_list_that_changes_while_it_is_added(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
):
    """A buffer that others fill meanwhile; what was added must not be told as failed."""
    queue = make_queue()
    jobs = [{"name": "n", "data": n, "attempts": 2} for n in range(3)]
    chunks = asyncio.create_task(queue.add_bulk(jobs))
    while redis.xlen(keys.stream) == 0:
        await asyncio.sleep(0)
        if jobs:
            jobs.pop().clear()
    assert [job.data for job in await chunks] == [0, 1, 2]


async def test_what_is_kept_to_know_a_chunk_again_is_forgotten(
    queue: Any, redis: redis_py.Redis, keys: Keys
):
    await queue.add("n", 1)
    await queue.add("n", 1, delay_ms=60_000)
    kept = set(redis.scan_iter(keys.pattern)) - {keys.stream, keys.delayed}
    assert {key.split(b":")[2] for key in kept} == {b"applied", b"flags", b"didx", b"wake"}
    assert all(0 < redis.ttl(key) <= 3660 for key in kept)


async def test_an_empty_bulk_sends_nothing(make_queue: Callable[..., Any]):
    assert await make_queue(redis_url="redis://127.0.0.1:1").add_bulk([]) == []


@pytest.mark.parametrize("names", [["n"], ["n", "m"], [""], ["", "n"]], ids="/".join)
@pytest.mark.parametrize("max_stream_len", [None, 1000])
async def test_each_job_of_a_bulk_has_its_name(
    names: list[str],
    max_stream_len: int | None,
    server: Any,
    queue_name: str,
    redis: redis_py.Redis,
    keys: Keys,
):
    producer = Producer(server.url, queue_name, max_stream_len=max_stream_len)
    ids = await producer.add_bulk_named([(names[n % len(names)], b"%d" % n) for n in range(300)])
    await producer.shutdown()
    there = [fields for _, fields in redis.xrange(keys.stream)]
    told = [fields.get(b"n", b"").decode() for fields in there]
    assert told == [names[n % len(names)] for n in range(300)]
    assert [b"n" in fields for fields in there] == [bool(name) for name in told]
    assert [msgpack.unpackb(fields[b"d"])[:2] for fields in there] == [
        [job_id, b"%d" % n] for n, job_id in enumerate(ids)
    ]


async def test_nothing_is_trimmed_unless_asked(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
):
    plain, trimming = make_queue(), make_queue(max_stream_len=10)
    await plain.add_bulk([{"name": "n", "data": n} for n in range(1000)])
    assert redis.xlen(keys.stream) == 1000
    await trimming.add_bulk([{"name": "n", "data": n} for n in range(1000)])
    assert redis.xlen(keys.stream) < 300  # whole nodes of the stream go
    await trimming.add("n", 1, job_id="x")
    assert redis.xlen(keys.stream) < 300


async def test_many_adds_at_once_each_get_their_own(queue: Any, redis: redis_py.Redis, keys: Keys):
    async def add(n: int) -> Any:
        if n % 7 == 0:
            return await queue.add("n", n, job_id=f"id-{n}")
        return await queue.add("n", n, attempts=n if n % 3 == 1 else None)

    jobs = await asyncio.gather(*(add(n) for n in range(1, 601)))
    stored = [msgpack.unpackb(fields[b"d"]) for fields in entries(redis, keys)]
    by_id = {fields[0]: fields for fields in stored}
    assert len(stored) == len(by_id) == 600
    for n, job in enumerate(jobs, 1):
        fields = by_id[job.id]
        assert msgpack.unpackb(fields[1]) == n
        assert (fields[4][0] if len(fields) == 5 else None) == (n if n % 3 == 1 and n % 7 else None)


async def test_adds_of_one_turn_share_chunks(
    server: Any, queue_name: str, make_proxy: Callable[[str], Proxy]
):
    proxy = make_proxy(server.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        await queue.add("n", 0)
        before = proxy.count("EVALSHA")
        await asyncio.gather(*(queue.add("n", n) for n in range(3 * TURN_JOBS)))
        assert proxy.count("EVALSHA") - before == 3
