"""Entries that are lost while they are in hand, or that the server forgot: none goes without having
been done, and none runs twice at once."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from chasqui import Job
from chasqui.keys import Keys
from chasqui.metrics import JobOutcome
from chasqui.queue import Queue
from tests.integration.consuming.conftest import Redis, Running, at_rest, until
from tests.proxy import Proxy
from tests.servers import Server

LEASE_MS = 400


# ── Handlers that are told ──────────────────────────────────────────────────────────────────────


@pytest.mark.fault(15)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "thread", "batch"])
@pytest.mark.parametrize("way", ["return", "raise"])
async def test_a_job_whose_handler_was_told_that_it_may_be_lost_runs_again(
    server: Server,
    queue: Queue,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
    redis: Redis,
    keys: Keys,
    kind: str,
    way: str,
) -> None:
    """The server is out of reach for longer than the lease, and nobody is there to take the job
    over: its handler stops, for somebody may have."""
    begun = threading.Event()
    runs: list[str] = []

    def plain(job: Job) -> None:
        if begun.is_set():
            runs.append("done")
            return
        begun.set()
        while not job.lost:
            time.sleep(0.01)
        runs.append("stopped")
        if way == "raise":
            job.raise_if_lost()

    async def handler(job: Job) -> None:
        if not begun.is_set():
            begun.set()
            while not job.lost:  # noqa: ASYNC110 - as handlers do
                await asyncio.sleep(0.01)
            begun.clear()
        plain(job)

    async def batch(jobs: list[Job]) -> None:
        await handler(jobs[0])

    proxy = make_proxy(server.url)
    chosen = {"async": handler, "thread": plain, "batch": batch}[kind]
    options = {"batch": 1} if kind == "batch" else {}
    running = start_at(proxy.url, chosen, claim_min_idle_ms=LEASE_MS, **options)
    await queue.add("n", None)
    await running.fact(asyncio.to_thread(begun.wait))
    proxy.stall()
    await running.next(JobOutcome)
    proxy.resume()
    await until(lambda: at_rest(redis, keys), "it is done")
    assert runs == ["stopped", "done"]
    assert await redis("XLEN", keys.dlq) == 0
