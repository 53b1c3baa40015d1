"""What finished jobs carried, as a table: read at once and followed."""

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from chasqui import Job, Queue, UnrecoverableError, Worker
from chasqui.managing import retention
from chasqui.model.payload import decode
from chasqui.spark.options import OptionError
from chasqui.spark.reading.ranges import DataLossError
from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.direct import Redis, read, step, tail_reader


def work(server: Server, queue_name: str, jobs: Sequence[Any], **options: Any) -> list[Job]:
    """Add jobs, and run them by a worker that writes history."""

    async def handle(job: Job) -> None:
        if job.data == "bad":
            raise UnrecoverableError("no such customer")

    async def run() -> list[Job]:
        async with Queue(queue_name, redis_url=server.url) as queue:
            added = await queue.add_bulk([{"name": "n", "data": data} for data in jobs])
            options.setdefault("history", True)
            worker = Worker(queue_name, handle, redis_url=server.url, **options)
            running = asyncio.ensure_future(worker.run())
            async with asyncio.timeout(30):
                while True:
                    counts = await queue.counts()
                    if not counts.waiting and not counts.pending:
                        break
                    await asyncio.sleep(0.01)
            await worker.close()
            await running
            return added

    return asyncio.run(run())


def test_finished_jobs_are_rows_with_what_they_carried(each_server: Server, queue_name: str):
    good, bad = work(each_server, queue_name, [{"order": 7, "to": "ann"}, "bad"])
    rows = read(
        each_server.url, queue_name, table="history", payloadSchema="order bigint, to string"
    )
    rows = {row["job_id"]: row for row in rows}
    assert rows.keys() == {good.id, bad.id}
    row = rows[good.id]
    assert (row["event"], row["name"], row["attempt"], row["reason"]) == ("completed", "n", 0, None)
    assert row["payload"] == {"order": 7, "to": "ann"}
    assert row["created_at"].timestamp() * 1000 == pytest.approx(good.created_at_ms, abs=1)
    assert row["ts"] >= row["created_at"] - datetime.timedelta(seconds=1)
    assert row["duration_us"] >= 0
    assert row["_corrupt"] is None
    row = rows[bad.id]
    assert (row["event"], row["reason"], row["payload"]) == ("dlq", "unrecoverable", None)
    assert row["_corrupt"] is not None, "its payload is no map"


def test_it_is_followed_and_losses_are_counted(each_server: Server, queue_name: str):
    work(each_server, queue_name, list(range(3)))
    reader = tail_reader(
        each_server.url, queue_name, table="history", startingOffsets="earliest", reader="mine"
    )
    end, rows = step(reader, reader.initialOffset())
    assert [row["payload"] for row in rows] == [b"\x00", b"\x01", b"\x02"]
    work(each_server, queue_name, list(range(5)))
    reader.latestOffset(end, ReadAllAvailable())
    redis = Redis(each_server.url, queue_name)
    (known,) = redis.connection.run(retention.look(retention.Log.history(redis.keys))).readers
    assert (known.name, known.lag) == ("mine", 5)
    redis("XTRIM", redis.keys.history, "MAXLEN", 2)
    fresh = tail_reader(each_server.url, queue_name, table="history")
    with pytest.raises(DataLossError, match="3 entries of history"):
        step(fresh, end)


def test_a_history_that_nobody_writes_is_an_error(each_server: Server, queue_name: str):
    work(each_server, queue_name, [1], history=False)
    text = f"no worker of queue '{queue_name}' writes history: start workers with history=True"
    with pytest.raises(OptionError, match=text):
        read(each_server.url, queue_name, table="history")
    with pytest.raises(OptionError, match=text):
        tail_reader(each_server.url, queue_name, table="history").initialOffset()


def test_it_is_archived_beside_the_events(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path
):
    """Each job once, though a batch is replayed; what was lost is written down."""
    from chasqui.spark import archive, read_archive, read_losses
    from tests.spark.test_spark import forget_commit

    lake = str(tmp_path / "lake")
    given = {"url": redis_86.url, "table": "history"}
    command = ("spark", "archive", "--queue", queue_name, "--to", lake, "--payloads", "--json")
    work(redis_86, queue_name, [1], history=False)
    ran = call(*command, url=redis_86.url)
    assert ran.code != 0
    assert f"no worker of queue '{queue_name}' writes history: start workers" in ran.err
    first = work(redis_86, queue_name, [{"n": n} for n in range(20)])
    ran = call(*command, url=redis_86.url)
    told = {"events": 42, "lost": 0, "jobs": 20, "jobs_lost": 0}
    assert (ran.code, ran.json) == (0, told)
    forget_commit(tmp_path / "lake" / "_checkpoint_history")
    archive(spark, queue_name, lake, **given).awaitTermination()
    rows = read_archive(spark, lake, table="history").collect()
    assert {row["job_id"] for row in rows} == {job.id for job in first}
    assert sorted(decode(row["payload"])["n"] for row in rows) == list(range(20))
    assert read_losses(spark, lake, table="history").collect() == []
    redis = Redis(redis_86.url, queue_name)
    work(redis_86, queue_name, [{"n": n} for n in range(20, 25)])
    redis("XTRIM", redis.keys.history, "MAXLEN", 2)
    query = archive(spark, queue_name, lake, failOnDataLoss=False, **given)
    query.awaitTermination()
    rows = read_archive(spark, lake, table="history").collect()
    assert sorted(decode(row["payload"])["n"] for row in rows) == [*range(20), 23, 24]
    (lost,) = read_losses(spark, lake, table="history").collect()
    assert (lost["queue"], lost["lost"]) == (queue_name, 3)
