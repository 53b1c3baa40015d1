"""Bytes that come in pieces and in clumps, cut anywhere: a network keeps their order, no more."""

import asyncio
import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chasqui import Queue, Worker, sync
from tests.crash.load import Seed
from tests.proxy import Proxy
from tests.servers import Server

#: For how long; minutes by hand.
SHRED_S = float(os.environ.get("CHASQUI_TEST_SHRED_S") or 2.0)


class Shredder(Proxy):
    """A proxy that cuts what it forwards anywhere, and holds some of it back so that it clumps."""

    def __init__(self, upstream: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._rng_lock = threading.Lock()
        super().__init__(upstream)

    def _send(self, sock: socket.socket, data: bytes, direction: str) -> bool:
        at = 0
        while at < len(data):
            with self._rng_lock:
                # Single bytes near the start, where headers are; a few cuts in what is long.
                size = self._rng.choice([1, 2, 3, 7, 64, 1500, len(data)])
                pause_s = self._rng.choice([0.0] * 7 + [self._rng.uniform(0, 0.002)])
            if at > 200 and size < 64:
                size = 1 + len(data) // 3
            sock.sendall(data[at : at + size])
            at += size
            if pause_s:
                time.sleep(pause_s)
        return True


def payload(rng: random.Random) -> dict[str, Any]:
    size = rng.choice([0, 1, 10, 100, 1000, 20_000, 200_000])
    return {"body": rng.randbytes(size), "text": "\r\n$5\r\n*1\r\n" * rng.randrange(3)}


def digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(data["body"] + data["text"].encode()).hexdigest()


@asynccontextmanager
async def at_work(queue_name: str, url: str) -> AsyncIterator[None]:
    async def handle(job: Any) -> str:
        return digest(job.data)

    worker = Worker(queue_name, handle, redis_url=url, store_results=True)
    running = asyncio.create_task(worker.run())
    yield
    await worker.close()
    await running


async def produce(queue: Queue, rng: random.Random, until_s: float) -> int:
    count = 0
    while time.monotonic() < until_s:
        rows = [payload(rng) for _ in range(rng.randrange(1, 8))]
        jobs = await queue.add_bulk([{"name": "n", "data": row} for row in rows])
        jobs.append(await queue.add("n", rows[0]))
        for job, row in zip(jobs, [*rows, rows[0]], strict=True):
            assert await queue.wait_for_result(job.id) == digest(row)
        count += len(jobs)
    return count


def produce_blocking(queue: sync.Queue, rng: random.Random, until_s: float) -> int:
    count = 0
    while time.monotonic() < until_s:
        row = payload(rng)
        job = queue.add("n", row, delay_ms=rng.choice([None, 1]))
        assert queue.wait_for_result(job.id) == digest(row)
        count += 1
    return count


@pytest.mark.filterwarnings("ignore:wait_for_result has been waiting")  # on a busy machine
@pytest.mark.timeout(SHRED_S + 60)
@pytest.mark.both_loops(on="redis-8.6")
async def test_every_payload_and_every_result_is_whole(
    server: Server, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "chasqui")
    seed = Seed().seed
    rngs = [random.Random(f"{seed}-{n}") for n in range(4)]
    until_s = time.monotonic() + SHRED_S
    with Shredder(server.url, seed) as proxy:
        blocking = sync.Queue(queue_name, redis_url=proxy.url)
        async with at_work(queue_name, proxy.url), Queue(queue_name, redis_url=proxy.url) as queue:
            counts = await asyncio.gather(
                produce(queue, rngs[0], until_s),
                produce(queue, rngs[1], until_s),
                asyncio.to_thread(produce_blocking, blocking, rngs[2], until_s),
                asyncio.to_thread(produce_blocking, blocking, rngs[3], until_s),
            )
            assert min(counts) > 0
            assert (await queue.counts()).dlq == 0
        await asyncio.to_thread(blocking.close)
    print(f"{sum(counts)} jobs, {proxy.bytes_in} bytes, {proxy.accepted} links")
    assert [one for one in caplog.messages if "link to" in one] == [], "none was given up"
