"""streaQ, on Redis Streams as we are. It retries what a task raises as StreaqRetry."""

from datetime import UTC, datetime

from streaq import StreaqRetry, Worker

from bench.peers.harness import SLOTS, Data, Handle, Peer, main


class Streaq(Peer):
    packages = ("streaq", "coredis", "uvloop")

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        self._worker = Worker(redis_url=url, concurrency=SLOTS, handle_signals=False)
        self._handle: Handle = lambda data: None

        @self._worker.task
        async def welcome(data: Data) -> None:
            try:
                self._handle(data)
            except RuntimeError:
                raise StreaqRetry("again", delay=0) from None

        self._task = welcome

    async def open(self) -> None:
        await self._worker.__aenter__()

    async def close(self) -> None:
        await self._worker.__aexit__(None, None, None)

    async def add(self, data: Data) -> None:
        await self._task.enqueue(data)

    async def add_bulk(self, every: list[Data]) -> None:
        await self._worker.enqueue_many([self._task.enqueue(data) for data in every])

    async def add_at(self, data: Data, due_s: float) -> None:
        await self._task.enqueue(data).start(schedule=datetime.fromtimestamp(due_s, UTC))

    async def add_bulk_at(self, every: list[Data], due_s: float) -> None:
        due = datetime.fromtimestamp(due_s, UTC)
        await self._worker.enqueue_many(
            [self._task.enqueue(data).start(schedule=due) for data in every]
        )

    async def work(self, handle: Handle) -> None:
        self._handle = handle
        await self._worker.run_async()


if __name__ == "__main__":
    main(Streaq)
