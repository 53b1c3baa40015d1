"""The calls that chasqui and chasquimq share: the same interface, so the same code for both."""

import itertools
from datetime import UTC, datetime
from typing import Any, ClassVar

from bench.peers.harness import SLOTS, Data, Handle, Peer

#: The options of a job that is retried at once.
RETRIED = {"attempts": 3, "backoff": {"kind": "fixed", "delay_ms": 1}}


class ChasquiApi(Peer):
    queue_type: ClassVar[Any]
    worker_type: ClassVar[Any]

    async def open(self) -> None:
        self._queue = self.queue_type("bench", redis_url=self.url)
        self._numbers = itertools.count()
        self._options = RETRIED if self.retries else {}

    async def close(self) -> None:
        await self._queue.close()

    async def add(self, data: Data) -> None:
        await self._queue.add("welcome", data, **self._options)

    async def add_bulk(self, every: list[Data]) -> None:
        await self._queue.add_bulk(self.entries(every))

    def entries(self, every: list[Data]) -> list[Data]:
        jobs: list[Data] = [{"name": "welcome", "data": data} for data in every]
        if self._options:
            jobs = [{**job, **self._options} for job in jobs]
        return jobs

    async def add_entries(self, entries: list[Data]) -> None:
        await self._queue.add_bulk(entries)

    async def add_mixed(self, every: list[Data]) -> None:
        number = next(self._numbers)
        jobs: list[Data] = [{"name": "welcome", "data": data} for data in every]
        for i, job in enumerate(jobs):
            if i % 4 == 0:
                job["attempts"] = 3
            elif i % 4 == 1:
                job["backoff"] = RETRIED["backoff"]
            elif i % 4 == 2:
                job["delay_ms"] = 3_600_000
            else:
                job["job_id"] = f"order-{number}-{i}"
        await self._queue.add_bulk(jobs)

    async def add_at(self, data: Data, due_s: float) -> None:
        await self._queue.add("welcome", data, delay_ms=datetime.fromtimestamp(due_s, UTC))

    async def work(self, handle: Handle) -> None:
        async def handler(job: Any) -> None:
            handle(job.data)

        worker = self.worker_type(
            "bench", handler, redis_url=self.url, concurrency=SLOTS, events_enabled=self.events
        )
        try:
            await worker.run()
        finally:
            await worker.close()
