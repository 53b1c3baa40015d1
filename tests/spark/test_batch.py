"""Batch reads of every table, on real servers, without a JVM."""

import json
import time
from collections.abc import Callable

import pytest

from chasqui.errors import NotSupportedError
from chasqui.model.payload import decode, encode
from chasqui.spark.options import OptionError, Options
from chasqui.spark.reading.batch import PushdownReader
from chasqui.sync import Queue
from tests.core.test_vectors import VECTORS, from_hex
from tests.crash.conftest import eventually
from tests.servers import Server
from tests.spark.direct import Redis, read, read_parts, rows_of, schema_of


def fill(url: str, queue: str, count: int) -> list[str]:
    with Queue(queue, redis_url=url) as producer:
        jobs = producer.add_bulk([{"name": "mail", "data": {"n": i}} for i in range(count)])
    return [job.id for job in jobs]


def test_jobs_are_read_once_each_however_they_are_cut(each_server: Server, queue_name: str):
    ids = fill(each_server.url, queue_name, 3210)
    for given in ({}, {"minPartitions": 7}, {"maxRecordsPerPartition": 100, "fetchCount": 13}):
        parts = read_parts(each_server.url, queue_name, "job_id", "payload", **given)
        rows = [row for part in parts for row in part]
        assert [row["job_id"] for row in rows] == ids
        assert [decode(row["payload"])["n"] for row in rows] == list(range(3210))
        assert len(parts) >= given.get("minPartitions", 1)
        assert max(map(len, parts)) <= given.get("maxRecordsPerPartition", 5000)


def test_what_comes_after_planning_is_not_in_the_snapshot(each_server: Server, queue_name: str):
    from chasqui.spark.reading.batch import BatchReader

    fill(each_server.url, queue_name, 10)
    options = Options.parse({"url": each_server.url, "queue": queue_name}, "r")
    reader = BatchReader(options, schema_of(options, "job_id"))
    parts = reader.partitions()
    fill(each_server.url, queue_name, 5)
    assert sum(len(rows_of(reader.read(part))) for part in parts) == 10


