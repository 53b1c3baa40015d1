"""`chasqui spark demo`: a tour of queues as DataFrames, checked; by default on its own server."""

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
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from chasqui.cli.options import AsJson, OwnRedisUrl
from chasqui.cli.output import show
from chasqui.cli.run import deleted_after
from chasqui.cli.spark_run import Progress, SparkRun, on_queue
from chasqui.errors import ChasquiError, UnrecoverableError
from chasqui.model.job import Job
from chasqui.model.words import count
from chasqui.sync import Queue
from chasqui.transport import embedded
from chasqui.worker import Worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Names the tour's queue to its worker processes.
_QUEUE_VARIABLE: Final = "CHASQUI_TOUR_QUEUE"
_WORKERS: Final = 2
#: What some orders fail with.
_PLANTED: Final = "has no customer"
#: The most events that a job of the tour writes: so many are held, so the archive gets all of them.
_EVENTS_PER_JOB: Final = 4


def worker() -> Worker:
    """The worker of the tour's worker processes."""
    logging.getLogger("chasqui.consuming.dispatcher").addFilter(_is_not_planted)
    return Worker(os.environ[_QUEUE_VARIABLE], _handle, max_attempts=3)


def _is_not_planted(record: logging.LogRecord) -> bool:
    """False for log records about the jobs that the tour lets die to triage them."""
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

    Needs no Redis: by default it starts a private server and deletes it afterwards.

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
        #: What was printed, for programs.
        self.facts: dict[str, Any] = {}

    def _tell(self, text: str, **facts: Any) -> None:
        self.facts |= facts
        if not self._is_quiet:
            print(text, flush=True)

    def run(self, html: Path) -> None:
        from chasqui.spark import page, report_archive

        lake = str(self._folder / "lake")
        self._enqueue()
        events, dead = self._drain_and_archive(lake)
        completed = self._roll_up(events)
        with Progress("drawing the report", self._spark.tasks) as progress:
            report = report_archive(
                self._spark.session, lake, self._queue, on_step=progress.say, **self._spark.server
            )
            html.write_text(page(report), encoding="utf-8")
        self._tell(f"report: {html.resolve()}", report=str(html.resolve()))
        moved = self._triage_and_replay()
        self._tell(f"replayed {count(moved, 'dead job')}", dead=dead, replayed=moved)
        if moved != dead:
            raise ChasquiError(f"the tour failed: {dead} jobs were dead and {moved} replayed")
        due = self._rows - dead
        if completed != due:
            raise ChasquiError(f"the tour failed: {completed} of {due} jobs completed")

    def _drain_and_archive(self, lake: str) -> tuple["DataFrame", int]:
        """Let workers run all jobs while an archive follows; its events, and how many jobs died."""
        from chasqui.spark import archive, read_archive
        from chasqui.spark.reading import ranges

        spark, hold = self._spark, _EVENTS_PER_JOB * self._rows
        following = archive(
            spark.session, self._queue, lake, follow_on=True, interval_s=1, readerHold=hold,
            **spark.server,
        )  # fmt: skip
        with Progress("starting the archive"):
            following.processAllAvailable()  # its processes are up before the first event comes
        dead = self._drain()
        with Progress("archiving the last events", spark.tasks):
            following.processAllAvailable()
            following.stop()
            events = read_archive(spark.session, lake).where(f"queue = '{self._queue}'")
            kept = events.count()
        with on_queue(self._queue, self._url) as (connection, keys):
            written = connection.run(ranges.tip(keys.events)).ordinal
        self._tell(f"archived {kept:,} events of {written:,}", archived=kept, events=written)
        if kept != written:
            raise ChasquiError(f"the tour failed: {kept} of {written} events were archived")
        return events, dead

    def _roll_up(self, events: "DataFrame") -> int:
        from chasqui.spark import rollup

        with Progress("rolling up", self._spark.tasks):
            windows = rollup(events, "10 seconds").cache()
            completed: int = windows.agg({"completed": "sum"}).first()[0] or 0
        drawn = windows.count()
        text = f"rolled up {count(drawn, 'window')}: {completed:,} completed"
        self._tell(text, windows=drawn, completed=completed)
        return completed

    def _triage_and_replay(self) -> int:
        from chasqui.spark import read, replay, triage

        server = self._spark.server
        dlq = read(self._spark.session, "dlq", self._queue, **server)
        for row in triage(dlq).collect():
            self._tell(f"triage: {row['failures']:,} x {row['masked_reason']}")
        chosen = dlq.where(f"error like '%{_PLANTED}%'")
        self._tell(f"replay would run {count(replay(chosen, **server), 'dead job')} again")
        return replay(chosen, dry_run=False, **server)

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
        environment = os.environ | {"CHASQUI_URL": self._url, _QUEUE_VARIABLE: self._queue}
        started_s = time.perf_counter()
        left = self._rows
        with (
            subprocess.Popen(command, env=environment) as workers,
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
