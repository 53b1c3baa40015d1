"""The scenarios, as a peer's process runs them: one a process, one RESULT line at its end.

    python -m bench.peers.<peer> '{"scenario": "drain", "url": "redis://…", "n": 10000}'

Standard library only (and uvloop where the environment has it).
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.peers.meter import Meter
from bench.peers.tasks import WORKING, Task
from bench.peers.tasks import Data as Data
from bench.peers.tasks import Handle as Handle

PAYLOAD: Data = {"to": "user@example.com", "n": 123}
SLOTS = 100
#: Left for trailing acknowledgements before the clocks are read.
SETTLE_S = 0.3


class Unsupported(Exception):
    """The library has no call for what the scenario does."""


class Peer:
    """One library, as the scenarios use it. What it has no call for, it leaves as it is here."""

    #: The distributions whose versions make the result.
    packages: tuple[str, ...] = ()
    #: Whether its worker needs the main thread for itself.
    blocks = False
    #: Whether its jobs run in several threads.
    is_threaded = False

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        self.url = url
        #: Whether its worker tells of every job in an events stream, where that can be chosen.
        self.events = events
        #: Whether its jobs fail once, and are to be run again as soon as it can.
        self.retries = retries

    async def open(self) -> None:
        """Connect, to add jobs."""

    async def close(self) -> None:
        """Let go of what `open` took."""

    async def add(self, data: Data) -> None:
        raise NotImplementedError

    async def add_bulk(self, every: list[Data]) -> None:
        raise Unsupported("no bulk add")

    def entries(self, every: list[Data]) -> list[Any]:
        """What its bulk add takes for these jobs."""
        raise Unsupported("no bulk add of a list")

    async def add_entries(self, entries: list[Any]) -> None:
        raise Unsupported("no bulk add of a list")

    async def add_mixed(self, every: list[Data]) -> None:
        """Add jobs in bulk that have options of their own: attempts, backoff, delay, id."""
        raise Unsupported("no bulk add with options per job")

    async def add_at(self, data: Data, due_s: float) -> None:
        """Add a job that is due at a unix time."""
        raise Unsupported("no delayed jobs")

    async def add_bulk_at(self, every: list[Data], due_s: float) -> None:
        """Add many that are due at once; by 100 at a time where there is no call for that."""
        await by_100(every, lambda data: self.add_at(data, due_s))

    async def fill(self, every: list[Data]) -> None:
        """Add many that are due now; how is not measured."""
        try:
            await self.add_bulk(every)
        except Unsupported:
            await by_100(every, self.add)

    async def work(self, handle: Handle) -> None:
        """Run jobs, 100 at a time where it can, until cancelled, or for ever if it `blocks`."""
        raise NotImplementedError


async def by_100(every: list[Data], add: Callable[[Data], Awaitable[None]]) -> None:
    """Add jobs by 100 tasks at once that share them."""
    rest = iter(every)

    async def one() -> None:
        for data in rest:
            await add(data)

    await asyncio.gather(*(one() for _ in range(SLOTS)))


def payloads(n: int, body_bytes: int = 0) -> list[Data]:
    """Jobs that can be told apart."""
    if not body_bytes:
        return [{"to": "user@example.com", "n": i} for i in range(n)]
    body = "x" * body_bytes
    return [{"to": "user@example.com", "n": i, "body": body} for i in range(n)]


# ── Adding ───────────────────────────────────────────────────────────────────────────────────────


async def single(peer: Peer, n: int) -> Data:
    for _ in range(20):
        await peer.add(PAYLOAD)
    meter = Meter(peer.url)
    for _ in range(n):
        await peer.add(PAYLOAD)
    return meter.spent(n)


async def gather(peer: Peer, n: int, body_bytes: int = 0) -> Data:
    if peer.blocks or peer.is_threaded:
        raise Unsupported("no asyncio: one add at a time")
    data = payloads(1, body_bytes)[0] if body_bytes else PAYLOAD
    await by_100([data] * SLOTS, peer.add)
    meter = Meter(peer.url)
    await by_100([data] * n, peer.add)
    return meter.spent(n)


async def bulk(peer: Peer, n: int, size: int, body_bytes: int = 0, ready: bool = False) -> Data:
    """`ready`: the caller's list is there before the clock runs, as prebuilt bytes are."""
    every = payloads(1, body_bytes) * size if body_bytes else [PAYLOAD] * size
    await peer.add_bulk(every)
    entries = peer.entries(every) if ready else []
    meter = Meter(peer.url)
    for _ in range(n // size):
        if ready:
            await peer.add_entries(entries)
        else:
            await peer.add_bulk(every)
    return meter.spent(n // size * size)


async def mixed(peer: Peer, n: int, size: int) -> Data:
    await peer.add_mixed([PAYLOAD] * 4)
    meter = Meter(peer.url)
    for _ in range(n // size):
        await peer.add_mixed([PAYLOAD] * size)
    return meter.spent(n // size * size)


async def fill(peer: Peer, n: int, body_bytes: int = 0) -> Data:
    step = 1000 if body_bytes < 10_000 else 100
    every = payloads(n, body_bytes)
    for start in range(0, n, step):
        await peer.fill(every[start : start + step])
    return {"n": n}


async def paced(peer: Peer, n: int, per_s: int) -> Data:
    """Add at fixed moments, whatever the queue does; each job carries its own."""
    start_s = time.monotonic() + 0.05
    for i in range(n):
        wait_s = start_s + i / per_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await peer.add({**PAYLOAD, "t": time.monotonic()})
    return {"n": n}


async def schedule(peer: Peer, n: int, lead_s: float) -> Data:
    due_s = time.time() + lead_s
    step = min(n, 1000)
    meter = Meter(peer.url)
    for start in range(0, n, step):
        every = [{"to": "user@example.com", "n": i} for i in range(start, start + step)]
        await peer.add_bulk_at(every, due_s)
    return {**meter.spent(n), "due_s": due_s, "in_time": time.time() < due_s}


async def spread(peer: Peer, n: int, lead_s: float, over_s: float) -> Data:
    """Jobs due one after the other."""
    start_s = time.time() + lead_s
    every = [{**PAYLOAD, "due": start_s + i * over_s / n} for i in range(n)]
    await by_100(every, lambda data: peer.add_at(data, data["due"]))
    return {"n": n, "in_time": time.time() < start_s}


# ── The process ──────────────────────────────────────────────────────────────────────────────────

ADDING: dict[str, Callable[..., Awaitable[Data]]] = {
    "single": single,
    "gather": gather,
    "bulk": bulk,
    "mixed": mixed,
    "fill": fill,
    "paced": paced,
    "schedule": schedule,
    "spread": spread,
}


def main(kind: Callable[[str, bool, bool], Peer]) -> None:
    """Run the scenario that the command line names, and tell its result."""
    asked = json.loads(sys.argv[1])
    scenario, url = asked.pop("scenario"), asked.pop("url")
    limit_s = asked.pop("limit_s", 120)
    peer = kind(url, asked.pop("events", False), asked.get("retries", False))
    if scenario in ADDING:
        asked.pop("retries", None)
        run_loop(produce(peer, ADDING[scenario], asked))
        return
    if peer.is_threaded and scenario == "drain":
        asked["locked"] = True
    task = WORKING[scenario](url, **asked)
    if peer.blocks:
        threading.Thread(target=watch, args=(peer, task, limit_s), daemon=True).start()
        print("READY", flush=True)
        asyncio.run(peer.work(task.handle))
    else:
        run_loop(consume(peer, task, limit_s))


def run_loop(work: Any) -> None:
    """Run a coroutine on uvloop, or on asyncio's loop where there is none."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def tell(peer: Peer, result: Data) -> None:
    packages = {name: importlib.metadata.version(name) for name in peer.packages}
    print("RESULT " + json.dumps({**result, "packages": packages}), flush=True)


async def produce(peer: Peer, scenario: Callable[..., Awaitable[Data]], asked: Data) -> None:
    await peer.open()
    try:
        tell(peer, await scenario(peer, **asked))
    except Unsupported as reason:
        tell(peer, {"unsupported": str(reason)})
    await peer.close()


async def consume(peer: Peer, task: Task, limit_s: float) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    task.on_done = lambda: loop.call_soon_threadsafe(done.set)  # type: ignore[assignment]
    worker = asyncio.ensure_future(peer.work(task.handle))
    waiting = asyncio.ensure_future(done.wait())
    await asyncio.sleep(0)
    print("READY", flush=True)
    await asyncio.wait({worker, waiting}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if worker.done() and not waiting.done():
        await worker  # raises what ended it
    await asyncio.sleep(SETTLE_S)
    tell(peer, task.result())
    waiting.cancel()
    worker.cancel()
    with contextlib.suppress(BaseException):
        await asyncio.wait_for(asyncio.gather(worker, return_exceptions=True), 5)


def watch(peer: Peer, task: Task, limit_s: float) -> None:
    task.done.wait(limit_s)
    time.sleep(SETTLE_S)
    tell(peer, task.result())
    os._exit(0)  # its worker has the main thread and knows no end
