"""`chasqui demo`: adds and runs jobs on an embedded server, shows the rates, checks the outcome."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from chasqui.cli import logs
from chasqui.cli.bars import RateColumn
from chasqui.cli.options import AsJson, OwnRedisUrl, number
from chasqui.cli.output import show
from chasqui.cli.run import deleted_after
from chasqui.cli.spark_run import report_of_run, spark_is_there
from chasqui.consuming.current import current_job
from chasqui.errors import ChasquiError, UnrecoverableError
from chasqui.metrics import DlqRouted, MetricsSink, RetryScheduled
from chasqui.model.config import Endpoint
from chasqui.model.job import BackoffSpec
from chasqui.queue import Queue
from chasqui.tasks.app import App
from chasqui.tasks.task import AsyncTask
from chasqui.transport import embedded

#: The queue on the private server.
_QUEUE = "demo"
#: Jobs in one call of enqueue_many: it encodes a chunk while the server works on the one before.
_BULK = 10_000
#: Tasks that add at the same time.
_TASKS = 100
#: Of this many jobs, one fails on its first attempt.
_FLAKY = 200
#: A short wait for those, so that the demo ends soon.
_RETRY = BackoffSpec.fixed(50)
_TO = "ada@example.com"

#: Moves a bar on by a number of jobs.
Advance = Callable[[int], None]
#: The task that most jobs call.
Mail = AsyncTask[[int, str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """How long a step took."""

    what: str
    jobs: int
    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Tally(MetricsSink):
    """What the worker has done, from its handler and its metrics."""

    completed: Counter[str] = field(default_factory=Counter)
    waits_ms: list[int] = field(default_factory=list)
    retries: int = 0
    dead: int = 0
    #: The doomed job succeeds from now on.
    is_mended: bool = False
    #: How many jobs there are, and whether all of them are completed.
    total: int = 0
    all_done: asyncio.Event = field(default_factory=asyncio.Event)

    def complete(self) -> None:
        """Note that the current job is completed."""
        job = current_job()
        self.completed[job.id] += 1
        self.waits_ms.append(time.time_ns() // 1_000_000 - job.created_at_ms)
        if len(self.completed) == self.total:
            self.all_done.set()

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        self.retries += 1

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        self.dead += 1

    def percentile(self, share: float) -> int:
        waits = sorted(self.waits_ms[-10_000:])
        return waits[int(len(waits) * share)] if waits else 0

    def line(self) -> str:
        p50_s, p99_s = self.percentile(0.5) / 1000, self.percentile(0.99) / 1000
        return (
            f"  waited p50 {p50_s:.1f} s, p99 {p99_s:.1f} s; "
            f"{self.retries:,} retried, {self.dead} dead"
        )


class Bars(Progress):
    """A bar for each step, and below them a line about the jobs."""

    note = ""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            RateColumn(),
            console=console,
            disable=console.quiet,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.note:
            yield Text(self.note)


def demo(
    jobs: Annotated[
        int, number("N", "Jobs to add in bulk, and again one by one.", min=1000)
    ] = 100_000,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="If Spark is installed: write a report as a page."),
    ] = None,
    redis_url: OwnRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add jobs to an embedded server, run them all with a worker, and show the rates.

    Some jobs fail once and are retried; one is buried in the DLQ and replayed. You need no Redis:
    without --redis-url this starts a private server and removes it at the end.

    Example: chasqui demo --jobs 1000000
    """
    logs.configure_briefly(logging.CRITICAL, as_json=as_json)  # dead jobs are expected here
    console = Console(highlight=False, quiet=as_json)
    if redis_url is None:
        console.print(
            "chasqui demo: a job queue on a private server, started now, removed at the end.\n"
        )
        with embedded.start() as running:
            _show(running.url, _QUEUE, jobs, report, console, as_json)
        return
    queue_name = f"demo-{secrets.token_hex(4)}"
    where = Endpoint.parse(redis_url)
    console.print(f"chasqui demo: queue {queue_name} on {where}, deleted at the end.\n")
    with deleted_after(queue_name, redis_url):
        _show(redis_url, queue_name, jobs, report, console, as_json)


def _show(
    url: str, queue_name: str, jobs: int, report: Path | None, console: Console, as_json: bool
) -> None:
    outcome = asyncio.run(_demo(url, queue_name, jobs, console))
    if as_json:
        show(outcome, as_json=True)
    if report is not None and spark_is_there():
        console.print("\nSpark is installed: it reports on the events of this run …")
        console.print(report_of_run(url, queue_name, report), soft_wrap=True)


def _tasks(app: App[None], tally: Tally) -> tuple[Mail, AsyncTask[[], None]]:
    """The tasks of the demo: mails of which some fail once, and one job that is doomed."""

    @app.task(backoff=_RETRY)
    async def mail(number: int, to: str) -> None:
        if to != _TO:
            raise UnrecoverableError("the data did not survive")
        if number % _FLAKY == 0 and current_job().attempt == 0:
            raise RuntimeError("the demo wants this one to fail once")
        tally.complete()

    @app.task
    async def doomed() -> None:
        if not tally.is_mended:
            raise UnrecoverableError("the demo wants this one dead")
        tally.complete()

    return mail, doomed


