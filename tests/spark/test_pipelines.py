"""Rollups, triage, archive, report, replay: checked against plain Python over the same events."""

import json
import random
import shutil
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
from ulid import ULID

from chasqui._core.envelope import decode_envelope, encode_envelope, encode_retry
from chasqui._core.ulid import UlidFactory
from chasqui.errors import ChasquiError
from chasqui.managing import retention
from chasqui.managing.retention import Log
from chasqui.model.payload import encode
from chasqui.sync import Queue
from tests.servers import Server
from tests.spark.direct import Redis

START_MS = 1_767_225_600_000  # 2026-01-01
EVENTS = ("active", "completed", "failed", "retry-scheduled", "dlq")
NAMES = {
    "started": "active",
    "completed": "completed",
    "failed": "failed",
    "retried": "retry-scheduled",
    "dead_lettered": "dlq",
}


def make_events(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Lives of jobs as a worker tells them, some of it missing, as events may be."""
    rng = random.Random(seed)
    ulids = UlidFactory(rng.randbytes)
    told: list[dict[str, Any]] = []
    for i in range(count):
        now = START_MS + i * 37
        job_id, name = ulids.next(now), rng.choice(["mail", "resize", ""])
        wait = rng.randrange(500)
        for attempt in range(1, 4):
            now += wait
            told.append({"e": "active", "id": job_id, "ts": now, "n": name, "attempt": attempt})
            run_us = int(rng.lognormvariate(9, 1.2)) + 1
            now += run_us // 1000
            end = {"id": job_id, "ts": now, "n": name, "attempt": attempt, "duration_us": run_us}
            if rng.random() < 0.8:
                told.append({"e": "completed", **end})
                break
            reason = rng.choice([f"timeout after {i} ms", f"no user '{job_id}'", "disk full"])
            told.append({"e": "failed", **end, "reason": reason})
            if attempt == 3:
                dead = {"id": job_id, "ts": now, "n": name, "attempt": 3}
                told.append({"e": "dlq", **dead, "reason": "retries_exhausted"})
                break
            wait = rng.randrange(2000)
            again = {"id": job_id, "ts": now, "n": name, "attempt": attempt + 1}
            told.append({"e": "retry-scheduled", **again, "backoff_ms": wait})
    told = [event for event in told if rng.random() > 0.02]
    told.append({"e": "drained", "id": "", "ts": START_MS, "n": ""})
    return told


def publish(redis: Redis, events: list[dict[str, Any]]) -> None:
    for event in events:
        fields = [str(p) for k, v in event.items() if not (k == "n" and not v) for p in (k, v)]
        redis("XADD", redis.keys.events, "*", *fields)


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return make_events(1500)


@pytest.fixture(scope="module")
def events(spark: Any, redis_86: Server, told: list[dict[str, Any]]) -> Any:
    """The same events as a table, and the queue that has them."""
    from chasqui.spark import read

    redis = Redis(redis_86.url, "pipelines")
    redis("DEL", redis.keys.events)
    publish(redis, told)
    return read(spark, "events", "pipelines", url=redis_86.url)


def window_of(ts: int, size_s: int = 60) -> datetime:
    return datetime.fromtimestamp(ts // 1000 // size_s * size_s, UTC).replace(tzinfo=None)


def rank_of(value: float, values: list[int]) -> tuple[float, float]:
    """Between which ranks a value lies."""
    below = sum(one < value for one in values) / len(values)
    return below, below + sum(one == value for one in values) / len(values)


def test_rollups_are_what_plain_python_counts(events: Any, told: list[dict[str, Any]]):
    from chasqui.spark import rollup, with_percentiles

    counts: dict[Any, Counter[str]] = defaultdict(Counter)
    runs: dict[Any, list[int]] = defaultdict(list)
    waits: dict[Any, list[int]] = defaultdict(list)
    for event in told:
        if event["e"] == "drained":
            continue
        key = (event["n"], window_of(event["ts"]))
        counts[key][event["e"]] += 1
        if event["e"] in ("completed", "failed"):
            runs[key].append(event["duration_us"])
        if event["e"] == "active" and event["attempt"] == 1:
            waits[key].append(event["ts"] - ULID.from_str(event["id"]).milliseconds)
    rows = with_percentiles(rollup(events)).collect()
    found = {(row["name"], row["start"].replace(tzinfo=None)): row for row in rows}
    assert found.keys() == counts.keys()
    for key, row in found.items():
        for column, event in NAMES.items():
            assert row[column] == counts[key][event], (key, column)
        assert row["jobs_per_s"] == counts[key]["completed"] / 60
        assert (row["runs"], row["waits"]) == (len(runs[key]), len(waits[key]))
        for kind, values in (("run_us", runs[key]), ("wait_ms", waits[key])):
            for name, rank in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                if not values:
                    assert row[f"{kind}_{name}"] is None
                    continue
                low, high = rank_of(row[f"{kind}_{name}"], values)
                assert low - 0.05 <= rank <= high + 0.05, (key, kind, name)


def test_minutes_merge_into_hours(events: Any, told: list[dict[str, Any]]):
    from chasqui.spark import merge, rollup, with_percentiles

    (row,) = with_percentiles(merge(rollup(events), "1 day", by=("queue",))).collect()
    kinds = Counter(event["e"] for event in told)
    assert {name: row[name] for name in NAMES} == {n: kinds[e] for n, e in NAMES.items()}
    runs = [event["duration_us"] for event in told if event["e"] in ("completed", "failed")]
    assert row["runs"] == len(runs)
    low, high = rank_of(row["run_us_p95"], runs)
    assert low - 0.03 <= 0.95 <= high + 0.03


def test_a_stream_rolls_up_to_the_same_numbers(
    spark: Any, events: Any, redis_86: Server, tmp_path: Path
):
    from chasqui.spark import follow, rollup

    stream = follow(
        spark,
        "events",
        "pipelines",
        url=redis_86.url,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=1500,
    )
    query = (
        rollup(stream)
        .writeStream.outputMode("complete")
        .format("memory")
        .queryName("rolled_up")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert len(query.recentProgress) > 1
    columns = ("name", "start", *NAMES, "runs", "waits")
    streamed = spark.table("rolled_up").select(*columns).collect()
    assert sorted(streamed) == sorted(rollup(events).select(*columns).collect())


def test_waits_begin_when_a_run_was_ready(spark: Any, redis_86: Server, queue_name: str):
    from chasqui.spark import read, waits

    ulid = UlidFactory().next(START_MS)
    redis = Redis(redis_86.url, queue_name)
    publish(
        redis,
        [
            {"e": "active", "id": ulid, "ts": START_MS + 40, "n": "", "attempt": 1},
            {"e": "waiting", "id": ulid, "ts": START_MS + 5000, "n": ""},
            {"e": "active", "id": ulid, "ts": START_MS + 5007, "n": "", "attempt": 2},
            {"e": "waiting", "id": "own", "ts": START_MS + 100, "n": ""},
            {"e": "active", "id": "own", "ts": START_MS + 111, "n": "", "attempt": 1},
            {"e": "active", "id": "unseen", "ts": START_MS + 1, "n": "", "attempt": 1},
        ],
    )
    rows = waits(read(spark, "events", queue_name, url=redis_86.url)).collect()
    assert {(row["job_id"], row["attempt"]): row["wait_ms"] for row in rows} == {
        (ulid, 1): 40,
        (ulid, 2): 7,
        ("own", 1): 11,
        ("unseen", 1): None,
    }


def test_jobs_are_counted_by_what_became_of_them(events: Any, told: list[dict[str, Any]]):
    from chasqui.spark import funnel

    attempts: dict[str, int] = defaultdict(int)
    ranks: dict[str, int] = defaultdict(int)
    order = {"dlq": 3, "completed": 2, "failed": 1}
    for event in told:
        if event["id"]:
            attempts[event["id"]] = max(attempts[event["id"]], event.get("attempt", 1))
            ranks[event["id"]] = max(ranks[event["id"]], order.get(event["e"], 0))
    names = ("open", "failed", "completed", "dead-lettered")
    expected = Counter((attempts[job_id], names[ranks[job_id]]) for job_id in attempts)
    rows = funnel(events).collect()
    assert {(row["attempts"], row["outcome"]): row["jobs"] for row in rows} == expected


def test_failures_are_grouped_by_what_they_have_in_common(events: Any, told: list[dict[str, Any]]):
    from chasqui.spark import triage

    rows = triage(events.where("event = 'failed'")).collect()
    failed = [event["reason"] for event in told if event["e"] == "failed"]
    assert {row["masked_reason"]: row["failures"] for row in rows} == {
        "timeout after <n> ms": sum(one.startswith("timeout") for one in failed),
        "no user <text>": sum(one.startswith("no user") for one in failed),
        "disk full": failed.count("disk full"),
    }
    assert len({row["signature"] for row in rows}) == 3
    assert all(1 <= len(row["sample_ids"]) <= 5 for row in rows)


@pytest.mark.parametrize(
    ("reason", "masked"),
    [
        ("user 0190c9d5-1111-7abc-8def-0123456789ab gone", "user <uuid> gone"),
        ('no "such thing" at 0xdeadbeef', "no <text> at <hex>"),
        ("GET https://host/path?x=1 gave 503", "GET <url> gave <n>"),
        ("cannot open /var/lib/x-1/file.txt", "cannot open <path>"),
        ("job 01M7H3ZKHV834ACBQ0YGS8GPTC took 1.5 s", "job <ulid> took <n> s"),
    ],
)
def test_what_differs_is_masked(spark: Any, reason: str, masked: str):
    from pyspark.sql import functions as F

    from chasqui.spark.reporting.signatures import masked as mask

    assert spark.range(1).select(mask(F.lit(reason))).first()[0] == masked


def test_the_archive_holds_every_event_once(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path
):
    from chasqui.spark import archive, compact, read, read_archive
    from tests.spark.test_spark import forget_commit

    redis, lake = Redis(redis_86.url, queue_name), str(tmp_path / "lake")
    publish(redis, make_events(150, seed=1))
    options = {"url": redis_86.url, "maxOffsetsPerTrigger": 200}
    archive(spark, queue_name, lake, **options).awaitTermination()
    forget_commit(tmp_path / "lake" / "_checkpoint")
    archive(spark, queue_name, lake, **options).awaitTermination()
    publish(redis, make_events(60, seed=2))
    archive(spark, queue_name, lake, **options).awaitTermination()
    there = {
        row["entry_id"] for row in read(spark, "events", queue_name, url=redis_86.url).collect()
    }
    kept = [row["entry_id"] for row in read_archive(spark, lake).collect()]
    assert sorted(kept) == sorted(there)
    (reader,) = redis.connection.run(retention.look(Log.events(redis.keys))).readers
    assert (reader.name, reader.lag) == (f"archive {lake}", 0)
    # Events of a later day, so that the days before can be compacted.
    redis("XADD", redis.keys.events, "*", "e", "active", "id", "x", "ts", START_MS + 90_000_000)
    archive(spark, queue_name, lake, **options).awaitTermination()
    assert compact(spark, lake) == 1
    assert compact(spark, lake) == 0
    spark.catalog.clearCache()
    kept = [row["entry_id"] for row in read_archive(spark, lake).collect()]
    assert len(kept) == len(set(kept)) == len(there) + 1
    days = list(
        (tmp_path / "lake" / "events" / f"queue={queue_name}" / "date=2026-01-01").iterdir()
    )
    assert len(days) == 1


def test_nothing_that_is_archived_is_lost_again(
    spark: Any,
    redis_86: Server,
    queue_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Neither what comes while its day is compacted, nor to an archive whose checkpoint is gone."""
    from chasqui.spark import archive, compact, read_archive
    from chasqui.spark.archiving import compacting

    redis, lake = Redis(redis_86.url, queue_name), tmp_path / "lake"

    def add(ts_ms: int) -> None:
        redis("XADD", redis.keys.events, "*", "e", "active", "id", "x", "ts", ts_ms)
        archive(spark, queue_name, str(lake), url=redis_86.url).awaitTermination()

    def killed(*_: Any) -> None:
        if (lake / "_compacting").exists():
            raise KeyboardInterrupt

    for ts_ms in (START_MS, START_MS + 1, START_MS + 90_000_000):
        add(ts_ms)
    with monkeypatch.context() as patch:
        patch.setattr(compacting, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, str(lake))
    add(START_MS + 2)
    compact(spark, str(lake))
    spark.catalog.clearCache()
    there = sorted(i.decode() for i, _ in redis("XRANGE", redis.keys.events, "-", "+"))
    kept = sorted(row["entry_id"] for row in read_archive(spark, str(lake)).collect())
    assert kept == there
    assert not (lake / "_compacting").exists()
    redis("XTRIM", redis.keys.events, "MAXLEN", 1)
    shutil.rmtree(lake / "_checkpoint")
    with pytest.raises(ChasquiError, match="does not know of them"):
        archive(spark, queue_name, str(lake), url=redis_86.url)
    assert sorted(row["entry_id"] for row in read_archive(spark, str(lake)).collect()) == there


def test_the_archive_knows_what_it_lacks(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path
):
    from chasqui.spark import archive, follow, read_archive, read_losses
    from chasqui.spark.archiving.archive import Archive
    from tests.spark.test_spark import forget_commit

    redis, lake = Redis(redis_86.url, queue_name), str(tmp_path / "lake")
    options = {"url": redis_86.url, "failOnDataLoss": False}
    told: list[tuple[int, list[int | None]]] = []

    def run() -> None:
        archive(spark, queue_name, lake, on_batch=note, **options).awaitTermination()

    def note(rows: int, losses: Any) -> None:
        told.append((rows, [loss.lost for loss in losses]))

    def ids() -> list[str]:
        return [i.decode() for i, _ in redis("XRANGE", redis.keys.events, "-", "+")]

    redis.add_events(30)
    run()
    assert read_losses(spark, lake).collect() == []
    # Gone before the batch was planned.
    redis.add_events(100, start=30)
    first = ids()
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 60)
    run()
    assert told == [(30, []), (60, [40])]

    # Some more of the next one before it is read, and all of it before it is replayed.
    redis.add_events(50, start=130)
    second = ids()[60:]
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 45)

    def late(df: Any, batch: int) -> None:
        redis("XTRIM", redis.keys.events, "MAXLEN", "=", 38)
        note(*Archive(spark, lake).write(df, batch))

    events = follow(spark, "events", queue_name, **options, startingOffsets="earliest")
    writer = events.writeStream.foreachBatch(late).trigger(availableNow=True)
    writer.option("checkpointLocation", f"{lake}/_checkpoint").start().awaitTermination()
    assert told.pop() == (38, [12])
    forget_commit(tmp_path / "lake" / "_checkpoint")
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 0)
    run()
    assert told.pop() == (0, [])
    kept = {row["entry_id"] for row in read_archive(spark, lake).collect()}
    assert kept == {*first[:30], *first[70:], *second[12:]}
    rows = read_losses(spark, lake).orderBy("batch").collect()
    assert [(row["queue"], row["after_id"], row["before_id"], row["lost"]) for row in rows] == [
        (queue_name, first[29], first[70], 40),
        (queue_name, first[-1], second[-1], 12),
    ]
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        assert int(row["before_ts"].timestamp() * 1000) == int(row["before_id"].split("-")[0])


