"""Celery with one process and no results kept: for a job that does nothing its `solo` pool is
faster than its pool of processes."""

from datetime import UTC, datetime
from typing import Any

from celery import Celery

from bench.peers.harness import Data, Handle, Peer, main


class CeleryPeer(Peer):
    packages = ("celery", "kombu", "redis")
    blocks = True

    def __init__(self, url: str, events: bool, retries: bool) -> None:
        super().__init__(url, events, retries)
        self._app = Celery("bench", broker=url)
        self._app.conf.update(
            task_ignore_result=True,
            worker_prefetch_multiplier=128,
            worker_hijack_root_logger=False,
            worker_redirect_stdouts=False,
            broker_connection_retry_on_startup=True,
        )
        self._handle: Handle = lambda data: None

        @self._app.task(name="welcome", bind=True, max_retries=3)
        def welcome(task: Any, data: Data) -> None:
            try:
                self._handle(data)
            except RuntimeError as error:
                raise task.retry(exc=error, countdown=0) from None

        self._task = welcome

    async def add(self, data: Data) -> None:
        self._task.delay(data)

    async def add_at(self, data: Data, due_s: float) -> None:
        self._task.apply_async((data,), eta=datetime.fromtimestamp(due_s, UTC))

    async def work(self, handle: Handle) -> None:
        self._handle = handle
        self._app.Worker(
            pool="solo", concurrency=1, loglevel="CRITICAL", without_gossip=True,
            without_mingle=True,
        ).start()  # fmt: skip


if __name__ == "__main__":
    main(CeleryPeer)
