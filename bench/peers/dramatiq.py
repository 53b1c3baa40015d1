"""dramatiq with its Redis broker and 8 threads, its default."""

import asyncio
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers.harness import Data, Handle, Peer, main


class Dramatiq(Peer):
    packages = ("dramatiq", "redis")
    is_threaded = True

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        self._broker = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        self._handle: Handle = lambda data: None

        @dramatiq.actor(actor_name="welcome", max_retries=3, min_backoff=1, max_backoff=1)
        def welcome(data: Data) -> None:
            self._handle(data)

        self._actor = welcome

    async def add(self, data: Data) -> None:
        self._actor.send(data)

    async def add_at(self, data: Data, due_s: float) -> None:
        delay_ms = max(0, round((due_s - time.time()) * 1000))
        self._actor.send_with_options(args=(data,), delay=delay_ms)

    async def work(self, handle: Handle) -> None:
        self._handle = handle
        worker = dramatiq.Worker(self._broker, worker_threads=8)
        worker.start()
        try:
            await asyncio.Event().wait()
        finally:
            worker.stop(timeout=2000)


if __name__ == "__main__":
    main(Dramatiq)
