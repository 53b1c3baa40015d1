"""taskiq with the Redis Streams broker of taskiq-redis. Delayed jobs need a scheduler process."""

from taskiq import SimpleRetryMiddleware
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from bench.peers.harness import SLOTS, Data, Handle, Peer, Unsupported, main


class Taskiq(Peer):
    packages = ("taskiq", "taskiq-redis", "redis", "uvloop")

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        self._broker = RedisStreamBroker(url, consumer_id="0")
        labels = {}
        if retries:
            self._broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))
            labels["retry_on_error"] = True
        self._handle: Handle = lambda data: None

        @self._broker.task(task_name="welcome", **labels)
        async def welcome(data: Data) -> None:
            self._handle(data)

        self._task = welcome

    async def open(self) -> None:
        await self._broker.startup()

    async def close(self) -> None:
        await self._broker.shutdown()

    async def add(self, data: Data) -> None:
        await self._task.kiq(data)

    async def add_at(self, data: Data, due_s: float) -> None:
        raise Unsupported("delayed jobs need a scheduler process")

    async def work(self, handle: Handle) -> None:
        self._handle = handle
        self._broker.is_worker_process = True
        await run_receiver_task(self._broker, max_async_tasks=SLOTS, run_startup=True)


if __name__ == "__main__":
    main(Taskiq)
