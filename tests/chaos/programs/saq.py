"""SAQ. A sweeper finds jobs whose time is over."""

from typing import Any

import redis.asyncio
from saq import Worker
from saq.queue.redis import RedisQueue

from tests.chaos.programs.common import mark
from tests.chaos.programs.peer import DRAIN_S, SLOTS, Peer, main


class Saq(Peer):
    async def open(self) -> None:
        self._queue = RedisQueue(redis.asyncio.from_url(self.told.url, max_connections=4 * SLOTS))
        await self._queue.connect()

    async def add(self, n: int) -> None:
        await self._queue.enqueue(
            "work", n=n, mark=mark(n), timeout=self.lease_s, heartbeat=self.lease_s, retries=1000
        )

    async def work(self) -> None:
        async def work(context: Any, *, n: int, mark: str) -> None:
            await self.runs.work(n)

        await self.open()
        worker = Worker(
            self._queue,
            functions=[("work", work)],
            concurrency=SLOTS,
            timers={"sweep": self.lease_s},
            shutdown_grace_period_s=DRAIN_S,
        )
        await worker.start()


if __name__ == "__main__":
    main(Saq)
