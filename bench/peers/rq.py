"""RQ with a worker that runs jobs in its own process: a process a job, its default, is slower.

Delayed jobs need a scheduler process.
"""

import redis
from rq import Queue, Retry, SimpleWorker

import bench.peers.rq_job
from bench.peers.harness import Data, Handle, Peer, Unsupported, main

JOB = "bench.peers.rq_job.welcome"


class Rq(Peer):
    packages = ("rq", "redis")
    blocks = True

    async def open(self) -> None:
        self._queue = Queue(connection=redis.Redis.from_url(self.url))
        self._retry = Retry(max=3) if self.retries else None

    async def add(self, data: Data) -> None:
        self._queue.enqueue(JOB, data, retry=self._retry)

    async def add_bulk(self, every: list[Data]) -> None:
        self._queue.enqueue_many(
            [Queue.prepare_data(JOB, (data,), retry=self._retry) for data in every]
        )

    async def add_at(self, data: Data, due_s: float) -> None:
        raise Unsupported("delayed jobs need a scheduler process")

    async def work(self, handle: Handle) -> None:
        bench.peers.rq_job.handle = handle
        await self.open()
        worker = SimpleWorker([self._queue], connection=self._queue.connection)
        worker.log.disabled = True
        worker.work(logging_level="CRITICAL")


if __name__ == "__main__":
    main(Rq)
