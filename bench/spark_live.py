"""What live workers feel while Spark reads a whole queue: a part of bench.spark."""

import contextlib
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
LIVE_S = 3

#: Adds some 300 jobs a second and tells how long they took to their handler: median, 99th
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
            await asyncio.sleep(0.0025)
    await asyncio.sleep(0.2)
    await worker.close()
    await running
    took = sorted(took[100:])
    print(took[len(took) // 2] * 1000, took[int(len(took) * 0.99)] * 1000)

asyncio.run(main())
"""


class Live:
    """Live workers, a server of theirs, and a Spark whose processors can be taken away."""

    def __init__(self, bench: "Bench", other: Server) -> None:
        self._server = bench.server
        self._other = other
        self._jvm: int = bench.spark.sparkContext._gateway.proc.pid
        self._cores = os.sched_getaffinity(0)

    def p99(self, meanwhile: Callable[[], None] | None = None) -> float:
        """The 99th percentile of a worker's jobs, in milliseconds, while something goes on."""
        command = [sys.executable, "-c", LIVE, self._server.url, str(LIVE_S)]
        live = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(live.pid, self._cores)
        while meanwhile is not None and live.poll() is None:
            meanwhile()
        told, _ = live.communicate()
        return float(told.split()[1])

    def set_apart(self) -> None:
        """Give Spark one core, and another one to the server and the live workers."""
        first, *_, last = sorted(os.sched_getaffinity(0))
        self._cores = {first}
        for thread in threads_of(self._server.pid):
            os.sched_setaffinity(thread, {first})
        for thread in (*self._spark_threads(), *threads_of(self._other.pid)):
            os.sched_setaffinity(thread, {last})

    def make_spark_yield(self) -> None:
        """Let Spark have all cores again, but only while nobody else wants them."""
        self._cores = os.sched_getaffinity(0)
        for thread in (*threads_of(self._server.pid), *threads_of(self._other.pid)):
            os.sched_setaffinity(thread, self._cores)
        for thread in self._spark_threads():
            os.sched_setaffinity(thread, self._cores)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    def _spark_threads(self) -> list[int]:
        """All threads of the JVM and of its Python workers; those that they start later inherit."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (entry / "stat").read_text()
                    parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
        found = []
        for pid in parents:
            above = pid
            while above in parents and above != self._jvm:
                above = parents[above]
            if above == self._jvm:
                found += threads_of(pid)
        return found


def threads_of(pid: int) -> list[int]:
    return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]


def live(bench: "Bench", rounds: int) -> tuple[str, dict[str, Any]]:
    """What jobs of live workers take at the 99th percentile: alone, while Spark reads a whole queue
    of another server, again and again, and while it reads one of theirs.

    The first two differ by the processors that Spark takes, the last two by its turns at the server
    and by nothing else. With the cores shared in three ways.
    """
    own, raw = bench.server, dict[str, Any]()
    lines = ["| a read | alone, ms | of another server | of theirs | ratio | rows/s | target |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    with Server("redis-8.6") as other:
        filled = {}
        for server in (other, own):
            bench.server = server
            filled[server.url] = bench.write("filled", "exactly_once")
        workers = Live(bench, other)

        def look(what: str, target: str, **given: Any) -> None:
            found: dict[str, list[float]] = {"alone": [], "another": [], "theirs": []}
            for _ in range(rounds):
                found["alone"].append(workers.p99())
                for where, server in (("another", other), ("theirs", own)):
                    more = {"url": server.url, **given}
                    keys = filled[server.url]
                    found[where].append(
                        workers.p99(functools.partial(bench.read, what, keys, **more))
                    )
            alone, another, theirs = (statistics.median(one) for one in found.values())
            shown = f"{alone:.2f} | {another:.2f} | {theirs:.2f} | {theirs / another:.2f}"
            lines.append(f"| {what} | {shown} | {bench.rates[what][-1]:,.0f} | {target} |")
            print(lines[-1], file=sys.stderr, flush=True)
            raw[what] = {**found, "rates": bench.rates[what]}

        bench.read("warm", filled[own.url])
        look("on the same cores", "at most 1.5")
        workers.set_apart()
        look("on another core", "at most 1.5")
        workers.make_spark_yield()
        look("that yields the cores", "at most 1.5")
        look("... at full speed", "", serverShare=1)
    text = f"{bench.rows:,} rows, {rounds} rounds of {LIVE_S} s.\n"
    return "\n".join([*lines, "", text]), {"p99_ms": raw}
