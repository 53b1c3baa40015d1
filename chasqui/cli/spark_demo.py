"""`chasqui spark demo`: the tour of queues as DataFrames, checked; on a server of its own, unless
told otherwise."""

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from chasqui import embedded
from chasqui.cli.options import AsJson, OwnRedisUrl
from chasqui.cli.output import show
from chasqui.cli.run import deleted_after
from chasqui.cli.spark_run import Progress, SparkRun, on_queue
from chasqui.errors import ChasquiError, UnrecoverableError
from chasqui.model.job import Job
from chasqui.sync import Queue
from chasqui.model.words import count
from chasqui.worker import Worker

#: Names the tour's queue to its worker processes.
_QUEUE_VARIABLE: Final = "CHASQUI_TOUR_QUEUE"
_WORKERS: Final = 2
#: What some orders fail with.
_PLANTED: Final = "has no customer"
#: More events than that a job of the tour does not write: however late the archive is, it gets all.
_EVENTS_PER_JOB: Final = 4


def worker() -> Worker:
    """What the tour's worker processes run."""
    logging.getLogger("chasqui.consumer.dispatcher").addFilter(_is_not_planted)
    return Worker(os.environ[_QUEUE_VARIABLE], _handle, max_attempts=3)


def _is_not_planted(record: logging.LogRecord) -> bool:
    """Whether a record tells of anything but the dead jobs that the tour makes to triage them."""
    return _PLANTED not in record.getMessage()


async def _handle(job: Job) -> None:
    await asyncio.sleep(0.005)
    number = job.data["n"]
    if number % 10_000 == 7:
        raise UnrecoverableError(f"order {number} {_PLANTED} '{job.data['customer']}'")
    if number % 1000 == 13 and job.attempt < 2:
        raise TimeoutError(f"the shop did not answer order {number} in 0.{number % 10} s")


def demo(
    rows: Annotated[int, typer.Option(min=1000, metavar="N", help="Rows to enqueue.")] = 1_000_000,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the report goes.")] = Path(
        "chasqui-report.html"
    ),
    redis_url: OwnRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take the tour: enqueue a data set, drain it while an archive follows, roll up, report,
    triage, replay.

    Needs no Redis: unless told otherwise it starts a private server, which is gone afterwards.

    Example: chasqui spark demo --rows 100000
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if redis_url is None:
            queue, url = "tour", stack.enter_context(embedded.start()).url
        else:
            queue, url = f"tour-{secrets.token_hex(4)}", redis_url
            stack.enter_context(deleted_after(queue, url))
        spark = stack.enter_context(SparkRun("local[2]", None, url))
        tour = _Tour(spark, url, queue, Path(folder), rows, is_quiet=as_json)
        tour.run(html)
    if as_json:
        show(tour.facts, as_json=True)


class _Tour:
    def __init__(
        self, spark: SparkRun, url: str, queue: str, folder: Path, rows: int, *, is_quiet: bool
    ) -> None:
        self._spark = spark
        self._url = url
        self._queue = queue
        self._folder = folder
        self._rows = rows
        self._is_quiet = is_quiet
        #: What was told, for programs.
        self.facts: dict[str, Any] = {}

    def _tell(self, text: str, **facts: Any) -> None:
        self.facts |= facts
        if not self._is_quiet:
            print(text, flush=True)

    def run(self, html: Path) -> None:
        from chasqui.spark import (
            archive,
            page,
            ranges,
            read,
            read_archive,
            replay,
            report_archive,
            rollup,
            triage,
        )

        spark, server = self._spark.session, self._spark.server
        self._enqueue()
        lake = str(self._folder / "lake")
        following = archive(
            spark,
            self._queue,
            lake,
            follow_on=True,
            interval_s=1,
            readerHold=_EVENTS_PER_JOB * self._rows,
            **server,
        )
        with Progress("starting the archive"):
            following.processAllAvailable()  # its processes are up before the first event comes
        dead = self._drain()
        with Progress("archiving the last events", self._spark.tasks):
            following.processAllAvailable()
            following.stop()
            events = read_archive(spark, lake).where(f"queue = '{self._queue}'")
            kept = events.count()
        with on_queue(self._queue, self._url) as (connection, keys):
            written = connection.run(ranges.tip(keys.events)).ordinal
        self._tell(f"archived {kept:,} events of {written:,}", archived=kept, events=written)
        if kept != written:
            raise ChasquiError(f"the tour failed: {kept} of {written} events were archived")
        with Progress(f"rolling up {kept:,} events", self._spark.tasks):
            windows = rollup(events, "10 seconds").cache()
            completed = windows.agg({"completed": "sum"}).first()[0] or 0
        drawn = windows.count()
        self._tell(
            f"rolled up {count(drawn, 'window')}: {completed:,} completed",
            windows=drawn,
            completed=completed,
        )
        dlq = read(spark, "dlq", self._queue, **server)
        with Progress(f"drawing the report over {kept:,} events", self._spark.tasks) as progress:
            report = report_archive(spark, lake, self._queue, on_step=progress.say, **server)
            html.write_text(page(report), encoding="utf-8")
        self._tell(f"report: {html.resolve()}", report=str(html.resolve()))
        for row in triage(dlq).collect():
            self._tell(f"triage: {row['failures']:,} x {row['masked_reason']}")
        chosen = dlq.where(f"error like '%{_PLANTED}%'")
        self._tell(f"replay would run {count(replay(chosen, **server), 'dead job')} again")
        moved = replay(chosen, dry_run=False, **server)
        self._tell(f"replayed {count(moved, 'dead job')}", dead=dead, replayed=moved)
        if moved != dead:
            raise ChasquiError(f"the tour failed: {dead} jobs were dead and {moved} replayed")
        if completed != self._rows - dead:
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
            Queue(self._queue, redis_url=self._url) as queue,
            Progress("enqueueing", lambda: f"{queue.counts().waiting:,} jobs are in the queue"),
        ):
            orders = spark.read.parquet(path)
            enqueue(orders, self._queue, maxBacklog=2 * self._rows, **self._spark.server)
        seconds = time.perf_counter() - started_s
        rate = self._rows / seconds
        self._tell(
            f"enqueued {self._rows:,} rows exactly once in {seconds:.1f} s ({rate:,.0f}/s)",
            rows=self._rows,
            enqueued_per_s=round(rate),
        )

    def _drain(self) -> int:
        """Let worker processes run all jobs; how many ended dead."""
        command = [sys.executable, "-m", "chasqui", "worker", f"{__name__}:worker"]
        command += ["--processes", str(_WORKERS), "--log-level", "error"]
        told = os.environ | {"CHASQUI_URL": self._url, _QUEUE_VARIABLE: self._queue}
        started_s = time.perf_counter()
        left = self._rows
        with (
            subprocess.Popen(command, env=told) as workers,
            Queue(self._queue, redis_url=self._url) as queue,
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
        self._tell(
            f"drained by {_WORKERS} worker processes in {seconds:.1f} s ({rate:,.0f}/s)",
            drained_per_s=round(rate),
        )
        return counts.dlq
