"""What a report says of failures, losses and dead jobs, over events of real workers."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from chasqui import Queue, UnrecoverableError, Worker
from chasqui.model.job import Job
from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.direct import Redis
from tests.spark.test_pipelines import START_MS, make_events, publish


class Wordless(Exception):
    """Raised without a text, as a timeout of asyncio is."""


#: Per kind of job what its runs raise.
RAISED: dict[str, Callable[[int], Exception]] = {
    "parse": lambda i: ValueError(f"order {i} is no order"),
    "hang": lambda i: Wordless(),
    # Longer than what events keep of it, with a quote that is open where they cut it.
    "page": lambda i: KeyError(f"{i}" + "x" * 1500),
    "stop": lambda i: UnrecoverableError(f"no customer '{i}'"),
}


async def fail(url: str, queue_name: str, each: int) -> list[str]:
    """Let a worker bury so many jobs of each kind; their ids."""

    async def handler(job: Job) -> None:
        raise RAISED[job.name](job.data)

    worker = Worker(queue_name, handler, redis_url=url, max_attempts=1)
    async with Queue(queue_name, redis_url=url) as queue:
        jobs = [{"name": name, "data": i} for name in RAISED for i in range(each)]
        added = await queue.add_bulk(jobs)
        running = asyncio.create_task(worker.run())
        while (await queue.counts()).dlq < len(jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await worker.close()
        await running
    return [job.id for job in added]


@pytest.fixture
def two_queues(redis_86: Server, queue_name: str) -> str:
    """Two queues whose jobs are dead, with commas between."""
    names = (queue_name, f"{queue_name}-b")
    for name in names:
        asyncio.run(fail(redis_86.url, name, each=3))
    return ",".join(names)


def test_a_failed_run_and_its_dead_job_have_one_signature(
    spark: Any, redis_86: Server, two_queues: str
):
    from chasqui.spark import read, triage

    url = redis_86.url
    failed = triage(read(spark, "events", two_queues, url=url)).collect()
    dead = triage(read(spark, "dlq", two_queues, url=url)).collect()
    assert [row["signature"] for row in failed] == [row["signature"] for row in dead]
    assert len(failed) == len(RAISED), "one row for both queues"
    for ran, died in zip(failed, dead, strict=True):
        assert ran["failures"] == died["failures"] == 6
        assert ran["masked_reason"] == died["masked_reason"]
        assert ran["queues"] == died["queues"] == two_queues.split(",")
        assert ran["sample_ids"] == died["sample_ids"], "ids of jobs, in both"
    words = {row["masked_reason"][:40] for row in failed}
    assert {"ValueError: order <n> is no order", "Wordless"} < words

    # So replay takes what is known of events.
    chosen = next(row["signature"] for row in failed if row["names"] == ["hang"])
    again = ("replay", "-q", two_queues, "--signature", chosen, "--yes", "--json")
    assert call("spark", *again, url=url).json == {"replayed": 6, "selected": 6}
    for name in two_queues.split(","):
        redis = Redis(url, name)
        assert redis("XLEN", redis.keys.dlq) == 9
        assert {job[b"n"] for job in redis.jobs()} == {b"hang"}


def test_what_is_no_signature_is_refused():
    ran = call("spark", "replay", "-q", "any", "--signature", "5E8")
    assert ran.code == 2
    assert "'5E8' is no signature: those are twelve hex digits" in ran.err


# ── What is missing ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Far from UTC, in which reports are, wherever they are made."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_a_report_says_what_was_trimmed_before_it_and_meanwhile(
    spark: Any, redis_86: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
):
    from chasqui.spark import page, report_queue
    from chasqui.spark.reporting import report as reports

    redis = Redis(redis_86.url, queue_name)
    told = make_events(300)
    publish(redis, told)
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", len(told) - 100)
    ((first_id, _),) = redis("XRANGE", redis.keys.events, "-", "+", "COUNT", 1)
    first = datetime.fromtimestamp(int(first_id.split(b"-")[0]) / 1000, UTC)
    look = reports.kept_events

    def look_then_trim(*queues: str, **options: Any) -> Any:
        found = look(*queues, **options)
        redis("XTRIM", redis.keys.events, "MAXLEN", "=", len(told) - 130)
        return found

    monkeypatch.setattr(reports, "kept_events", look_then_trim)
    since = first - timedelta(hours=24)
    report = report_queue(spark, queue_name, since=since, url=redis_86.url)
    assert report["kept"] == [{"queue": queue_name, "first": first.isoformat(), "trimmed": 100}]
    (loss,) = report["losses"]
    assert (loss["queue"], loss["lost"]) == (queue_name, 30)
    assert report["dlq"]["jobs"] == 0
    moments = [event["ts"] for event in told[130:]]
    assert report["events"] == len(moments)
    assert report["first"] == datetime.fromtimestamp(min(moments) / 1000, UTC).isoformat()
    text = page(report)
    assert (
        f"Events go back to {words(first)} only; all since {words(since)} were asked for. "
        "100 older ones were trimmed." in text
    )
    assert "30 events were trimmed before they were read, between " in text


def test_a_rollup_counts_what_is_trimmed_while_it_reads(
    spark: Any, redis_86: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
):
    from chasqui.spark.reporting import report as reports

    redis, look = Redis(redis_86.url, queue_name), reports.kept_events
    publish(redis, told := make_events(50))

    def look_then_trim(*queues: str, **options: Any) -> Any:
        found = look(*queues, **options)
        redis("XTRIM", redis.keys.events, "MAXLEN", "=", len(told) - 30)
        return found

    monkeypatch.setattr(reports, "kept_events", look_then_trim)
    ran = call("spark", "rollup", "-q", queue_name, "--json", url=redis_86.url)
    assert sum(row["started"] for row in ran.json) == sum(one["e"] == "active" for one in told[30:])
    assert "30 events were trimmed before they were read, between " in ran.err


def test_a_report_over_an_archive_tells_what_it_lacks(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path
):
    from chasqui.spark import archive, page, report_archive

    redis, lake = Redis(redis_86.url, queue_name), str(tmp_path / "lake")
    told = make_events(40)
    for part in (told[:50], told[50:]):
        publish(redis, part)
        redis("XTRIM", redis.keys.events, "MAXLEN", "=", 50)
        options = {"url": redis_86.url, "failOnDataLoss": False}
        archive(spark, queue_name, lake, **options).awaitTermination()
    lost = len(told) - 50 - 50
    since = datetime.fromtimestamp(START_MS / 1000, UTC) - timedelta(days=1)
    elsewhere = f"{redis_86.url}/7"
    report = report_archive(spark, lake, queue_name, since=since, url=elsewhere)
    assert sum(row["lost"] for row in report["losses"]) == lost
    assert report["dlq"] is None
    text = page(report)
    assert f"{lost} events were trimmed before they were read, between " in text
    assert text.count("class=band") > 1
    assert "only; all since 31 Dec 2025, 00:00:00 were asked for." in text
    assert "Not known: queue " in text, "that is not the same as none"


def test_dead_jobs_are_known_where_the_queue_is(redis_86: Server, queue_name: str):
    from chasqui.spark.reporting.report import why_unknown

    redis = Redis(redis_86.url, queue_name)
    assert "nothing was ever added" in (why_unknown(queue_name, url=redis_86.url) or "")
    publish(redis, make_events(1))
    assert why_unknown(queue_name, url=redis_86.url) is None
    assert "127.0.0.1:1" in (why_unknown(queue_name, url="redis://127.0.0.1:1") or "")


def words(moment: datetime) -> str:
    return f"{moment.day} {moment:%b %Y, %H:%M:%S}"
