"""taskiq with the Redis Streams broker of taskiq-redis."""

from typing import Any

from taskiq.cli.worker.args import WorkerArgs
from taskiq.cli.worker.run import start_listen
from taskiq_redis import RedisStreamBroker

from tests.chaos.programs.common import Told, mark
from tests.chaos.programs.peer import SLOTS, Peer, main


class Taskiq(Peer):
    def __init__(self, told: Told) -> None:
        super().__init__(told)
        safe: dict[str, Any] = {
            "consumer_id": "0",
            "idle_timeout": told.lease_ms,
            "unacknowledged_lock_timeout": told.lease_ms / 1000,
        }
        self._broker = RedisStreamBroker(told.url, **({} if told.is_default else safe))

        @self._broker.task(task_name="work")
        async def work(n: int, text: str) -> None:
            await self.runs.work(n)

        self._task = work

    async def open(self) -> None:
        await self._broker.startup()

    async def add(self, n: int) -> None:
        await self._task.kiq(n, mark(n))

    def run(self) -> None:
        # What `taskiq worker` runs in each of its processes.
        start_listen(WorkerArgs(broker=self._broker, modules=[], max_async_tasks=SLOTS))


if __name__ == "__main__":
    main(Taskiq)
