"""What live workers feel while Spark reads a whole queue: a part of bench.spark."""

import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers import Server

if TYPE_CHECKING:
    from bench.spark import Bench

#: How long each look at the live workers is.
LIVE_S = 2

#: Adds some 700 jobs a second and tells how long they took to their handler: median, 99th
#: percentile, in milliseconds.
LIVE = """
import asyncio, sys, time
from chasqui import Queue, Worker

async def main():
    took = []
    async def handle(job):
        took.append(time.time() - job.data["at"])
    worker = Worker("live", handle, redis_url=sys.argv[1], events_enabled=False)
    running = asyncio.ensure_future(worker.run())
    async with Queue("live", redis_url=sys.argv[1]) as queue:
        until = time.time() + float(sys.argv[2])
        while time.time() < until:
            await queue.add("live", {"at": time.time()})
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    await worker.close()
    await running
    took = sorted(took[200:])
    print(took[len(took) // 2] * 1000, took[int(len(took) * 0.99)] * 1000)

asyncio.run(main())
"""


class Live:
    """Live workers and the server that is theirs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._policy = os.SCHED_OTHER

    def p99(self, meanwhile: Callable[[], None] | None = None) -> float:
        """The 99th percentile of a worker's jobs, in milliseconds, while something goes on."""
        command = [sys.executable, "-c", LIVE, self._server.url, str(LIVE_S)]
        live = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._set(live.pid)
        while meanwhile is not None and live.poll() is None:
            meanwhile()
        told, _ = live.communicate()
        return float(told.split()[1])

    def go_first(self) -> None:
        """Give the live workers and their server a processor whenever they want one, as if whatever
        else is on this machine ran elsewhere. Needs the right to (root, or CAP_SYS_NICE)."""
        self._policy = os.SCHED_FIFO
        self._set(self._server.pid)

    def take_turns(self) -> None:
        """Let all share the processors as they come."""
        self._policy = os.SCHED_OTHER
        self._set(self._server.pid)

    def _set(self, pid: int) -> None:
        priority = os.sched_param(1 if self._policy == os.SCHED_FIFO else 0)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), self._policy, priority)


def live(bench: "Bench", rounds: int) -> tuple[str, dict[str, Any]]:
    """What jobs of live workers take at the 99th percentile: alone, while Spark reads a whole queue
    of another server, again and again, and while it reads one of theirs.

    The first two differ by the processors that Spark takes, the last two by its turns at the server
    and by nothing else. Where live workers and their server go first, Spark takes no processor from
    them either. A round has all three, one after the other, so that a machine whose speed changes
    changes all of them.
    """
    own, raw = bench.server, dict[str, Any]()
    head = ("a read", "alone, ms", "of another server", "of theirs", "theirs / alone")
    lines = [f"| {' | '.join((*head, 'theirs / another', 'rows/s', 'target'))} |"]
    lines.append("| --- | --- | --- | --- | ---: | ---: | ---: | --- |")
    with Server("redis-8.6") as other:
        filled = {}
        for server in (other, own):
            bench.server = server
            filled[server.url] = bench.write("filled", "exactly_once")
        workers = Live(own)

        def look(what: str, target: str, **given: Any) -> None:
            found: dict[str, list[float]] = {"alone": [], "another": [], "theirs": []}
            for _ in range(rounds):
                found["alone"].append(workers.p99())
                for where, server in (("another", other), ("theirs", own)):
                    more = {"url": server.url, **given}
                    keys = filled[server.url]
                    found[where].append(
                        workers.p99(functools.partial(bench.read, f"{what}, {where}", keys, **more))
                    )
            alone, another, theirs = (statistics.median(one) for one in found.values())
            rate = bench.median(f"{what}, theirs")
            told = [what, *map(spread, found.values()), f"{theirs / alone:.2f}"]
            told += [f"{theirs / another:.2f}", f"{rate:,.0f}", target]
            lines.append(f"| {' | '.join(told)} |")
            print(lines[-1], file=sys.stderr, flush=True)
            raw[what] = {**found, "rates": bench.rates[f"{what}, theirs"]}

        for server in (other, own):  # classes loaded, code compiled
            for share in (0.5, 1) * 2:
                more = {"url": server.url, "serverShare": share}
                bench.read("warm", filled[server.url], **more)
        workers.go_first()
        look("beside workers that go first", "at most 1.5")
        look("... at full speed", "", serverShare=1)
        workers.take_turns()
        look("on the same processors", "")
    text = f"{bench.rows:,} rows, {rounds} rounds of {LIVE_S} s; medians (from, to).\n"
    return "\n".join([*lines, "", text]), {"p99_ms": raw}


def spread(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f}, {max(found):.2f})"
