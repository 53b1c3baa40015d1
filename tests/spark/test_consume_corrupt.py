"""Jobs of a consuming query that cannot be read go to the dead-letter queue, and are never lost."""

from collections.abc import Iterator
from typing import Any

import pytest

from chasqui._core.envelope import decode_envelope
from chasqui.spark.options import OptionError
from chasqui.sync import Queue
from tests.servers import Server
from tests.spark.direct import Redis, consume_reader, rows_between, step

SCHEMA = "n bigint"


def fill(url: str, queue: str) -> tuple[list[str], list[str]]:
    """Ids of jobs that can be read by the schema, and of those that cannot."""
    with Queue(queue, redis_url=url) as producer:
        jobs = producer.add_bulk(
            [{"name": "m", "data": {"n": "many" if n % 10 == 3 else n}} for n in range(600)]
        )
    return (
        sorted(job.id for n, job in enumerate(jobs) if n % 10 != 3),
        sorted(job.id for n, job in enumerate(jobs) if n % 10 == 3),
    )


def entries(redis: Redis, stream: bytes) -> Iterator[dict[bytes, bytes]]:
    for _, flat in redis("XRANGE", stream, "-", "+"):
        yield dict(zip(flat[::2], flat[1::2], strict=True))


def dead(redis: Redis) -> list[str]:
    return sorted(decode_envelope(one[b"d"]).id for one in entries(redis, redis.keys.dlq))


def told(redis: Redis, event: bytes) -> list[str]:
    every = entries(redis, redis.keys.events)
    return sorted(one[b"id"].decode() for one in every if one[b"e"] == event)


def left(redis: Redis) -> tuple[int, int, list[bytes]]:
    """Jobs in the stream, jobs that somebody holds, and what else a batch keeps."""
    stream = redis.keys.stream
    kept = [key for key in redis.spark_keys() if b"corrupt" in key]
    return redis("XLEN", stream), redis("XPENDING", stream, "default")[0], kept


def test_they_are_buried_when_their_batch_is_done(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    good, bad = fill(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name, payloadSchema=SCHEMA)
    start = reader.initialOffset()
    end, rows = step(reader, start)
    for _ in range(3):
        assert sorted(row["job_id"] for row in rows if row["_corrupt"] is not None) == bad
        assert [row["payload"] for row in rows if row["_corrupt"] is not None] == [None] * 60
        rows = rows_between(reader, start, end)
    assert len(rows) == 600, "they stay in their batch until it is done"
    assert dead(redis) == []
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    assert left(redis) == (0, 0, [])
    assert dead(redis) == told(redis, b"dlq") == bad
    assert told(redis, b"completed") == good
    for one in entries(redis, redis.keys.dlq):
        assert one[b"reason"] == b"decode_failed"
        assert one[b"detail"] == b"payload.n: expected bigint, got text"


def test_a_driver_that_died_before_it_acknowledged_leaves_that_to_the_next(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    good, bad = fill(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name, payloadSchema=SCHEMA)
    end, _ = step(reader, reader.initialOffset())
    reader.stop()  # the commit log was written
    reader = consume_reader(each_server.url, queue_name, payloadSchema=SCHEMA, onCorrupt="ack")
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    assert left(redis) == (0, 0, [])
    assert (told(redis, b"completed"), dead(redis)) == (good, bad)


def test_the_next_driver_may_read_them_by_another_schema(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name, payloadSchema=SCHEMA)
    start = reader.initialOffset()
    end, _ = step(reader, start)
    reader.stop()  # the batch was begun and not committed
    reader = consume_reader(each_server.url, queue_name)
    assert {row["_corrupt"] for row in rows_between(reader, start, end)} == {None}
    reader.commit(end)
    assert left(redis) == (0, 0, [])
    assert (dead(redis), len(told(redis, b"completed"))) == ([], 600)


def test_what_somebody_else_holds_by_then_is_left_to_them(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    _, bad = fill(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name, payloadSchema=SCHEMA)
    end, rows = step(reader, reader.initialOffset())
    taken = next(row["entry_id"] for row in rows if row["job_id"] == bad[7])
    redis("XCLAIM", redis.keys.stream, "default", "worker", 0, taken)
    reader.commit(end)
    assert left(redis) == (1, 1, [])
    assert dead(redis) == [one for one in bad if one != bad[7]]


def test_envelopes_that_are_none_are_buried_too(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    broken = [
        redis("XADD", redis.keys.stream, "*", *words)
        for words in (("d", b"\x93garbage", "n", "m"), ("n", "m"))
    ]
    reader = consume_reader(each_server.url, queue_name, writeEvents=False)
    end, rows = step(reader, reader.initialOffset())
    assert [row["_corrupt"] for row in rows] == [b"\x93garbage", b""]
    reader.commit(end)
    assert left(redis) == (0, 0, [])
    assert [one[b"source_id"] for one in entries(redis, redis.keys.dlq)] == broken
    assert redis("EXISTS", redis.keys.events) == 0


def test_they_are_acknowledged_if_asked(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name)
    given: dict[str, Any] = {"payloadSchema": SCHEMA, "onCorrupt": "ack"}
    reader = consume_reader(each_server.url, queue_name, **given)
    end, rows = step(reader, reader.initialOffset())
    assert len([row for row in rows if row["_corrupt"] is not None]) == 60
    reader.commit(end)
    assert left(redis) == (0, 0, [])
    assert (dead(redis), len(told(redis, b"completed"))) == ([], 600)


def test_dropped_rows_are_buried_and_not_acknowledged(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    good, bad = fill(each_server.url, queue_name)
    given = {"payloadSchema": SCHEMA, "parseMode": "DROPMALFORMED"}
    reader = consume_reader(each_server.url, queue_name, **given)
    end, rows = step(reader, reader.initialOffset())
    assert sorted(row["job_id"] for row in rows) == good
    reader.commit(end)
    assert left(redis) == (0, 0, [])
    assert (told(redis, b"completed"), dead(redis)) == (good, bad)
    with pytest.raises(OptionError, match="would acknowledge jobs that nobody has seen"):
        consume_reader(each_server.url, queue_name, onCorrupt="ack", **given)
