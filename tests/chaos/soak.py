"""`python -m tests.chaos.soak`: steady work for hours while all links are cut every ten seconds.
What a process and its server hold must not grow."""

import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import redis

from chasqui import Job, Queue, Worker
from chasqui.model.keys import Keys
from tests.chaos.figure import Figure, Say, silent
from tests.core.memory import rss_bytes, used_bytes
from tests.servers import Server

NAME = "soak"
#: Jobs of each kind that are added at once, and the time between two such adds: 200 jobs a second.
BATCH = 10
PAUSE_S = 0.2
CUT_S = 10.0
SAMPLE_S = 30.0
#: No job done for so long: it will not go on.
HANG_S = 60.0
LOOK_S = 0.01
#: Of all samples, what is not counted: pools, caches and free lists fill up.
WARM_UP = 0.25
#: What may be more: memory by the hour, and what a server keeps for itself.
MIB_PER_H = 1.0
SERVER_MIB = 1.0
#: A queue, and its worker: commands, reads, the promoter, the heartbeat.
LINKS = 5
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What is held while nothing is under way and every link is there."""

    at_s: float
    #: What is resident, holes between allocations included; and what is in use.
    rss_mib: float
    used_mib: float
    blocks: int
    files: int
    server_mib: float
    #: Those that do not end by themselves.
    keys: int


class Soak:
    """A queue and a worker in this process, on a server that cuts their links."""

    def __init__(self, url: str) -> None:
        self.samples: list[Sample] = []
        self.cuts = self.added = self.done = 0
        self._client = redis.Redis.from_url(url)
        self._keys = Keys(NAME)
        self._queue = Queue(NAME, redis_url=url)
        options = {"events_enabled": False, "store_results": True, "result_ttl_ms": 200}
        self._worker = Worker(NAME, self._handle, redis_url=url, claim_min_idle_ms=3000, **options)

    async def _handle(self, job: Job) -> int:
        if job.name == "hold":
            await self._until(self._is_linked)  # who holds nothing has no heart that beats
        if job.name == "again" and job.attempt == 0:
            raise ValueError("not yet")
        self.done += 1
        return self.done

    async def run(self, seconds: float, sample_s: float, say: Say) -> None:
        """Work for so long, and look at what is held now and then."""
        begun_s = cut_s = sampled_s = time.monotonic()
        async with self._queue, self._worker:
            running = asyncio.ensure_future(self._worker.run())
            await self._add("plain")
            await self._until(lambda: self.done >= self.added)
            while (now_s := time.monotonic()) < begun_s + seconds:
                await self._add("plain", "plain")
                await self._add("later", delay_ms=10)
                await self._add("again", attempts=3, backoff=5)
                if now_s >= cut_s + CUT_S:
                    cut_s = now_s
                    self.cuts += int(self._client.client_kill_filter(_type="normal", skipme=True))
                if now_s >= sampled_s + sample_s:
                    sampled_s = now_s
                    await self._sample(now_s - begun_s)
                await asyncio.sleep(PAUSE_S)
                say(self.done)
            await self._sample(time.monotonic() - begun_s)
            await self._worker.close()
            await running
        self._client.close()

    async def _add(self, *names: str, **options: Any) -> None:
        jobs = [{"name": name, "data": n, **options} for name in names for n in range(BATCH)]
        await self._queue.add_bulk(jobs)
        self.added += len(jobs)

    async def _sample(self, at_s: float) -> None:
        await self._queue.add("hold", None)
        self.added += 1
        await self._until(self._is_at_rest)
        self._client.memory_purge()
        keys = sum(self._client.ttl(key) == -1 for key in self._client.scan_iter(count=1000))
        files = await self._open_files()
        used = self._client.info("memory")["used_memory"]
        gc.collect()
        held = (rss_bytes() / MIB, used_bytes() / MIB, sys.getallocatedblocks())
        self.samples.append(Sample(at_s, *held, files, used / MIB, keys))

    async def _open_files(self) -> int:
        """The least of some looks: links that were cut are let go of in their own time."""
        found = []
        for _ in range(20):
            found.append(len(os.listdir("/proc/self/fd")))
            await asyncio.sleep(LOOK_S)
        return min(found)

    def _is_at_rest(self) -> bool:
        health = self._worker.health()
        if health is None or self.done < self.added or not self._is_linked():
            return False
        under_way = health.running + health.prefetched + health.acks_waiting + health.moves_waiting
        results = any(True for _ in self._client.scan_iter("*:result:*", count=1000))
        return not under_way and not results and not self._client.xlen(self._keys.stream)

    def _is_linked(self) -> bool:
        names = [client["name"] for client in self._client.client_list()]
        return sum("chasqui" in name for name in names) == LINKS

    async def _until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not fact():  # noqa: ASYNC110 - only the server knows
                await asyncio.sleep(LOOK_S)


async def measure(
    kind: str, seconds: float, sample_s: float = SAMPLE_S, *, say: Say = silent
) -> dict[str, Any]:
    """What was held at first and in the end, and how memory grew by the hour."""
    with Server(kind) as server:
        soak = Soak(server.url)
        await soak.run(seconds, sample_s, say)
    counted = soak.samples[int(len(soak.samples) * WARM_UP) :]
    return {
        "server": kind,
        "hours": round(seconds / 3600, 2),
        "jobs": soak.done,
        "links_cut": soak.cuts,
        "samples": len(counted),
        "first": asdict(counted[0]),
        "last": asdict(counted[-1]),
        "most_files": max(sample.files for sample in counted),
        "rss_mib_per_h": round(slope_per_h(counted, "rss_mib"), 3),
        "used_mib_per_h": round(slope_per_h(counted, "used_mib"), 3),
        "blocks_per_h": round(slope_per_h(counted, "blocks")),
        # All of them: a slope does not tell whether memory creeps, steps or levels off.
        "rss_mib_at_s": {round(one.at_s): round(one.rss_mib, 3) for one in soak.samples},
    }


def slope_per_h(samples: list[Sample], what: str) -> float:
    """How much of it there is more in an hour, by the line that fits best."""
    if len(samples) < 2:
        return 0.0
    at_s, held = [one.at_s for one in samples], [getattr(one, what) for one in samples]
    return statistics.linear_regression(at_s, held).slope * 3600


def wrong(told: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    first, last = told["first"], told["last"]
    found = {
        f"memory grows by {told['rss_mib_per_h']} MiB/h": told["rss_mib_per_h"] > MIB_PER_H,
        f"memory in use grows by {told['used_mib_per_h']} MiB/h": told["used_mib_per_h"]
        > MIB_PER_H,
        "descriptors are left": told["most_files"] > first["files"],
        "the server holds more": last["server_mib"] > first["server_mib"] + SERVER_MIB,
        "keys are left": last["keys"] > first["keys"],
    }
    return [line for line, is_wrong in found.items() if is_wrong]


def main() -> int:
    figure = Figure(NAME, __doc__, is_seeded=False, is_by_server=True)
    figure.parser.add_argument("--hours", type=float, default=8.0)
    figure.parser.add_argument(
        "--every", type=float, default=SAMPLE_S, help="seconds between looks"
    )
    asked = figure.arguments()
    told = asyncio.run(measure(asked.server, asked.hours * 3600, asked.every, say=figure.say))
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