def test_the_report_counts_what_plain_python_counts(events: Any, told: list[dict[str, Any]]):
    from chasqui.spark import gather, page

    report = json.loads(json.dumps(gather(events)))
    kinds = Counter(event["e"] for event in told)
    assert report["events"] == len(told), "each, also one that is of no job"
    for name, event in NAMES.items():
        assert report["totals"][name] == kinds[event], name
        assert sum(row[name] for row in report["timeline"]) == kinds[event], name
        assert sum(row[name] for row in report["names"]) == kinds[event], name
    assert report["by_queue"][0]["queue"] == report["queues"][0] == "pipelines"
    assert sum(row["failures"] for row in report["signatures"]) == kinds["failed"]
    waited = [row["wait_ms_p50"] for row in report["timeline"] if row["wait_ms_p50"] is not None]
    assert min(waited) <= report["totals"]["wait_ms_p50"] <= max(waited)
    lengths: Counter[int] = Counter()
    for event in told:
        if "duration_us" in event:
            digits = str(event["duration_us"])
            first = max(edge for edge in (1, 2, 5) if edge <= int(digits[0]))
            lengths[first * 10 ** (len(digits) - 1)] += 1
    found: Counter[int] = Counter()
    for cell in report["heat"]:
        found[cell["from_us"]] += cell["runs"]
    assert found == lengths
    assert page(report).startswith("<!doctype html>")


