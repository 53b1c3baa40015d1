"""Promotes delayed jobs and retries of the queues that a query consumes, as a worker would."""

import asyncio
import contextlib
import threading

from chasqui.model.keys import Keys
from chasqui.spark.options import Options
from chasqui.timed.promoter import PromoterConfig, PromoterLoop
from chasqui.transport.connection import Connection


class Promoting:
    """The promoters of a query's queues, in a thread with an event loop of its own.

    Each competes for its queue's leader lock with the workers and other queries.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"chasqui-promoter-{options.consumer}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End them, and free their leader locks."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread failed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._promote_all())

    async def _promote_all(self) -> None:
        await asyncio.gather(*map(self._promote, self._options.queue))

    async def _promote(self, queue: str) -> None:
        keys, endpoint = Keys(queue), self._options.endpoint()
        connection, bell = (
            Connection(endpoint, key=keys.delayed, client_name="chasqui-spark") for _ in range(2)
        )
        config = PromoterConfig(has_events=self._options.write_events)
        try:
            await PromoterLoop(keys, connection, bell, config).run(self._stop)
        finally:
            await connection.close()
