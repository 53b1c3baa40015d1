"""A drain does not end while a job is on its way from one place to another."""

import asyncio
from typing import Any

from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.testing.clock import QueueClock
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.servers import Server


class Retrying:
    """A connection on which a job is retried at the worst moment: when it was not found among the
    delayed ones, and before the stream is counted."""

    def __init__(self, connection: Connection, queue: Queue) -> None:
        self._connection = connection
        self._queue = queue
        self._delayed: asyncio.Future[Any] | None = None

    def submit(self, request: Any) -> Any:
        self._delayed = asyncio.ensure_future(self._connection.submit(request))
        return self._delayed

    async def run(self, plan: Any) -> Any:
        await asyncio.sleep(0)  # what is asked beside it is asked now
        if self._delayed is not None:
            await self._delayed
        stream = Keys(self._queue.name).stream
        ((entry_id, *_),) = await self._connection.execute(
            "XRANGE", stream, "-", "+", effect=Effect.READ
        )
        await self._queue.add("later", None, delay_ms=60_000)
        await self._connection.execute("XDEL", stream, entry_id, effect=Effect.ONCE)
        return await self._connection.run(plan)


async def test_a_job_that_is_retried_meanwhile_is_not_overlooked(
    valkey_9: Server, queue_name: str
) -> None:
    keys = Keys(queue_name)
    connection = Connection(Endpoint.parse(valkey_9.url), key=keys.stream)
    try:
        async with Queue(queue_name, redis_url=valkey_9.url) as queue:
            await queue.add("now", None)
            retrying: Any = Retrying(connection, queue)
            clock = QueueClock(connection, keys)
            clock._connection = retrying
            look = await clock.look()
        assert look.is_busy or look.next_due_ms is not None
    finally:
        await connection.close()
