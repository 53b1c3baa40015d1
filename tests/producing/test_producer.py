"""Producer, the engine handle: payloads are bytes, answers are ids."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui.errors import ClosedError
from chasqui.model.keys import Keys
from chasqui.producer import Producer
from tests.producing.conftest import now_ms


@pytest.fixture
async def producer(server: Any, queue_name: str) -> AsyncIterator[Producer]:
    made = Producer(server.url, queue_name)
    yield made
    await made.shutdown()


def stored(redis: redis_py.Redis, keys: Keys) -> list[tuple[list[Any], bytes]]:
    return [
        (msgpack.unpackb(fields[b"d"]), fields.get(b"n", b""))
        for _, fields in redis.xrange(keys.stream)
    ]


async def test_immediate_forms(producer: Producer, redis: redis_py.Redis, keys: Keys):
    ids = [await producer.add(b"1"), await producer.add(b"")]
    ids.append(
        await producer.add_with_options(
            b"2",
            {
                "id": "mine",
                "name": "n",
                "retry": {"max_attempts": 3, "backoff": {"kind": "fixed", "delay_ms": 5}},
            },
        )
    )
    ids += await producer.add_bulk([b"3", b"4"])
    ids += await producer.add_bulk_with_options(
        [b"5", b"6"], {"name": "m", "id": None, "retry": None}
    )
    ids += await producer.add_bulk_named([("a", b"7"), ("", b"8")])
    found = stored(redis, keys)
    assert [fields[0] for fields, _ in found] == ids
    assert ids[2] == "mine"
    assert [fields[1] for fields, _ in found] == [b"1", b"", *(b"%d" % n for n in range(2, 9))]
    assert [name for _, name in found] == [b"", b"", b"n", b"", b"", b"m", b"m", b"a", b""]
    assert found[2][0][4] == [3, ["fixed", 5, None, None, None]]
    assert await producer.add_bulk([]) == []


async def test_delayed_forms(producer: Producer, redis: redis_py.Redis, keys: Keys):
    when = now_ms() + 90_000
    ids = [
        await producer.add_in(60_000, b"1"),
        await producer.add_in_with_options(61_000, b"2", {"id": "mine", "name": "n"}),
        *await producer.add_in_bulk(62_000, [b"3", b"4"]),
        await producer.add_at(when, b"5"),
        await producer.add_at_with_options(when + 1, b"6", {"retry": {"max_attempts": 1}}),
    ]
    found = redis.zrange(keys.delayed, 0, -1, withscores=True)
    envelopes = [msgpack.unpackb(m[4 + m[0] :]) for m, _ in found]
    assert [fields[0] for fields in envelopes] == ids
    assert [int(score) for _, score in found[-2:]] == [when, when + 1]
    assert redis.exists(keys.dlid("mine"))
    assert await producer.cancel_delayed("mine")
    assert await producer.cancel_delayed_bulk([ids[0], "mine", ids[4]]) == [True, False, True]
    await producer.add_in(0, b"now")
    await producer.add_at(5, b"past")
    assert redis.xlen(keys.stream) == 2


async def test_the_rest(
    producer: Producer, redis: redis_py.Redis, keys: Keys, bury: Callable[..., list[str]]
):
    bury(3)
    assert [entry["reason"] for entry in await producer.peek_dlq(2)] == ["failed"] * 2
    assert await producer.replay_dlq(10) == 3
    spec = {
        "job_name": "n",
        "pattern": {"kind": "every", "interval_ms": 60_000},
        "payload": b"\x01",
        "limit": 3,
        "missed_fires": {"kind": "fire-all", "max_catchup": 2},
    }
    key = await producer.upsert_repeatable(spec)
    assert key == "n::every:60000"
    (listed,) = await producer.list_repeatable(10)
    assert list(listed) == [
        "key",
        "job_name",
        "pattern",
        "next_fire_ms",
        "limit",
        "start_after_ms",
        "end_before_ms",
        "missed_fires",
    ]
    assert listed["pattern"] == spec["pattern"]
    assert listed["missed_fires"] == spec["missed_fires"]
    assert await producer.upsert_repeatable({**spec, "key": "own"}) == "own"
    assert await producer.remove_repeatable_by_key(key)
    redis.set(keys.result("a"), b"raw")
    assert await producer.get_result("a") == b"raw"
    assert await producer.get_result_bulk(["b", "a"]) == [None, b"raw"]
    assert producer.stream_key().encode() == keys.stream
    assert producer.delayed_key().encode() == keys.delayed
    assert producer.dlq_key().encode() == keys.dlq
    assert len(producer.producer_id()) == 36


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p: p.add("text"), TypeError, "payload must be bytes, got str"),
        (lambda p: p.add(bytearray(b"x")), TypeError, "payload must be bytes, got bytearray"),
        (
            lambda p: p.add_bulk([bytes(512 << 20)]),
            ValueError,
            r"payloads\[0\] takes 536870912 bytes",
        ),
        (lambda p: p.add_bulk((b"x",)), TypeError, "payloads must be a list, got tuple"),
        (lambda p: p.add_bulk([b"x", None]), TypeError, r"payloads\[1\] must be bytes"),
        (lambda p: p.add_bulk_named([("a", b"x"), ("b",)]), ValueError, r"entries\[1\] must be a"),
        (lambda p: p.add_bulk_named([("a", "x")]), TypeError, r"entries\[0\] must be bytes"),
        (lambda p: p.add_with_options(b"x", None), TypeError, "opts must be a dict"),
        (lambda p: p.add_with_options(b"x", {"retry": 5}), TypeError, "opts.retry must be a dict"),
        (lambda p: p.add_with_options(b"x", {"retry": []}), TypeError, "opts.retry must be a dict"),
        (lambda p: p.add_with_options(b"x", {"nmae": "n"}), ValueError, "unknown option 'nmae'"),
        (
            lambda p: p.add_with_options(b"x", {"retry": {"attempts": 3}}),
            ValueError,
            "opts.retry has an unknown option 'attempts'",
        ),
        (lambda p: p.add_with_options(b"x", {"name": 0}), TypeError, "name must be a str, got int"),
        (lambda p: p.add_bulk_named({"a": b"x"}), TypeError, "entries must be a list, got dict"),
        (lambda p: p.add_bulk_named([(0, b"x")]), TypeError, r"entries\[0\]: name must be a str"),
        (lambda p: p.upsert_repeatable(None), TypeError, "spec must be a dict, got NoneType"),
        (lambda p: p.upsert_repeatable({"jobname": "n"}), ValueError, "unknown key 'jobname'"),
        (lambda p: p.get_result_bulk(5), TypeError, "job_ids must be a list of ids, got int"),
        (lambda p: p.add_with_options(b"x", {"id": ""}), ValueError, "job_id must be a non-empty"),
        (lambda p: p.add_with_options(b"x", {"name": "x" * 257}), ValueError, "name takes more"),
        (
            lambda p: p.add_bulk_with_options([b"x"] * 2, {"id": "a"}),
            ValueError,
            "opts.id can only",
        ),
        (lambda p: p.add_in(-1, b"x"), ValueError, "delay_ms must be non-negative; got -1"),
        (lambda p: p.add_in(1.5, b"x"), TypeError, "delay_ms must be an int, got float"),
        (lambda p: p.add_in(True, b"x"), TypeError, "delay_ms must be an int, got bool"),
        (lambda p: p.add_in(10**18, b"x"), ValueError, "exceeds max_delay_secs"),
        (lambda p: p.add_at(-1, b"x"), ValueError, "when_ms must be non-negative; got -1"),
        (lambda p: p.add_at(10**18, b"x"), ValueError, "exceeds max_delay_secs"),
        (lambda p: p.upsert_repeatable({"job_name": "n"}), ValueError, "spec.pattern is required"),
    ],
)
async def test_bad_input(call: Any, kind: type[Exception], message: str, queue_name: str):
    producer = Producer("redis://127.0.0.1:1", queue_name)
    with pytest.raises(kind, match=message):
        await call(producer)
    await producer.shutdown()


async def test_the_memory_of_a_large_payload_is_given_back(producer: Producer):
    encoder = producer.operations.encoder
    await producer.add(b"x")
    await producer.add_bulk([b"x" * 1000] * 2000)
    assert sum(buffer.capacity for buffer in encoder._buffers) > 250_000, "usual ones are kept"
    await producer.add(b"x" * (16 << 20))
    assert sum(buffer.capacity for buffer in encoder._buffers) < 4 << 20


async def test_after_shutdown(producer: Producer):
    await producer.add(b"x")
    await producer.shutdown()
    for call in (producer.add(b"x"), producer.add_bulk([b"x"]), producer.peek_dlq(1)):
        with pytest.raises(ClosedError):
            await call