def test_the_parts_of_a_report_agree(events: Any, told: list[dict[str, Any]]):
    """Of one name in one queue, a page says the same in its tiles and in its tables."""
    from chasqui.spark import gather

    steps: list[str] = []
    report = gather(events.where("name = 'mail'"), on_step=steps.append)
    assert len(steps) == len(set(steps)) > 2
    ran = [
        event["duration_us"] for event in told if event["n"] == "mail" and "duration_us" in event
    ]
    ranks = {"run_us_p50": 0.5, "run_us_p95": 0.95, "run_us_p99": 0.99}
    (name,), (queue,) = report["names"], report["by_queue"]
    for one, rank in ranks.items():
        assert report["totals"][one] == name[one] == queue[one]
        exact = quantiles(ran, n=100, method="inclusive")[round(100 * rank) - 1]
        assert 0.99 * exact - 1 <= name[one] <= exact, "but for the digits behind the third"


def test_a_report_over_an_event_of_no_job(events: Any):
    from chasqui.spark import gather, page

    report = gather(events.where("event = 'drained'"))
    assert (report["events"], report["names"], report["totals"]["completed"]) == (1, [], 0)
    assert "1 event." in page(report)


def test_replay_is_dry_unless_told_and_moves_each_job_once(
    spark: Any, each_server: Server, queue_name: str
):
    from chasqui.spark import read, replay

    redis = Redis(each_server.url, queue_name)
    with Queue(queue_name, redis_url=each_server.url) as queue:
        queue.add_bulk([{"name": "resize", "data": {"n": i}} for i in range(600)])
    for i, job in enumerate(redis.jobs()):
        reason = "Timeout in x" if i % 3 == 0 else "other"
        words = ("d", job[b"d"], "n", "resize", "source_id", "1-0", "reason", reason)
        redis("XADD", redis.keys.dlq, "*", *words)
    redis("XTRIM", redis.keys.stream, "MAXLEN", "=", 0)
    dead = read(spark, "dlq", queue_name, url=each_server.url)
    chosen = dead.where("name = 'resize' and reason like 'Timeout%'")
    assert replay(chosen, url=each_server.url) == 200
    assert (len(redis.jobs()), redis("XLEN", redis.keys.dlq)) == (0, 600)
    assert replay(chosen, url=each_server.url, dry_run=False, limit=50) == 50
    assert replay(chosen, url=each_server.url, dry_run=False) == 150
    assert replay(chosen, url=each_server.url, dry_run=False) == 0
    assert redis("XLEN", redis.keys.dlq) == 400
    assert len({decode_envelope(job[b"d"]).id for job in redis.jobs()}) == 200


