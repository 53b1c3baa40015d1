"""BullMQ for Python, removing what is completed."""

import asyncio
import itertools
import time
from typing import Any
from urllib.parse import urlsplit

from bullmq import Queue, Worker

from bench.peers.harness import SLOTS, Data, Handle, Peer, main

DONE = {"removeOnComplete": True}
SOON = {"attempts": 3, "backoff": {"type": "fixed", "delay": 1}}


class BullMQ(Peer):
    packages = ("bullmq", "redis", "uvloop")

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        parts = urlsplit(url)
        self._connection = {"host": parts.hostname, "port": parts.port}
        self._options: Data = {**DONE, **SOON} if retries else DONE
        self._numbers = itertools.count()

    async def open(self) -> None:
        self._queue = Queue("bench", {"connection": self._connection})

    async def close(self) -> None:
        await self._queue.close()

    async def add(self, data: Data) -> None:
        await self._queue.add("welcome", data, self._options)

    async def add_bulk(self, every: list[Data]) -> None:
        options = self._options
        await self._queue.addBulk(
            [{"name": "welcome", "data": data, "opts": options} for data in every]
        )

    async def add_mixed(self, every: list[Data]) -> None:
        number = next(self._numbers)
        ways: list[Any] = [{"attempts": 3}, SOON, {"delay": 3_600_000}, {}]
        jobs = []
        for i, data in enumerate(every):
            options = {**DONE, **ways[i % 4]}
            if i % 4 == 3:
                options["jobId"] = f"order-{number}-{i}"
            jobs.append({"name": "welcome", "data": data, "opts": options})
        await self._queue.addBulk(jobs)

    async def add_at(self, data: Data, due_s: float) -> None:
        delay_ms = max(1, round((due_s - time.time()) * 1000))
        await self._queue.add("welcome", data, {**DONE, "delay": delay_ms})

    async def add_bulk_at(self, every: list[Data], due_s: float) -> None:
        options = {**DONE, "delay": max(1, round((due_s - time.time()) * 1000))}
        await self._queue.addBulk(
            [{"name": "welcome", "data": data, "opts": options} for data in every]
        )

    async def work(self, handle: Handle) -> None:
        async def process(job: Any, token: str) -> None:
            handle(job.data)

        worker = Worker("bench", process, {"connection": self._connection, "concurrency": SLOTS})
        try:
            await asyncio.Event().wait()
        finally:
            await worker.close(True)


if __name__ == "__main__":
    main(BullMQ)
