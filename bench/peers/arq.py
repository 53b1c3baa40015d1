"""arq, asked for jobs every 10 ms instead of every 500, and keeping no results.

It retries only what a job raises as Retry.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from arq import Retry, create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from bench.peers.harness import SLOTS, Data, Handle, Peer, main


class Arq(Peer):
    packages = ("arq", "redis", "uvloop")

    async def open(self) -> None:
        self._pool = await create_pool(RedisSettings.from_dsn(self.url))

    async def close(self) -> None:
        await self._pool.aclose()

    async def add(self, data: Data) -> None:
        await self._pool.enqueue_job("welcome", data)

    async def add_at(self, data: Data, due_s: float) -> None:
        due = datetime.fromtimestamp(due_s, UTC)
        await self._pool.enqueue_job("welcome", data, _defer_until=due)

    async def work(self, handle: Handle) -> None:
        async def welcome(context: Any, data: Data) -> None:
            try:
                handle(data)
            except RuntimeError:
                raise Retry(defer=0) from None

        worker = Worker(
            functions=[func(welcome, name="welcome")],
            redis_settings=RedisSettings.from_dsn(self.url),
            max_jobs=SLOTS,
            poll_delay=0.01,
            keep_result=0,
            handle_signals=False,
        )
        try:
            await worker.async_run()
        except asyncio.CancelledError:
            await worker.close()


if __name__ == "__main__":
    main(Arq)
