"""taskiq with the Redis Streams broker of taskiq-redis."""

from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

from tests.chaos.programs.common import Told, mark
from tests.chaos.programs.peer import SLOTS, Peer, main, stop_on_sigterm


class Taskiq(Peer):
    def __init__(self, told: Told) -> None:
        super().__init__(told)
        self._broker = RedisStreamBroker(
            told.url,
            consumer_id="0",
            idle_timeout=told.lease_ms,
            unacknowledged_lock_timeout=told.lease_ms / 1000,
        )

        @self._broker.task(task_name="work")
        async def work(n: int, text: str) -> None:
            await self.runs.work(n)

        self._task = work

    async def open(self) -> None:
        await self._broker.startup()

    async def add(self, n: int) -> None:
        await self._task.kiq(n, mark(n))

    async def work(self) -> None:
        self._broker.is_worker_process = True
        receiver = Receiver(self._broker, max_async_tasks=SLOTS, run_startup=True)
        await receiver.listen(stop_on_sigterm())
        await self._broker.shutdown()


if __name__ == "__main__":
    main(Taskiq)