async def _demo(url: str, queue_name: str, jobs: int, console: Console) -> dict[str, Any]:
    single = jobs // 20
    ids: list[str] = []
    measured: list[Measured] = []
    tally = Tally(total=jobs + single + jobs + 1)
    async with App(queue_name, redis_url=url) as app:
        mail, doomed = _tasks(app, tally)
        queue = app.queue()
        await queue.counts()  # connects, so that no step is charged for it
        with Bars(console) as bars:
            for what, size, step in (
                ("enqueue_many, 10,000 a call", jobs, _bulk),
                ("enqueue, one after another", single, _one_by_one),
                (f"enqueue, {_TASKS} at once", jobs, _at_once),
            ):
                with _measure(bars, what, size, measured) as task:
                    await step(mail, size, ids, partial(bars.advance, task))
            ids.append((await doomed.enqueue()).id)
            await _run_all(bars, app, queue, tally, measured)
        counts = await app.queue().counts()
    kept = ", and an append-only file was written" if queue_name == _QUEUE else ""
    console.print()
    console.print(_table(measured))
    _check(ids, tally.completed, counts.waiting + counts.pending + counts.delayed + counts.dlq)
    console.print(
        f"\nEvery one of the {len(ids):,} jobs was completed exactly once, its data intact:"
        f"\n  {tally.retries:,} failed once and were retried;"
        f"\n  {tally.dead} died, went to the DLQ (the dead-letter queue), and was replayed once it"
        "\n  could succeed."
        f"\nEvents were on{kept}. A job waited"
        f"\n{tally.percentile(0.5):,} ms (p50) to {tally.percentile(0.99):,} ms (p99): all were"
        " added before the worker began.",
    )
    return {
        "steps": [{**asdict(one), "jobs_per_s": round(one.jobs / one.seconds)} for one in measured],
        "completed": len(ids),
        "retried": tally.retries,
        "dead_and_replayed": tally.dead,
    }


async def _run_all(
    bars: Bars, app: App[None], queue: Queue, tally: Tally, measured: list[Measured]
) -> None:
    """Start a worker, let it run every job, replay the job that dies."""
    worker = app.worker_group(metrics=tally, store_results=False)
    with _measure(bars, "run by a worker", tally.total, measured) as task:
        running = asyncio.create_task(worker.run())
        finishing = asyncio.create_task(tally.all_done.wait())
        ends = [finishing, running]
        while not finishing.done() and not running.done():
            await asyncio.wait(ends, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            bars.note = tally.line()
            bars.update(task, completed=len(tally.completed))
            if tally.dead and not tally.is_mended:
                tally.is_mended = True
                await queue.replay_dlq(name="doomed")
    finishing.cancel()
    await worker.close()
    await running


@contextmanager
def _measure(bars: Bars, what: str, jobs: int, measured: list[Measured]) -> Iterator[TaskID]:
    """Measure a block, and show a bar for it."""
    task = bars.add_task(what, total=jobs)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    yield task
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    measured.append(Measured(what, jobs, seconds, cpu_s))
    bars.stop_task(task)


async def _bulk(mail: Mail, jobs: int, ids: list[str], advance: Advance) -> None:
    for start in range(0, jobs, _BULK):
        numbers = range(start, min(jobs, start + _BULK))
        added = await mail.app.enqueue_many(mail.bind(number, _TO) for number in numbers)
        ids += [job.id for job in added]
        advance(len(numbers))


async def _one_by_one(mail: Mail, jobs: int, ids: list[str], advance: Advance) -> None:
    for i in range(jobs):
        ids.append((await mail.enqueue(i, _TO)).id)
        if i % 100 == 99:
            advance(100)
    advance(jobs % 100)


async def _at_once(mail: Mail, jobs: int, ids: list[str], advance: Advance) -> None:
    async def one_task(share: range) -> None:
        for done, i in enumerate(share, 1):
            ids.append((await mail.enqueue(i, _TO)).id)
            if done % 10 == 0:
                advance(10)
        advance(len(share) % 10)

    await asyncio.gather(*(one_task(range(start, jobs, _TASKS)) for start in range(_TASKS)))


def _check(ids: list[str], seen: Counter[str], left: int) -> None:
    """Raise unless every job that was added was completed once, and nothing is left."""
    missing = len(set(ids) - seen.keys())
    repeated = sum(times - 1 for times in seen.values())
    unknown = len(seen.keys() - set(ids))
    if missing or repeated or unknown or left or len(set(ids)) != len(ids):
        raise ChasquiError(
            f"the demo failed: of {len(ids)} jobs {missing} are missing, {repeated} ran twice, "
            f"{unknown} were never added, {left} are left"
        )


def _table(measured: list[Measured]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    for column in ("jobs", "seconds", "jobs/s", "client CPU s per 100k"):
        table.add_column(column, justify="right")
    for step in measured:
        table.add_row(
            step.what,
            f"{step.jobs:,}",
            f"{step.seconds:.2f}",
            f"{step.jobs / step.seconds:,.0f}",
            f"{step.cpu_s / step.jobs * 100_000:.2f}",
        )
    return table
