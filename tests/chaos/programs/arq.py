"""arq. What a lost worker left runs again when the job's timeout and ten seconds more are over."""

from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from tests.chaos.programs.common import mark
from tests.chaos.programs.peer import DRAIN_S, SLOTS, TRIES, NotAddedError, Peer, main

#: Longer than any worker is stopped here: it gives up a job that takes longer, for good.
TIMEOUT_S = 10
SAFE: dict[str, Any] = {
    "job_timeout": TIMEOUT_S,
    "max_tries": TRIES,
    "job_completion_wait": DRAIN_S,
}


class Arq(Peer):
    async def open(self) -> None:
        self._pool = await create_pool(RedisSettings.from_dsn(self.told.url))

    async def add(self, n: int) -> None:
        # It also answers None when its link broke between WATCH and EXEC.
        if await self._pool.enqueue_job("work", n, mark(n)) is None:
            raise NotAddedError

    def run(self) -> None:
        async def work(context: Any, n: int, text: str) -> None:
            await self.runs.work(n)

        worker = Worker(
            functions=[func(work, name="work")],
            redis_settings=RedisSettings.from_dsn(self.told.url),
            max_jobs=SLOTS,
            poll_delay=0.05,
            **({} if self.told.is_default else SAFE),
        )
        worker.run()


if __name__ == "__main__":
    main(Arq)