def test_bad_rows_of_a_consumed_batch_are_retried_or_buried(
    spark: Any, each_server: Server, queue_name: str, tmp_path: Path
):
    from chasqui.spark import fail_jobs, follow

    redis = Redis(each_server.url, queue_name)
    with Queue(queue_name, redis_url=each_server.url) as queue:
        queue.add_bulk(
            [
                {"name": "m", "data": {"n": i}, "attempts": 1 + i % 2, "backoff": 60_000}
                for i in range(90)
            ]
        )
        unread = queue.add("m", {"n": "many"})
    # As a producer with tracing adds them: one is to be buried, one to be retried.
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for n, attempts in ((90, 1), (93, 2)):
        retry = encode_retry(attempts, ("fixed", 60_000, None, None, None))
        envelope = encode_envelope(f"traced-{n}", encode({"n": n}), 1_700_000_000_000, 0, retry)
        redis("XADD", redis.keys.stream, "*", "d", envelope, "n", "m", "traceparent", parent)
    moved: list[dict[str, int]] = []

    def handle(df: Any, batch: int) -> None:
        bad = df.where("payload.n % 3 = 0")
        moved.append(fail_jobs(bad, "no good", url=each_server.url))
        moved.append(fail_jobs(bad, "no good", url=each_server.url))

    jobs = follow(
        spark,
        "jobs",
        queue_name,
        url=each_server.url,
        mode="consume",
        consumer="etl",
        consumerLease="2s",
        payloadSchema="n bigint",
    )
    query = (
        jobs.writeStream.foreachBatch(handle)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert moved[0] == {"retried": 16, "buried": 16, "lost": 0}
    assert moved[1]["retried"] == moved[1]["buried"] == 0
    assert redis("ZCARD", redis.keys.delayed) == 16
    assert redis("XLEN", redis.keys.dlq) == 17
    assert redis("XLEN", redis.keys.stream) == 0
    assert redis("XPENDING", redis.keys.stream, "default")[0] == 0
    assert redis("GET", redis.keys.trace("traced-93")) == parent.encode()
    *_, traced, last = redis("XRANGE", redis.keys.dlq, "-", "+")
    fields, of_unread = (
        dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in (traced, last)
    )
    assert decode_envelope(of_unread[b"d"]).id == unread.id
    assert of_unread[b"detail"] == b"payload.n: expected bigint, got text"
    assert fields[b"traceparent"] == parent.encode()
    assert (fields[b"error"], fields[b"attempts"]) == (b"no good", b"1")
    assert fields[b"consumer"].startswith(b"spark:etl:")


def test_results_are_joined_to_rows(spark: Any, redis_86: Server, queue_name: str):
    from chasqui.spark import with_results

    redis = Redis(redis_86.url, queue_name)
    for i in range(0, 20, 2):
        redis("SET", redis.keys.result(f"job-{i}"), encode({"n": i}), "EX", 100)
    df = spark.range(20).selectExpr("concat('job-', id) as job_id", "id")
    rows = with_results(df, queue_name, url=redis_86.url).collect()
    assert {row["id"]: row["result"] for row in rows} == {
        i: json.dumps({"n": i}) if i % 2 == 0 else None for i in range(20)
    }


def test_rows_can_be_enqueued_for_later(spark: Any, redis_86: Server, queue_name: str):
    from chasqui.spark import enqueue, read

    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    df = spark.range(10).selectExpr("id as n", f"timestamp'{later}' as run_at")
    enqueue(df, queue_name, url=redis_86.url, jobName="report")
    delayed = read(spark, "delayed", queue_name, url=redis_86.url, columns=["name", "job_id"])
    assert delayed.where("name = 'report'").count() == 10
