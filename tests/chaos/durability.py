"""`python -m tests.chaos.durability`: what a crash of the server costs, by its settings.

A crash of the process keeps what it wrote; a power cut keeps only what was synced.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from chasqui import Queue
from chasqui.errors import NotSupportedError
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from tests.chaos.figure import commit
from tests.faults.disk import DiskServer, build_shim
from tests.ledger import Census, number
from tests.servers import KINDS, Server

RESULTS = Path(__file__).parent / "results" / "durability.json"
ADDED, WORKED = "durability-added", "durability-worked"
TASKS, BULK, PAUSE_S = 8, 25, 0.005
#: Jobs that wait for the taker.
WAITING = 20_000
#: The server dies this long after the first add.
LOW_S, HIGH_S = 1.5, 3.5

DISK = 'everysec, `durable="disk"`'
#: The settings of the server; of one without an AOF there are none.
MODES: dict[str, dict[str, str]] = {
    "no AOF": {},
    "everysec": {"appendfsync": "everysec"},
    "always": {"appendfsync": "always"},
    DISK: {"appendfsync": "everysec"},
}
CRASHES = ("kill -9", "power cut")
#: Where WAITAOF answers when the disk has it, and not before.
TRUE_TO_DISK = ("redis-8.6", DISK)


@dataclass
class Cell:
    """What some crashes of one kind cost in one mode."""

    confirmed: int = 0
    lost: int = 0
    #: The oldest add that was lost had been confirmed this long before the crash.
    window_s: float = 0.0
    done: int = 0
    #: Jobs that were done and are in the stream again: they will run once more.
    back: int = 0
    trials: int = 0


@dataclass
class Trial:
    """Adds, and jobs done, up to the crash."""

    #: Number → when its add was confirmed.
    confirmed: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    async def run(self, server: Server, *, durable: Any, dies_after_s: float) -> float:
        """Add, and take jobs off another queue, until the server is killed; when that was."""
        async with Queue(WORKED, redis_url=server.url) as queue:
            for start in range(0, WAITING, 1000):
                await queue.add_bulk(_jobs(range(start, start + 1000)))
        numbers = itertools.count()

        async def add() -> None:
            async with Queue(ADDED, redis_url=server.url, durable=durable) as queue:
                while True:
                    chosen = list(itertools.islice(numbers, BULK))
                    await queue.add_bulk(_jobs(chosen))
                    self.confirmed.update(dict.fromkeys(chosen, time.monotonic()))
                    await asyncio.sleep(PAUSE_S)

        taker = threading.Thread(target=self.take, args=(server.url,))
        tasks = [asyncio.ensure_future(add()) for _ in range(TASKS)]
        taker.start()
        finished, _ = await asyncio.wait(
            tasks, timeout=dies_after_s, return_when=asyncio.FIRST_COMPLETED
        )
        server.kill()
        killed_s = time.monotonic()
        taker.join()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in finished:
            task.result()  # none may end before the server does
        return killed_s

    def take(self, url: str) -> None:
        """Read, acknowledge and delete entries until the server is gone, as a worker does."""
        stream = Keys(WORKED).stream
        with redis.Redis.from_url(url) as client, contextlib.suppress(redis.ConnectionError):
            client.xgroup_create(stream, DEFAULT_GROUP, "0")
            while True:
                found = client.xreadgroup(DEFAULT_GROUP, "taker", {stream: ">"}, count=20, block=0)
                ids = [entry_id for entry_id, _ in found[0][1]]
                with client.pipeline() as pipe:
                    pipe.xack(stream, DEFAULT_GROUP, *ids).xdel(stream, *ids).execute()
                self.done.update(number(fields[ENVELOPE]) for _, fields in found[0][1])
                time.sleep(PAUSE_S)


def measure(kind: str, mode: str, crash: str, trials: int, luck: random.Random, shim: Path) -> Cell:
    """Crash a server some times, and count."""
    cell = Cell()
    durable = "disk" if mode == DISK else False
    for _ in range(trials):
        with _server(kind, MODES[mode], shim) as server:
            trial = Trial()
            after_s = luck.uniform(LOW_S, HIGH_S)
            killed_s = asyncio.run(trial.run(server, durable=durable, dies_after_s=after_s))
            if crash == "power cut" and isinstance(server, DiskServer):
                server.cut_power()
            server.start()
            there = set(Census.take(server.url, ADDED).stream)
            back = set(Census.take(server.url, WORKED).stream)
        lost = trial.confirmed.keys() - there
        cell.trials += 1
        cell.confirmed += len(trial.confirmed)
        cell.lost += len(lost)
        cell.done += len(trial.done)
        cell.back += len(trial.done & back)
        oldest_s = min((trial.confirmed[n] for n in lost), default=killed_s)
        cell.window_s = round(max(cell.window_s, killed_s - oldest_s), 2)
    return cell


def _server(kind: str, settings: dict[str, str], shim: Path) -> Server:
    """A server with these settings, on a disk whose power can be cut if it writes anything."""
    return DiskServer(kind, shim, **settings) if settings else Server(kind)


def _jobs(numbers: Any) -> list[dict[str, Any]]:
    return [{"name": "work", "data": {"n": n}} for n in numbers]


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be: a loss where every write is synced before it is answered, or where only the
    process died and there is a file that it wrote, or where the server says truly what is synced.
    """

    def must_hold(kind: str, mode: str, crash: str) -> bool:
        survives_kill = crash == "kill -9" and bool(MODES[mode])
        return survives_kill or mode == "always" or (kind, mode) == TRUE_TO_DISK

    return [
        f"{kind}, {mode}, {crash}: {cell['lost']:,} of {cell['confirmed']:,} confirmed jobs lost"
        for kind, modes in told.items()
        for mode, crashes in modes.items()
        for crash, cell in crashes.items()
        if must_hold(kind, mode, crash) and cell.get("lost")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.durability", description=__doc__)
    parser.add_argument("--server", action="append", choices=list(KINDS))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    told = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        _measure_all(arguments, told, console, build_shim(Path(folder)))
    for line in (found := wrong(told)):
        console.print(f"[red]✗ {line}[/]", soft_wrap=True)
    return 1 if found else 0


def _measure_all(
    arguments: argparse.Namespace, told: dict[str, Any], console: Console, shim: Path
) -> None:
    made_at = {"commit": commit()}
    for kind in arguments.server or list(KINDS):
        luck = random.Random(arguments.seed)
        table = Table(
            "mode", "crash", "confirmed", "lost", "within", "done", "run again", title=kind
        )
        told[kind] = {}
        for mode in MODES:
            for crash in CRASHES:
                try:
                    cell = measure(kind, mode, crash, arguments.trials, luck, shim)
                except NotSupportedError as error:
                    told[kind].setdefault(mode, {})[crash] = {"missing": str(error)}
                    table.add_row(mode, crash, str(error))
                    continue
                told[kind].setdefault(mode, {})[crash] = made_at | vars(cell)
                table.add_row(mode, crash, f"{cell.confirmed:,}", f"{cell.lost:,}",
                              f"{cell.window_s} s", f"{cell.done:,}", f"{cell.back:,}")  # fmt: skip
        console.print(table)
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
