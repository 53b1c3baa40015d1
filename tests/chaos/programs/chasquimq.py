"""chasquimq: the queue whose interface and wire format chasqui took over."""

import asyncio
from typing import Any

from chasquimq import Queue, Worker

from tests.chaos.programs.common import mark
from tests.chaos.programs.peer import SLOTS, Peer, main, stop_on_sigterm


class ChasquiMQ(Peer):
    async def open(self) -> None:
        self._queue = Queue(self.told.queue, redis_url=self.told.url)

    async def add(self, n: int) -> None:
        data = {"n": n, "mark": mark(n)}
        if self.told.is_default:
            await self._queue.add("work", data)
        else:  # for producers whose adds may be repeated after a broken link
            await self._queue.add_unique("work", data, job_id=f"job-{n}")

    async def work(self) -> None:
        async def handle(job: Any) -> None:
            await self.runs.work(job.data["n"])

        stop = stop_on_sigterm()
        worker = Worker(
            self.told.queue,
            handle,
            redis_url=self.told.url,
            concurrency=SLOTS,
            consumer_id=self.told.who,
            claim_min_idle_ms=None if self.told.is_default else self.told.lease_ms,
        )
        running = asyncio.ensure_future(worker.run())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await worker.close()
        await running


if __name__ == "__main__":
    main(ChasquiMQ)
