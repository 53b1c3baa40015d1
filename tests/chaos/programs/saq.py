"""SAQ. A sweeper finds jobs whose time is over."""

from typing import Any

import redis.asyncio
from saq import Worker
from saq.queue.redis import RedisQueue

from tests.chaos.programs.common import mark
from tests.chaos.programs.peer import DRAIN_S, SLOTS, TRIES, NotAddedError, Peer, main


class Saq(Peer):
    async def open(self) -> None:
        self._queue = RedisQueue(redis.asyncio.from_url(self.told.url, max_connections=4 * SLOTS))
        await self._queue.connect()

    async def add(self, n: int) -> None:
        safe = {"timeout": self.lease_s, "heartbeat": self.lease_s, "retries": TRIES}
        options = {} if self.told.is_default else safe
        if await self._queue.enqueue("work", n=n, mark=mark(n), **options) is None:
            raise NotAddedError

    async def work(self) -> None:
        async def work(context: Any, *, n: int, mark: str) -> None:
            await self.runs.work(n)

        await self.open()
        safe: dict[str, Any] = {
            "timers": {"sweep": self.lease_s},
            "shutdown_grace_period_s": DRAIN_S,
        }
        worker = Worker(
            self._queue,
            functions=[("work", work)],
            concurrency=SLOTS,
            **({} if self.told.is_default else safe),
        )
        await worker.start()


if __name__ == "__main__":
    main(Saq)
