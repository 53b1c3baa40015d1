"""`chasqui demo`: the main job on an embedded server, with its rates, checked at the end."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from chasqui import embedded
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xack_xdel, xreadgroup
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.cli.output import RateColumn, progress
from chasqui.config import Endpoint
from chasqui.connection import Connection
from chasqui.errors import ChasquiError
from chasqui.keys import DEFAULT_GROUP, Keys
from chasqui.payload import decode
from chasqui.queue import Queue
from chasqui.request import Effect, Request

_QUEUE = "demo"
_GROUP, _CONSUMER = DEFAULT_GROUP.encode(), b"demo"
#: Jobs in one call of add_bulk: its chunks are encoded while the server works on those before.
_BULK = 10_000
#: Entries in one read.
_READ = 1000
#: Tasks that add at the same time.
_TASKS = 100

#: Does its part of the work and tells each time how many jobs it has done.
Step = Callable[[Callable[[int], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step took."""

    what: str
    jobs: int
    seconds: float
    cpu_s: float


def demo(
    jobs: Annotated[int, typer.Option(min=1000, help="Jobs to add in bulk.")] = 100_000,
) -> None:
    """Add jobs to an embedded server in three ways, read them all back, and show the rates.

    Needs no Redis: it starts a private server, which is gone afterwards.

    Example: chasqui demo --jobs 1000000
    """
    console = Console(highlight=False)
    console.print(
        "chasqui demo: a job queue on a private server, started now, gone when this ends.\n"
    )
    with embedded.start() as running:
        asyncio.run(_demo(running.url, jobs, console))


async def _demo(url: str, jobs: int, console: Console) -> None:
    single, concurrent = jobs // 20, jobs // 5
    ids: list[str] = []
    seen: Counter[str] = Counter()
    connection = Connection(
        Endpoint.parse(url), key=Keys(_QUEUE).stream, client_name="chasqui-demo"
    )
    async with Queue(_QUEUE, redis_url=url) as queue:
        server = await connection.connect()
        await queue.counts()  # dials, so that no step is charged for it
        with progress(MofNCompleteColumn(), RateColumn()) as bar:
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
                    concurrent,
                    lambda tell: _at_once(queue, concurrent, ids, tell),
                ),
                await _measure(
                    bar,
                    "read back and acknowledge",
                    len(ids) or jobs + single + concurrent,
                    lambda tell: _read_back(connection, len(ids), seen, tell),
                ),
            ]
        counts = await queue.counts()
    await connection.close()
    console.print()
    console.print(_table(measured))
    _check(ids, seen, counts.waiting + counts.pending)
    console.print(
        f"\nEvery one of the {len(ids):,} jobs came back exactly once, its data intact."
        f"\nServer: {server}, over a unix socket, writing an append-only file.",
    )


async def _measure(bar: Progress, what: str, jobs: int, step: Step) -> Measured:
    task = bar.add_task(what, total=jobs)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await step(lambda done: bar.advance(task, done))
    measured = Measured(what, jobs, time.perf_counter() - started_s, time.process_time() - cpu_s)
    bar.stop_task(task)
    return measured


def _data(number: int) -> dict[str, object]:
    return {"number": number, "to": "ada@example.com"}


async def _bulk(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    for start in range(0, jobs, _BULK):
        size = min(_BULK, jobs - start)
        added = await queue.add_bulk(
            [{"name": "mail", "data": _data(start + i)} for i in range(size)]
        )
        ids += [job.id for job in added]
        tell(size)


async def _one_by_one(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    for i in range(jobs):
        ids.append((await queue.add("mail", _data(i))).id)
        if i % 100 == 99:
            tell(100)
    tell(jobs % 100)


async def _at_once(queue: Queue, jobs: int, ids: list[str], tell: Callable[[int], None]) -> None:
    async def one_task(share: range) -> None:
        for done, i in enumerate(share, 1):
            ids.append((await queue.add("mail", _data(i))).id)
            if done % 10 == 0:
                tell(10)
        tell(len(share) % 10)

    await asyncio.gather(*(one_task(range(start, jobs, _TASKS)) for start in range(_TASKS)))


async def _read_back(
    connection: Connection, jobs: int, seen: Counter[str], tell: Callable[[int], None]
) -> None:
    """Read everything through the consumer group, as a worker would, and acknowledge it."""
    stream = Keys(_QUEUE).stream
    await connection.execute("XGROUP", "CREATE", stream, _GROUP, "0", effect=Effect.ONCE)
    while seen.total() < jobs:
        entries = await _read(connection, stream)
        if not entries:
            return
        for entry in entries:
            if entry.name == "mail" and decode(entry.payload)["to"] == "ada@example.com":
                seen[entry.job_id] += 1
        buffer = CommandBuffer()
        xack_xdel(buffer, stream, _GROUP, [entry.id for entry in entries])
        await connection.submit(Request(bytes(buffer), Effect.IDEMPOTENT, count=2))
        tell(len(entries))


async def _read(connection: Connection, stream: bytes) -> list[Entry]:
    buffer = CommandBuffer()
    xreadgroup(buffer, _GROUP, _CONSUMER, stream, count=_READ)
    request = Request(bytes(buffer), Effect.ONCE, builder=EntryBuilder("streams"))
    entries: list[Entry] = await connection.submit(request)
    return entries


def _check(ids: list[str], seen: Counter[str], left: int) -> None:
    """Raise unless what was added is what was read, each job once, and nothing is left."""
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
