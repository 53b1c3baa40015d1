"""`chasqui demo`: the main job on an embedded server, with its rates, checked at the end."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from chasqui import embedded
from chasqui.cli import logs
from chasqui.cli.bars import RateColumn
from chasqui.cli.options import AsJson, OwnRedisUrl
from chasqui.cli.output import show
from chasqui.cli.run import deleted_after
from chasqui.cli.spark_run import report_of_run, spark_is_there
from chasqui.model.config import Endpoint
from chasqui.errors import ChasquiError, UnrecoverableError
from chasqui.model.job import BackoffSpec, Job
from chasqui.metrics import DlqRouted, MetricsSink, RetryScheduled
from chasqui.queue import Queue
from chasqui.worker import Worker

#: Its queue on the private server.
_QUEUE = "demo"
#: Jobs in one call of add_bulk: its chunks are encoded while the server works on those before.
_BULK = 10_000
#: Tasks that add at the same time.
_TASKS = 100
#: One job in so many fails the first time it runs.
_FLAKY = 200
_RETRY = BackoffSpec.fixed(50)
_RUN = "run by a worker"

#: Does its part of the work and tells each time how many jobs it has done.
Step = Callable[[Callable[[int], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step took."""

    what: str
    jobs: int
    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Tally(MetricsSink):
    """What the worker did, as its handler and its metrics tell."""

    completed: Counter[str] = field(default_factory=Counter)
    waits_ms: list[int] = field(default_factory=list)
    retries: int = 0
    dead: int = 0
    #: The fault that the doomed job trips over has been mended.
    is_mended: bool = False

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


