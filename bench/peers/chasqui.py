"""chasqui, as its documentation says to use it."""

from datetime import UTC, datetime

from bench.peers.chasqui_api import ChasquiApi
from bench.peers.harness import Data, main
from chasqui import Queue, Worker


class Chasqui(ChasquiApi):
    packages = ("chasqui", "uvloop")
    queue_type = Queue
    worker_type = Worker

    async def add_bulk_at(self, every: list[Data], due_s: float) -> None:
        due = datetime.fromtimestamp(due_s, UTC)
        await self._queue.add_bulk(
            [{"name": "welcome", "data": data, "delay_ms": due} for data in every]
        )


if __name__ == "__main__":
    main(Chasqui)
