"""chasquimq: a Rust engine behind asyncio, with the interface that chasqui took over.

Its bulk add takes a round trip a job as soon as one of them has a delay or other options, so
delayed and retried jobs are added by 100 tasks at once, which is its fastest way.
"""

from chasquimq import Queue, Worker

from bench.peers.chasqui_api import ChasquiApi
from bench.peers.harness import Data, by_100, main


class ChasquiMQ(ChasquiApi):
    packages = ("chasquimq", "redis", "uvloop")
    queue_type = Queue
    worker_type = Worker

    async def fill(self, every: list[Data]) -> None:
        if self.retries:
            await by_100(every, self.add)
        else:
            await self.add_bulk(every)


if __name__ == "__main__":
    main(ChasquiMQ)
