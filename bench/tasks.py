"""What typed tasks cost beside plain jobs, by the client's CPU time, on a server of our own.

    python -m bench.tasks [--rounds N] [--server redis-8.6]

Each round runs every load once, in turns, so that what else the machine does strikes all of them.
A ratio is that of the best rounds.
"""

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from chasqui import App, Worker
from tests.servers import KINDS, Server

JOBS = 60_000
BULK = 1_000
TO = "user@example.com"


@dataclass
class Mail:
    """The one argument of a task that is not plain."""

    to: str
    n: int


class Left:
    """Counts down the jobs of a drain."""

    def __init__(self) -> None:
        self.count = 0
        self.is_done = asyncio.Event()

    def expect(self, count: int) -> None:
        self.count = count
        self.is_done.clear()

    def one(self) -> None:
        self.count -= 1
        if not self.count:
            self.is_done.set()


def tasks_of(app: App[None], left: Left) -> tuple[Any, Any]:
    @app.task
    async def welcome(to: str, n: int) -> None:
        left.one()

    @app.task
    async def mail(mail: Mail) -> None:
        left.one()

    return welcome, mail


async def drained(worker: Any, left: Left, count: int) -> float:
    """The CPU time of the client that a worker takes for jobs that wait, in us a job."""
    left.expect(count)
    gc.collect()
    before_s = time.process_time()
    running = asyncio.create_task(worker.run())
    await left.is_done.wait()
    await worker.close()
    await running
    return (time.process_time() - before_s) / count * 1e6


async def added(add: Callable[[], Awaitable[Any]], count: int) -> float:
    """The same for adding in bulks."""
    gc.collect()
    before_s = time.process_time()
    for _ in range(count // BULK):
        await add()
    return (time.process_time() - before_s) / count * 1e6


async def measure(url: str, rounds: int) -> dict[str, list[float]]:
    left = Left()
    app = App("bench", redis_url=url)
    welcome, mail = tasks_of(app, left)

    async def plain(job: Any) -> None:
        left.one()

    async def add_rows() -> None:
        await app.queue().add_bulk(
            [{"name": "welcome", "data": {"to": TO, "n": i}} for i in range(BULK)]
        )

    async def add_nested() -> None:
        await app.queue().add_bulk(
            [{"name": "mail", "data": {"mail": {"to": TO, "n": i}}} for i in range(BULK)]
        )

    async def add_calls() -> None:
        await app.enqueue_many([welcome.bind(TO, i) for i in range(BULK)])

    async def add_mails() -> None:
        await app.enqueue_many([mail.bind(Mail(TO, i)) for i in range(BULK)])

    found: dict[str, list[float]] = {}
    options = {"events_enabled": False, "run_scheduler": False}
    for _ in range(rounds):
        await app.queue().counts()  # connects
        for name, add, worker in (
            ("plain", add_rows, Worker("bench", plain, redis_url=url, **options)),
            ("nested", add_nested, Worker("bench", plain, redis_url=url, **options)),
            ("tasks", add_calls, app.worker_group(**options)),
            ("dataclass", add_mails, app.worker_group(**options)),
        ):
            found.setdefault(f"add {name}", []).append(await added(add, JOBS))
            found.setdefault(f"drain {name}", []).append(await drained(worker, left, JOBS))
            await app.queue().counts()  # the worker has closed what its app had opened
    await app.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--server", choices=list(KINDS), default="redis-8.6")
    arguments = parser.parse_args()
    with Server(arguments.server) as server:
        found = uvloop.run(measure(server.url, arguments.rounds))
    print(f"{'client CPU, us a job':24}{'best':>8}{'median':>8}{'to plain':>10}")
    for what, values in found.items():
        load, _, name = what.partition(" ")
        base = min(found[f"{load} {'nested' if name == 'dataclass' else 'plain'}"])
        best, middle = min(values), statistics.median(values)
        print(f"{what:24}{best:8.2f}{middle:8.2f}{best / base:10.2f}")


if __name__ == "__main__":
    main()
