"""`chasqui spark demo`: the tour of queues as DataFrames, on a server of its own, checked."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from chasqui import embedded
from chasqui.cli.spark_run import Progress, SparkRun
from chasqui.errors import ChasquiError, UnrecoverableError
from chasqui.job import Job
from chasqui.sync import Queue
from chasqui.worker import Worker

_QUEUE: Final = "tour"
_WORKERS: Final = 2
#: With the handler's 5 ms, what the workers do in a second stays below what the events stream
#: keeps, so that an archive every second loses none.
_SLOTS: Final = 40


def worker() -> Worker:
    """What the tour's worker processes run."""
    return Worker(_QUEUE, _handle, concurrency=_SLOTS, max_attempts=3)


async def _handle(job: Job) -> None:
    await asyncio.sleep(0.005)
    number = job.data["n"]
    if number % 10_000 == 7:
        raise UnrecoverableError(f"order {number} has no customer '{job.data['customer']}'")
    if number % 1000 == 13 and job.attempt < 2:
        raise TimeoutError(f"the shop did not answer order {number} in 0.{number % 10} s")


def demo(
    rows: Annotated[int, typer.Option(min=1000, metavar="N", help="Rows to enqueue.")] = 1_000_000,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the report goes.")] = Path(
        "chasqui-report.html"
    ),
) -> None:
    """Take the tour: enqueue a data set, drain it while an archive follows, roll up, report,
    triage, replay.

    Needs no Redis: it starts a private server, which is gone afterwards.

    Example: chasqui spark demo --rows 100000
    """
    with embedded.start() as running, tempfile.TemporaryDirectory() as folder:
        os.environ["CHASQUI_URL"] = running.url
        with SparkRun("local[2]", ["spark.sql.shuffle.partitions=4"], running.url) as spark:
            _Tour(spark, running.url, Path(folder), rows).run(html)


class _Tour:
    def __init__(self, spark: SparkRun, url: str, folder: Path, rows: int) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._rows = rows

    def run(self, html: Path) -> None:
        from chasqui.spark import archive, gather, page, read, read_archive, replay, rollup, triage

        spark, server = self._spark.session, self._spark.server
        self._enqueue()
        lake = str(self._folder / "lake")
        following = archive(
            spark,
            _QUEUE,
            lake,
            follow_on=True,
            interval_s=1,
            failOnDataLoss=False,
            maxOffsetsPerTrigger=100_000,
            **server,
        )
        with Progress("starting the archive"):
            following.processAllAvailable()  # its processes are up before the first event comes
        dead = self._drain()
        with Progress("archiving the last events", self._spark.tasks):
            following.processAllAvailable()
            following.stop()
            events = read_archive(spark, lake).where(f"queue = '{_QUEUE}'")
            kept = events.count()
        place = json.loads(following.lastProgress.sources[0].endOffset)[_QUEUE]
        lost = place["n"] - place["since"] - kept
        _tell(f"archived {kept:,} events, {lost:,} trimmed before they were read")
        with Progress(f"rolling up {kept:,} events", self._spark.tasks):
            windows = rollup(events, "10 seconds").cache()
            completed = windows.agg({"completed": "sum"}).first()[0] or 0
        _tell(f"rolled up {windows.count():,} windows: {completed:,} completed")
        dlq = read(spark, "dlq", _QUEUE, **server)
        with Progress(f"drawing the report over {kept:,} events", self._spark.tasks):
            html.write_text(page(gather(events, dlq)), encoding="utf-8")
        _tell(f"report: {html.resolve()}")
        for row in triage(dlq).collect():
            _tell(f"triage: {row['failures']:,} x {row['masked_reason']}")
        chosen = dlq.where("error like '%has no customer%'")
        _tell(f"replay: {replay(chosen, **server):,} dead jobs would be replayed")
        moved = replay(chosen, dry_run=False, **server)
        _tell(f"replay: {moved:,} were")
        if moved != dead:
            raise ChasquiError(f"the tour failed: {dead} jobs were dead and {moved} replayed")
        if not lost and completed != self._rows - dead:
            raise ChasquiError(
                f"the tour failed: {completed} of {self._rows - dead} jobs completed"
            )

    def _enqueue(self) -> None:
        from chasqui.spark import enqueue

        spark, path = self._spark.session, str(self._folder / "orders")
        with Progress(f"writing {self._rows:,} rows of Parquet", self._spark.tasks):
            spark.range(self._rows).selectExpr(
                "id as n", "concat('customer-', id % 997) as customer", "'order' as name"
            ).write.parquet(path)
        started_s = time.perf_counter()
        with (
            Queue(_QUEUE, redis_url=self._url) as queue,
            Progress("enqueueing", lambda: f"{queue.counts().waiting:,} jobs are in the queue"),
        ):
            orders = spark.read.parquet(path)
            enqueue(orders, _QUEUE, maxBacklog=2 * self._rows, **self._spark.server)
        seconds = time.perf_counter() - started_s
        rate = self._rows / seconds
        _tell(f"enqueued {self._rows:,} rows exactly once in {seconds:.1f} s ({rate:,.0f}/s)")

    def _drain(self) -> int:
        """Let worker processes run all jobs; how many ended dead."""
        command = [sys.executable, "-m", "chasqui", "worker", f"{__name__}:worker"]
        command += ["--processes", str(_WORKERS), "--log-level", "error"]
        started_s = time.perf_counter()
        left = self._rows
        with (
            subprocess.Popen(command) as workers,
            Queue(_QUEUE, redis_url=self._url) as queue,
            Progress("draining", lambda: f"{left:,} jobs left"),
        ):
            try:
                while left:
                    if workers.poll() is not None:
                        raise ChasquiError("the tour failed: its workers ended")
                    time.sleep(0.2)
                    counts = queue.counts()
                    left = counts.waiting + counts.pending + counts.delayed
            finally:
                workers.terminate()
        seconds = time.perf_counter() - started_s
        rate = self._rows / seconds
        _tell(f"drained by {_WORKERS} worker processes in {seconds:.1f} s ({rate:,.0f}/s)")
        return counts.dlq


def _tell(text: str) -> None:
    print(text, flush=True)