def test_offsets_and_times_narrow_a_read(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    for ms in (1000, 1000, 2000, 3000, 4000):
        redis("XADD", redis.keys.events, f"{ms}-*", "e", "active", "id", str(ms), "ts", str(ms))

    def ids(**given: object) -> list[str]:
        rows = read(each_server.url, queue_name, "job_id", table="events", **given)
        return [row["job_id"] for row in rows]

    assert ids(startingTimestamp=2000) == ["2000", "3000", "4000"]
    assert ids(endingTimestamp=1000) == ["1000", "1000"]
    assert ids(startingTimestamp=1001, endingTimestamp=3000) == ["2000", "3000"]
    assert ids(startingOffsets=json.dumps({queue_name: "1000-0"})) == [
        "1000",
        "2000",
        "3000",
        "4000",
    ]
    assert ids(endingOffsets=json.dumps({queue_name: "2000-0"})) == ["1000", "1000", "2000"]
    assert ids(startingOffsets="latest") == []


def test_filters_on_the_entrys_time_narrow_it_too(each_server: Server, queue_name: str):
    from datetime import UTC, datetime

    from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

    redis = Redis(each_server.url, queue_name)
    for ms in (1000, 2000, 3000, 4000):
        redis("XADD", redis.keys.events, f"{ms}-0", "e", "active", "id", str(ms), "ts", str(ms))
    options = Options.parse({"url": each_server.url, "queue": queue_name, "table": "events"}, "r")
    reader = PushdownReader(options, schema_of(options, "job_id"))
    second = [datetime.fromtimestamp(n, UTC) for n in range(5)]
    other = EqualTo(("job_id",), "x")
    left = list(
        reader.pushFilters(
            [
                GreaterThanOrEqual(("entry_ts",), second[2]),
                other,
                LessThan(("entry_ts",), second[4]),
            ]
        )
    )
    assert left == [other]
    rows = [row for part in reader.partitions() for row in rows_of(reader.read(part))]
    assert [row["job_id"] for row in rows] == ["2000", "3000"]


def test_pending_jobs_tell_who_holds_them(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    ids = fill(each_server.url, queue_name, 30)
    redis("XGROUP", "CREATE", redis.keys.stream, "default", "0")
    read_words = ("XREADGROUP", "GROUP", "default", "worker-1", "COUNT", 10)
    redis(*read_words, "STREAMS", redis.keys.stream, ">")
    rows = read(each_server.url, queue_name, includePending=True)
    assert [row["job_id"] for row in rows if row["consumer"] == "worker-1"] == ids[:10]
    assert {row["deliveries"] for row in rows[:10]} == {1}
    assert {row["consumer"] for row in rows[10:]} == {None}
    no_group = read(each_server.url, queue_name, includePending=True, group="other")
    assert {row["consumer"] for row in no_group} == {None}


def test_delayed_jobs_are_read_once_each(each_server: Server, queue_name: str):
    with Queue(queue_name, redis_url=each_server.url) as producer:
        jobs = producer.add_bulk(
            [
                {"name": "later", "data": i, "delay_ms": 60_000 + i % 5, "attempts": 3}
                for i in range(500)
            ]
        )
    rows = read(each_server.url, queue_name, table="delayed", minPartitions=3, fetchCount=40)
    assert sorted(row["job_id"] for row in rows) == sorted(job.id for job in jobs)
    assert {row["retry"]["max_attempts"] for row in rows} == {3}
    now_s = time.time()
    assert all(0 < row["run_at"].timestamp() - now_s < 61 for row in rows)


def test_dead_jobs_tell_why(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name, 1)
    envelope = redis.jobs()[0][b"d"]
    redis("XADD", redis.keys.dlq, "*", "d", envelope, "n", "mail", "source_id", "5-0", "reason",
          "malformed", "detail", "why")  # fmt: skip
    (row,) = read(each_server.url, queue_name, table="dlq")
    assert (row["source_id"], row["reason"], row["detail"]) == ("5-0", "malformed", "why")
    assert (row["name"], decode(row["payload"])) == ("mail", {"n": 0})


def test_results_are_fetched_by_id_or_found_by_a_scan(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name, 1)
    for i in range(5):
        redis("SET", redis.keys.result(f"job-{i}"), encode({"n": i}), "EX", 100)
    rows = read(
        each_server.url,
        queue_name,
        table="results",
        jobIds="job-1,gone,job-3",
        payloadFormat="json",
    )
    assert [(row["job_id"], json.loads(row["value"])["n"]) for row in rows] == [
        ("job-1", 1),
        ("job-3", 3),
    ]
    assert all(0 < row["ttl_ms"] <= 100_000 for row in rows)
    rows = read(each_server.url, queue_name, "job_id", table="results", scan=True)
    assert sorted(row["job_id"] for row in rows) == [f"job-{i}" for i in range(5)]


def test_queues_are_described_and_found_by_a_pattern(each_server: Server, queue_name: str):
    other = f"{queue_name}-b"
    fill(each_server.url, queue_name, 12)
    fill(each_server.url, other, 3)
    redis = Redis(each_server.url, queue_name)
    redis.add_events(4)
    (row,) = read(each_server.url, queue_name, table="queues")
    assert (row["length"], row["pending"], row["events"]) == (12, 0, 4)
    assert abs(row["oldest_ts"].timestamp() - time.time()) < 60
    options = Options.parse(
        {"url": each_server.url, "subscribePattern": f"{queue_name}.*", "table": "queues"}, "r"
    )
    from chasqui.spark.reading.batch import BatchReader

    reader = BatchReader(options, schema_of(options, "queue", "length"))
    rows = [row for part in reader.partitions() for row in rows_of(reader.read(part))]
    assert rows == [
        {"queue": queue_name, "length": 12},
        {"queue": other, "length": 3},
    ]


def test_a_queue_that_never_was_is_refused(each_server: Server, queue_name: str):
    with pytest.raises(OptionError, match=r"is not on 127.0.0.1:.*nothing was ever added to it"):
        read(each_server.url, queue_name)


def test_reading_can_be_slowed_down(each_server: Server, queue_name: str):
    fill(each_server.url, queue_name, 300)
    started_s = time.monotonic()
    rows = read(each_server.url, queue_name, "job_id", fetchCount=100, maxReadRowsPerSecond=1000)
    assert len(rows) == 300
    assert time.monotonic() - started_s >= 0.2


def test_what_another_implementation_wrote_is_read(each_server: Server, queue_name: str):
    """Bytes captured from chasquimq 1.3.0, put where it puts them: every table reads them."""
    url, redis = each_server.url, Redis(each_server.url, queue_name)
    for job in VECTORS["jobs"]:
        name = ["n", job["name"]] if job["name"] else []
        redis("XADD", redis.keys.stream, "*", "d", from_hex(job["d_hex"]), *name)
    rows = read(url, queue_name)
    assert [row["job_id"] for row in rows] == [job["id"] for job in VECTORS["jobs"]]
    assert [row["name"] for row in rows] == [job["name"] or "" for job in VECTORS["jobs"]]
    assert [row["payload"] for row in rows] == [
        from_hex(job["payload_hex"]) for job in VECTORS["jobs"]
    ]
    assert {row["_corrupt"] for row in rows} == {None}

    for member in VECTORS["delayed"]:
        redis("ZADD", redis.keys.delayed, member["score"], from_hex(member["member_hex"]))
    rows = read(url, queue_name, "job_id", "name", table="delayed")
    assert sorted((row["job_id"], row["name"]) for row in rows) == sorted(
        (member["envelope"][0], member["name"]) for member in VECTORS["delayed"]
    )

    for event in VECTORS["events"]:
        redis("XADD", redis.keys.events, "*", *(part for pair in event.items() for part in pair))
    rows = read(url, queue_name, table="events")
    assert [row["event"] for row in rows] == [event["e"] for event in VECTORS["events"]]
    assert [row["attempt"] for row in rows] == [
        int(event["attempt"]) if "attempt" in event else None for event in VECTORS["events"]
    ]
    assert not any(row["extra"] for row in rows)

    readable = [dead for dead in VECTORS["dlq"] if not dead["d"].startswith("<")]
    for dead in readable:
        fields = {**dead, "d": from_hex(dead["d"])}
        redis("XADD", redis.keys.dlq, "*", *(part for pair in fields.items() for part in pair))
    rows = read(url, queue_name, table="dlq")
    assert [row["reason"] for row in rows] == [dead["reason"] for dead in readable]

    (result,) = VECTORS["result"]
    job_id = result["key"].rpartition(":")[2]
    redis("SET", redis.keys.result(job_id), from_hex(result["value_hex"]), "EX", 100)
    (row,) = read(url, queue_name, table="results", jobIds=job_id, payloadFormat="json")
    assert json.loads(row["value"]) == {"ok": 1}


def test_reads_can_be_taken_off_the_primary(private_server: Callable[..., Server], queue_name: str):
    primary, replica = private_server(), private_server()
    fill(primary.url, queue_name, 500)
    there, here = Redis(replica.url, queue_name), Redis(primary.url, queue_name)
    there("REPLICAOF", "127.0.0.1", primary.port)
    eventually(lambda: b"state=online" in here("INFO", "replication"), "the replica is online")
    eventually(lambda: there("EXISTS", there.keys.stream), "the replica has the jobs")
    here("CONFIG", "RESETSTAT")
    rows = read(primary.url, queue_name, "job_id", readFrom="replica", fetchCount=100)
    assert len(rows) == 500
    assert b"cmdstat_xrange" in there("INFO", "commandstats")
    assert b"cmdstat_xrange" not in here("INFO", "commandstats")
    there("REPLICAOF", "NO", "ONE")
    eventually(lambda: b"state=online" not in here("INFO", "replication"), "it is none any more")
    with pytest.raises(NotSupportedError, match="has no replica that is in step"):
        read(primary.url, queue_name, readFrom="replica")
