"""SAQ. Its pool is widened: 100 idle slots hold a connection each, and its scheduler needs one.

It schedules in whole seconds.
"""

import asyncio
import math
from typing import Any

import redis.asyncio
from saq import Worker
from saq.queue.redis import RedisQueue

from bench.peers.harness import SLOTS, Data, Handle, Peer, main


class Saq(Peer):
    packages = ("saq", "redis", "uvloop")

    async def open(self) -> None:
        self._queue = RedisQueue(redis.asyncio.from_url(self.url, max_connections=4 * SLOTS))
        await self._queue.connect()
        self._options = {"retries": 3, "retry_delay": 0.0} if self.retries else {}

    async def close(self) -> None:
        await self._queue.disconnect()

    async def add(self, data: Data) -> None:
        await self._queue.enqueue("welcome", data=data, **self._options)

    async def add_at(self, data: Data, due_s: float) -> None:
        await self._queue.enqueue("welcome", data=data, scheduled=math.ceil(due_s))

    async def work(self, handle: Handle) -> None:
        async def welcome(context: Any, *, data: Data) -> None:
            handle(data)

        await self.open()
        worker = Worker(self._queue, functions=[("welcome", welcome)], concurrency=SLOTS)
        worker.SIGNALS = []
        try:
            await worker.start()
        except asyncio.CancelledError:
            await worker.stop()


if __name__ == "__main__":
    main(Saq)
