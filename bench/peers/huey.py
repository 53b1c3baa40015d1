"""huey with 8 threads and no results kept. It looks for due jobs once a second."""

import asyncio
from datetime import UTC, datetime

from huey import RedisHuey

from bench.peers.harness import Data, Handle, Peer, main


class Huey(Peer):
    packages = ("huey", "redis")
    is_threaded = True

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        self._huey = RedisHuey("bench", url=url, results=False, utc=True)
        self._handle: Handle = lambda data: None

        @self._huey.task(retries=3, retry_delay=0, name="welcome")
        def welcome(data: Data) -> None:
            self._handle(data)

        self._task = welcome

    async def add(self, data: Data) -> None:
        self._task(data)

    async def add_at(self, data: Data, due_s: float) -> None:
        due = datetime.fromtimestamp(due_s, UTC).replace(tzinfo=None)  # it wants naive UTC
        self._task.schedule(args=(data,), eta=due)

    async def work(self, handle: Handle) -> None:
        self._handle = handle
        consumer = self._huey.create_consumer(workers=8, worker_type="thread", periodic=False)
        consumer.start()
        try:
            await asyncio.Event().wait()
        finally:
            consumer.stop(graceful=False)


if __name__ == "__main__":
    main(Huey)