class Board(Progress):
    """A bar for each step and, on a line of its own so that 80 columns do, how the jobs fare."""

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
        int, typer.Option(min=1000, metavar="N", help="Jobs to add in bulk, and again one by one.")
    ] = 100_000,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where Spark is installed: draw the run as a page."),
    ] = None,
    redis_url: OwnRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add jobs to an embedded server, run them all with a worker, and show the rates.

    Some jobs fail once and are retried; one is beyond help, is dead-lettered and replayed.
    Needs no Redis: unless told otherwise it starts a private server, which is gone afterwards.

    Example: chasqui demo --jobs 1000000
    """
    logs.configure_briefly(logging.CRITICAL, as_json=as_json)  # that a job dies here is no warning
    console = Console(highlight=False, quiet=as_json)
    if redis_url is None:
        console.print(
            "chasqui demo: a job queue on a private server, started now, gone when this ends.\n"
        )
        with embedded.start() as running:
            _show(running.url, _QUEUE, jobs, report, console, as_json)
        return
    queue_name = f"demo-{secrets.token_hex(4)}"
    where = Endpoint.parse(redis_url)
    console.print(f"chasqui demo: queue {queue_name} on {where}, deleted when this ends.\n")
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


async def _demo(url: str, queue_name: str, jobs: int, console: Console) -> dict[str, Any]:
    single = jobs // 20
    total = jobs + single + jobs + 1
    ids: list[str] = []
    tally = Tally()
    async with Queue(queue_name, redis_url=url) as queue:
        await queue.counts()  # dials, so that no step is charged for it
        with Board(console) as bar:
            measured = [
                await _measure(
                    bar,
                    "add_bulk, 10,000 a call",
                    jobs,
                    lambda tell: _bulk(queue, jobs, ids, tell),
                ),
                await _measure(
                    bar,
                    "add, one after another",
                    single,
                    lambda tell: _one_by_one(queue, single, ids, tell),
                ),
                await _measure(
                    bar,
                    f"add, {_TASKS} tasks at once",
                    jobs,
                    lambda tell: _at_once(queue, jobs, ids, tell),
                ),
            ]
            ids.append((await queue.add("doomed", {"number": -1})).id)
            measured.append(await _run_all(bar, url, queue, total, tally))
        counts = await queue.counts()
    kept = ", and an append-only file was written" if queue_name == _QUEUE else ""
    console.print()
    console.print(_table(measured))
    _check(ids, tally.completed, counts.waiting + counts.pending + counts.delayed + counts.dlq)
    console.print(
        f"\nEvery one of the {len(ids):,} jobs was completed exactly once, its data intact:"
        f"\n  {tally.retries:,} failed once and were retried;"
        f"\n  {tally.dead} was beyond help, went to the dead-letter queue, and was replayed from"
        "\n  there once its fault was mended."
        f"\nEvents were on{kept}. A job waited"
        f"\n{tally.percentile(0.5):,} ms (p50) to {tally.percentile(0.99):,} ms (p99): all were"
        " there before the worker began.",
    )
    return {
        "steps": [{**asdict(one), "jobs_per_s": round(one.jobs / one.seconds)} for one in measured],
        "completed": len(ids),
        "retried": tally.retries,
        "dead_and_replayed": tally.dead,
    }


async def _run_all(bar: Board, url: str, queue: Queue, total: int, tally: Tally) -> Measured:
    """Start a worker, let it run every job, replay the one that dies."""
    all_done = asyncio.Event()

    async def handler(job: Job) -> None:
        if job.name == "doomed":
            if not tally.is_mended:
                raise UnrecoverableError("the demo wants this one dead")
        elif job.data["to"] != "ada@example.com":
            raise UnrecoverableError("the data did not survive")
        elif job.data["number"] % _FLAKY == 0 and job.attempt == 0:
            raise RuntimeError("the demo wants this one to fail once")
        tally.completed[job.id] += 1
        tally.waits_ms.append(time.time_ns() // 1_000_000 - job.created_at_ms)
        if len(tally.completed) == total:
            all_done.set()

    worker = Worker(queue.name, handler, redis_url=url, metrics=tally)
    task = bar.add_task(_RUN, total=total)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    running = asyncio.create_task(worker.run())
    finishing = asyncio.create_task(all_done.wait())
    while not finishing.done() and not running.done():
        await asyncio.wait([finishing, running], timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        bar.note = tally.line()
        bar.update(task, completed=len(tally.completed))
        if tally.dead and not tally.is_mended:
            tally.is_mended = True
            await queue.replay_dlq(name="doomed")
    measured = Measured(
        _RUN,
        total,
        time.perf_counter() - started_s,
        time.process_time() - cpu_s,
    )
    bar.stop_task(task)
    finishing.cancel()
    await worker.close()
    await running
    return measured


async def _measure(bar: Board, what: str, jobs: int, step: Step) -> Measured:
    task = bar.add_task(what, total=jobs)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await step(lambda done: bar.advance(task, done))
    measured = Measured(what, jobs, time.perf_counter() - started_s, time.process_time() - cpu_s)
    bar.stop_task(task)
    return measured


def _data(number: int) -> dict[str, object]:
    return {"number": number, "to": "ada@example.com"}


def _backoff(number: int) -> BackoffSpec | None:
    """Those that will fail once wait briefly, so that the demo need not."""
    return _RETRY if number % _FLAKY == 0 else None


def _entry(number: int) -> dict[str, object]:
    entry: dict[str, object] = {"name": "mail", "data": _data(number)}
    if number % _FLAKY == 0:
        entry["backoff"] = _RETRY
    return entry


async def _bulk(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    for start in range(0, jobs, _BULK):
        size = min(_BULK, jobs - start)
        added = await queue.add_bulk([_entry(number) for number in range(start, start + size)])
        ids += [job.id for job in added]
        tell(size)


async def _one_by_one(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    for i in range(jobs):
        ids.append((await queue.add("mail", _data(i), backoff=_backoff(i))).id)
        if i % 100 == 99:
            tell(100)
    tell(jobs % 100)


async def _at_once(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    async def one_task(share: range) -> None:
        for done, i in enumerate(share, 1):
            ids.append((await queue.add("mail", _data(i), backoff=_backoff(i))).id)
            if done % 10 == 0:
                tell(10)
        tell(len(share) % 10)

    await asyncio.gather(*(one_task(range(start, jobs, _TASKS)) for start in range(_TASKS)))


def _check(ids: list[str], seen: Counter[str], left: int) -> None:
    """Raise unless what was added is what was done, each job once, and nothing is left."""
    missing = len(set(ids) - seen.keys())
    repeated = sum(times - 1 for times in seen.values())
    unknown = len(seen.keys() - set(ids))
    if missing or repeated or unknown or left or len(set(ids)) != len(ids):
        raise ChasquiError(
            f"the demo failed: of {len(ids)} jobs {missing} are missing, {repeated} came twice, "
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
