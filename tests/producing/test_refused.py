"""Bad input: a typed error that names the argument, and nothing is sent."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis as redis_py

from chasqui import sync
from chasqui.errors import (
    ClosedError,
    PayloadError,
    PayloadTooLargeError,
)
from chasqui.model.job import RepeatPattern
from chasqui.model.keys import Keys, shown
from chasqui.queue import Queue
from tests.proxy import Proxy
from tests.servers import Server

BIG = b"x" * (1 << 20)
HUGE = 10**5000  # which Python does not print


def named(value: object) -> str:
    return shown(value)[:40]


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"delay_ms": True}, TypeError, "delay_ms must be int .* got bool"),
    ({"delay_ms": "5"}, TypeError, "delay_ms must be int .* got str"),
    ({"delay_ms": -1}, ValueError, "delay_ms must be non-negative, got -1"),
    ({"delay_ms": float("nan")}, ValueError, "delay_ms must be a finite .* got nan"),
    ({"delay_ms": float("inf")}, ValueError, "delay_ms must be a finite .* got inf"),
    ({"delay_ms": -0.5}, ValueError, "delay_ms must be a finite non-negative number"),
    ({"delay_ms": 30 * 86_400_000 + 1}, ValueError, "delay .* exceeds max_delay_secs 2592000"),
    ({"delay_ms": 10**30}, ValueError, "delay .* exceeds max_delay_secs"),
    ({"delay_ms": datetime(2200, 1, 1)}, ValueError, "delay .* exceeds max_delay_secs"),
    ({"delay_ms": datetime.max.replace(tzinfo=UTC)}, ValueError, "exceeds max_delay_secs"),
    ({"delay": 5}, TypeError, "delay must be a datetime.timedelta; got int .delay_ms"),
    ({"delay": timedelta(-1)}, ValueError, "delay must be non-negative"),
    ({"delay": timedelta.max}, ValueError, "exceeds max_delay_secs"),
    ({"delay": timedelta(1), "delay_ms": 1}, ValueError, "either delay_ms .* or delay"),
    ({"attempts": 0}, ValueError, "attempts must be from 1"),
    ({"attempts": True}, TypeError, "attempts must be an int, got bool"),
    ({"attempts": 2**32}, ValueError, "attempts must be from 1"),
    ({"attempts": "3"}, TypeError, "attempts must be an int, got str"),
    ({"backoff": True}, TypeError, "backoff must be int .* got bool"),
    ({"backoff": -5}, ValueError, "backoff.delay_ms must be a non-negative int"),
    ({"backoff": {"kind": "odd", "delay_ms": 1}}, ValueError, "unknown backoff kind 'odd'"),
    ({"backoff": {"kind": "fixed"}}, ValueError, "backoff.delay_ms is required"),
    (
        {"backoff": {"kind": "fixed", "delay_ms": 1, "jiter_ms": 5}},
        ValueError,
        "unknown key 'jiter_ms' in backoff; expected kind, delay_ms",
    ),
    ({"backoff": 2**64}, ValueError, "backoff.delay_ms must be a non-negative int"),
    (
        {"backoff": {"kind": "exponential", "delay_ms": 1, "multiplier": 10**400}},
        ValueError,
        "backoff.multiplier must be finite",
    ),
    ({"attempts": HUGE}, ValueError, "attempts must be from 1"),
    ({"delay_ms": HUGE}, ValueError, "delay .* exceeds max_delay_secs"),
    ({"delay_ms": -HUGE}, ValueError, "delay_ms must be non-negative"),
    ({"job_id": ""}, ValueError, "job_id must be a non-empty"),
    ({"job_id": " \t"}, ValueError, "job_id must be a non-empty"),
    ({"job_id": 5}, ValueError, "job_id must be a non-empty"),
    ({"job_id": "a{b"}, ValueError, "job_id must hold no braces"),
    ({"job_id": "a\nb"}, ValueError, "job_id must hold no braces or control"),
    ({"job_id": "é" * 129}, ValueError, "job_id takes more than 256 bytes"),
    ({"job_id": "\ud800"}, ValueError, "job_id holds a lone surrogate"),
]

DATA: list[tuple[Any, type[Exception], str]] = [
    (BIG, PayloadTooLargeError, r"payload takes \d+ bytes"),
    ({"a": {1, 2}}, TypeError, r'data\["a"\] is a set'),
    ([Decimal(1)], TypeError, r"data\[0\] is a decimal.Decimal"),
    (2**64, PayloadError, "data is an int beyond 64 bits"),
    (HUGE, PayloadError, "data is an int beyond 64 bits"),
    ({"a": {7: 1}}, TypeError, r'data\["a"\] has a key of type int; keys are str or bytes'),
]

NAMES: list[tuple[Any, type[Exception], str]] = [
    ("é" * 129, ValueError, "name takes more than 256 bytes"),
    ("x" * 257, ValueError, "name takes more than 256 bytes"),
    ("\ud800", ValueError, "name holds a lone surrogate"),
    (5, TypeError, "name must be a str, got int"),
    (b"mail", TypeError, "name must be a str, got bytes"),
    (None, TypeError, "name must be a str, got NoneType"),
    (0, TypeError, "name must be a str, got int"),
    (False, TypeError, "name must be a str, got bool"),
    (b"", TypeError, "name must be a str, got bytes"),
    ([], TypeError, "name must be a str, got list"),
]


@pytest.fixture
def nowhere(queue_at: Callable[..., Any]) -> Any:
    """A queue that would fail in another way if anything were sent."""
    return queue_at("redis://127.0.0.1:1")


class Part(list[Any]):
    """Part of a dict to which another thread adds whenever this part is packed."""

    def __init__(self, whole: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._whole = whole
        self._pool = pool

    def __iter__(self) -> Any:
        self._pool.submit(self._whole.setdefault, str(len(self._whole)), 1).result()
        return super().__iter__()


async def test_a_dict_that_another_thread_adds_to(queue: Any, redis: redis_py.Redis, keys: Keys):
    with ThreadPoolExecutor(1) as pool:
        data: dict[str, Any] = {}
        data.update(part=Part(data, pool), last=1)
        with pytest.raises(PayloadError, match=r"^data was changed while it was encoded"):
            await queue.add("n", data)
        with pytest.raises(PayloadError, match=r"^data was changed while it was encoded"):
            await queue.add("n", data, delay_ms=5)
        rows = [{"name": "n", "data": 1}, {"name": "n", "data": data}]
        with pytest.raises(PayloadError, match=r"^jobs\[1\]: data was changed while"):
            await queue.add_bulk(rows)
    assert redis.exists(keys.stream, keys.delayed) == 0


@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS, ids=named)
async def test_options(options: dict[str, Any], kind: type[Exception], message: str, nowhere: Any):
    with pytest.raises(kind, match=message):
        await nowhere.add("n", 1, **options)
    good = {"name": "n", "data": 1}
    with pytest.raises(kind, match=rf"^jobs\[2\]: .*{message}"):
        await nowhere.add_bulk([good, good, {**good, **options}, {**good, "delay_ms": -9}])
    if "job_id" not in options:
        with pytest.raises(kind, match=message):
            await nowhere.add_unique("n", 1, job_id="a", **options)


@pytest.mark.parametrize(("data", "kind", "message"), DATA, ids=named)
async def test_data(data: Any, kind: type[Exception], message: str, nowhere: Any):
    with pytest.raises(kind, match=message):
        await nowhere.add("n", data)
    with pytest.raises(kind, match=message):
        await nowhere.upsert_repeatable_job("n", data, repeat=RepeatPattern.every(1000))
    with pytest.raises(kind, match=rf"^jobs\[1\]: .*{message}"):
        await nowhere.add_bulk([{"name": "n", "data": 1}, {"name": "n", "data": data}])


@pytest.mark.parametrize(("name", "kind", "message"), NAMES, ids=named)
async def test_names(name: Any, kind: type[Exception], message: str, nowhere: Any):
    with pytest.raises(kind, match=message):
        await nowhere.add(name, 1)
    with pytest.raises(kind, match=message):
        await nowhere.add(name, 1, job_id="a")
    with pytest.raises(kind, match=message):
        await nowhere.upsert_repeatable_job(name, 1, repeat=RepeatPattern.every(1000))
    with pytest.raises(kind, match=rf"^jobs\[0\]: .*{message}"):
        await nowhere.add_bulk([{"name": name, "data": 1}])


@pytest.mark.parametrize(
    ("jobs", "kind", "message"),
    [
        (
            [{"name": "n", "data": 1, "dealy_ms": 5}],
            ValueError,
            r"jobs\[0\]: unknown option 'dealy_ms'",
        ),
        ([{"name": "n"}], ValueError, r"jobs\[0\]: 'data' is missing"),
        ([{"data": 1}], ValueError, r"jobs\[0\]: 'name' is missing"),
        ([("n", 1)], TypeError, r"jobs\[0\] must be a dict, got tuple"),
        ([None], TypeError, r"jobs\[0\] must be a dict, got NoneType"),
        ({"name": "n", "data": 1}, TypeError, "jobs must be a list of dicts, got dict"),
        (frozenset(), TypeError, "jobs must be a list of dicts, got frozenset"),
        (
            [{"name": "n", "data": 1, "repeat": RepeatPattern.every(5)}],
            ValueError,
            r"jobs\[0\]: repeat is not taken in bulk",
        ),
        (
            [{"name": "n", "data": 1, "missed_fires": {"kind": "skip"}}],
            ValueError,
            r"jobs\[0\]: repeat is not taken in bulk",
        ),
    ],
    ids=named,
)
async def test_bulk_entries(jobs: Any, kind: type[Exception], message: str, nowhere: Any):
    with pytest.raises(kind, match=f"^{message}"):
        await nowhere.add_bulk(jobs)


EVERY = RepeatPattern.every(1000)
CALLS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda q: q.add("n", 1, missed_fires={"kind": "skip"}), ValueError, "missed_fires is only"),
    (lambda q: q.add("n", 1, unique_for=5), ValueError, "unique_for is only meaningful"),
    (lambda q: q.add("n", 1, job_id="a", unique_for=0.5), ValueError, "unique_for must be from 1"),
    (lambda q: q.add("n", 1, job_id="a", unique_for=True), TypeError, "unique_for must be seconds"),
    (
        lambda q: q.add_bulk([{"name": "n", "data": 1, "delay_ms": 5}], unique_for=5),
        ValueError,
        "unique_for is only meaningful with `job_id`, which no entry has",
    ),
    (
        lambda q: q.add("n", 1, job_id="a", unique_for=HUGE),
        ValueError,
        "unique_for must be from 1",
    ),
    (lambda q: q.add("n", 1, repeat=EVERY, delay_ms=5), ValueError, "delay_ms is not taken with"),
    (lambda q: q.add("n", 1, repeat=EVERY, unique_for=5), ValueError, "unique_for is not taken"),
    (
        lambda q: q.add("n", 1, repeat={**EVERY.to_dict(), "intervall": 5}),
        ValueError,
        "unknown key 'intervall' in repeat",
    ),
    (
        lambda q: q.add("n", 1, repeat=EVERY, missed_fires={"kind": "skip", "max": 5}),
        ValueError,
        "unknown key 'max' in missed_fires",
    ),
    (lambda q: q.add_unique("n", 1, job_id=None), ValueError, "job_id must be a non-empty"),
    (lambda q: q.add("n", 1, repeat=5), TypeError, "repeat must be a RepeatPattern or dict"),
    (lambda q: q.add("n", 1, repeat={"kind": "x"}), ValueError, "unknown pattern kind 'x'"),
    (
        lambda q: q.add("n", 1, repeat=RepeatPattern.cron("never")),
        ValueError,
        "cron",
    ),
    (
        lambda q: q.add("n", 1, repeat=RepeatPattern.cron("* * * * *", tz="Mars/X")),
        ValueError,
        "Mars/X",
    ),
    (
        lambda q: q.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(5), limit=0),
        ValueError,
        "limit must be at least 1",
    ),
    (
        lambda q: q.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(5), key="a{b"),
        ValueError,
        "key must hold no braces",
    ),
    (
        lambda q: q.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(5), key=5),
        TypeError,
        "key must be a str",
    ),
    (lambda q: q.reschedule("a"), ValueError, "reschedule needs delay_ms or delay"),
    (lambda q: q.reschedule(5, delay_ms=1), TypeError, r"job_ids\[0\] must be a str"),
    (lambda q: q.reschedule("a", delay_ms=True), TypeError, "delay_ms must be int"),
    (lambda q: q.cancel_delayed(5), TypeError, r"job_ids\[0\] must be a str, got int"),
    (lambda q: q.cancel_delayed_bulk("abc"), TypeError, "job_ids must be a list of ids"),
    (lambda q: q.cancel_delayed_bulk({"a": 1}), TypeError, "job_ids must be a list of ids"),
    (lambda q: q.cancel_delayed_bulk(None), TypeError, "job_ids must be a list .* got NoneType"),
    (lambda q: q.cancel_delayed("\ud800"), ValueError, r"job_ids\[0\] holds a lone surrogate"),
    (lambda q: q.get_job_result("\ud800"), ValueError, r"job_ids\[0\] holds a lone surrogate"),
    (lambda q: q.counts("\ud800"), ValueError, "group holds a lone surrogate"),
    (lambda q: q.counts(None), TypeError, "group must be a str, got NoneType"),
    (lambda q: q.obliterate(force="no"), TypeError, "force must be a bool, got str"),
    (lambda q: q.replay_dlq(dry_run=1), TypeError, "dry_run must be a bool, got int"),
    (lambda q: q.delete_dlq(dry_run=None), TypeError, "dry_run must be a bool, got NoneType"),
    (lambda q: q.get_job_result_bulk(["a", None]), TypeError, r"job_ids\[1\] must be a str"),
    (lambda q: q.peek_dlq(-1), ValueError, "limit must be non-negative, got -1"),
    (lambda q: q.replay_dlq(1.5), TypeError, "limit must be an int, got float"),
    (lambda q: q.replay_dlq(True), TypeError, "limit must be an int, got bool"),
    (lambda q: q.delete_dlq(ids="1-1"), TypeError, "ids must be a list of DLQ ids"),
    (lambda q: q.delete_dlq(ids=5), TypeError, "ids must be a list of DLQ ids, got int"),
    (lambda q: q.delete_dlq(ids=[HUGE]), ValueError, r"ids\[0\] must be the id"),
    (lambda q: q.delete_dlq(ids=[f"{2**64}-0"]), ValueError, r"ids\[0\] must be the id"),
    (lambda q: q.delete_dlq(ids=["x"]), ValueError, r"ids\[0\] must be the id of a dead job"),
    (lambda q: q.delete_dlq(ids=["\u0661-\u0661"]), ValueError, r"ids\[0\] must be the id"),
    (lambda q: q.replay_dlq(name=b"n"), TypeError, "name must be a str, got bytes"),
    (lambda q: q.replay_dlq(since="today"), TypeError, "since must be a datetime"),
    (lambda q: q.get_repeatable_jobs(-1), ValueError, "limit must be non-negative"),
    (lambda q: q.remove_repeatable_by_key(None), TypeError, "key must be a str"),
    (lambda q: q.remove_repeatable_by_key("\ud800"), ValueError, "key holds a lone surrogate"),
    (
        lambda q: q.upsert_repeatable_job("n", 1, repeat=EVERY, key="\ud800"),
        ValueError,
        "key holds a lone surrogate",
    ),
    (
        lambda q: q.upsert_repeatable_job("n", 1, repeat=EVERY, start_after_ms=HUGE),
        ValueError,
        "start_after_ms must be",
    ),
    (lambda q: q.wait_for_result("a", timeout=0), ValueError, "timeout must be a positive"),
    (lambda q: q.wait_for_result("a", poll_interval=-1), ValueError, "poll_interval must be"),
    (lambda q: q.wait_for_result("a", timeout="5"), TypeError, "timeout must be seconds, got str"),
    (lambda q: q.wait_for_result("a", timeout=True), TypeError, "timeout must be seconds"),
    (lambda q: q.wait_for_result([], timeout=1), TypeError, r"job_ids\[0\] must be a str"),
    (lambda q: q.wait_for_end(None, timeout=1), TypeError, r"job_ids\[0\] must be a str"),
    (lambda q: q.wait_for_end("a", poll_interval=None), TypeError, "poll_interval must be seconds"),
    (lambda q: q.wait_for_end("a", since_ms="x"), ValueError, "since_ms must be a non-negative"),
]


@pytest.mark.parametrize("place", range(len(CALLS)))
async def test_calls(place: int, nowhere: Any):
    call, kind, message = CALLS[place]
    with pytest.raises(kind, match=message):
        await call(nowhere)


async def test_nothing_is_sent(
    server: Server, queue_at: Callable[..., Any], make_proxy: Callable[[str], Proxy]
):
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url)
    await queue.is_paused()
    before = len(proxy.commands)
    refused = (TypeError, ValueError)
    for options, _, _ in OPTIONS:
        with pytest.raises(refused):
            await queue.add_bulk(
                [*[{"name": "n", "data": 1}] * 600, {"name": "n", "data": 1, **options}]
            )
    for data, _, _ in DATA:
        with pytest.raises(refused):
            await queue.add("n", data)
    for call, _, _ in CALLS:
        with pytest.raises(refused):
            await call(queue)
    assert proxy.commands[before:] == []


@pytest.mark.parametrize("make", [Queue, sync.Queue])
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"name": ""}, ValueError, "queue name must be 1 to 200"),
        ({"name": "a{b}"}, ValueError, "queue name must be"),
        ({"name": "a b"}, ValueError, "queue name must be"),
        ({"name": "a\n"}, ValueError, "queue name must be"),
        ({"name": "a*"}, ValueError, "queue name must be"),
        ({"name": "x" * 201}, ValueError, "queue name must be"),
        ({"name": 5}, TypeError, "queue name must be a str"),
        ({"redis_url": "http://x"}, ValueError, "redis_url must start with one of .*not http://"),
        ({"redis_url": "localhost:6379"}, ValueError, "redis_url must start with one of"),
        ({"redis_url": 5}, TypeError, "redis_url must be a str"),
        ({"max_stream_len": 0}, ValueError, "max_stream_len must be a positive int"),
        ({"max_stream_len": 2**63}, ValueError, "max_stream_len must be a positive int"),
        ({"max_stream_len": True}, ValueError, "max_stream_len must be a positive int"),
        ({"max_delay_secs": -1}, ValueError, "max_delay_secs must be a non-negative int"),
        ({"max_backlog": 2**63}, ValueError, "max_backlog must be a positive int"),
        ({"max_backlog": 0}, ValueError, "max_backlog must be a positive int"),
        ({"on_full": "drop"}, ValueError, "on_full must be 'raise' or 'wait'"),
        ({"durable": "yes"}, ValueError, "durable must be a bool, 'disk' or 'replica'"),
        ({"durable": 1}, ValueError, "durable must be a bool, 'disk' or 'replica'"),
        ({"durable": HUGE}, ValueError, "durable must be a bool, 'disk' or 'replica'"),
        ({"on_full": HUGE}, ValueError, "on_full must be 'raise' or 'wait'"),
        ({"max_delay_secs": -HUGE}, ValueError, "max_delay_secs must be a non-negative int"),
        ({"tls": "no"}, TypeError, "tls must be a bool, got str"),
        ({"credential_provider": "me"}, TypeError, "credential_provider must be a function"),
        ({"tracing": True}, TypeError, "tracing must be a Tracing or None, got bool"),
        ({"request_timeout_s": 0}, ValueError, "request_timeout_s must be above 0"),
        ({"request_timeout_s": 3600}, ValueError, "request_timeout_s must be above 0 and at most"),
        ({"request_timeout_s": True}, TypeError, "request_timeout_s must be seconds"),
    ],
    ids=named,
)
def test_settings(make: Any, options: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        make(**{"name": "good", **options})


async def test_a_closed_queue(queue_at: Callable[..., Any], server: Server):
    queue = queue_at(server.url)
    await queue.add("n", 1)
    assert not queue.is_closed
    await queue.close()
    await queue.close()
    assert queue.is_closed
    for call in (
        lambda: queue.add("n", 1),
        lambda: queue.add("n", 1, job_id="a"),
        lambda: queue.add_bulk([{"name": "n", "data": 1}]),
        lambda: queue.cancel_delayed("a"),
        lambda: queue.counts(),
        lambda: queue.peek_dlq(),
        lambda: queue.get_job_result("a"),
        lambda: queue.wait_for_result("a"),
    ):
        with pytest.raises(ClosedError, match=r"queue 'test-\w+' is closed"):
            await call()
