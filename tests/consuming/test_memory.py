"""A worker's memory does not grow with the jobs it has run."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chasqui import Job
from chasqui.queue import Queue
from chasqui.worker import Worker
from tests.servers import Server

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: The first jobs fill pools, caches and free lists.
WARM_UP = 100_000
#: What an allocator may still take; an id kept of each job of a long run would be much more.
MAX_GROWTH_BYTES = 5_000_000


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.fault(55)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "count",
    [
        200_000,
        pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
    ],
)
async def test_memory_is_flat_after_the_first_jobs(
    private_server: Callable[..., Server], queue_name: str, count: int
) -> None:
    server = private_server("redis-8.6")
    done = 0
    changed = asyncio.Event()

    async def handler(job: Job) -> None:
        nonlocal done
        done += 1
        if done % 10_000 == 0:
            changed.set()
        if job.data["i"] % 500 == 0:
            raise ValueError

    async with Queue(queue_name, redis_url=server.url) as queue:
        worker = Worker(queue_name, handler, redis_url=server.url, max_attempts=1)
        running = asyncio.ensure_future(worker.run())
        entries = [{"name": f"n{i % 50}", "data": {"i": i}} for i in range(10_000)]
        sizes: list[int] = []
        for _ in range(count // len(entries)):
            changed.clear()
            await queue.add_bulk(entries)
            await changed.wait()
            sizes.append(rss_bytes())
        await worker.close()
        await running
    warm = max(sizes[: WARM_UP // len(entries)])
    print(f"{warm / 1e6:.1f} MB after {WARM_UP:,}, {sizes[-1] / 1e6:.1f} MB after {count:,}")
    assert sizes[-1] - warm < MAX_GROWTH_BYTES
