"""From a plain function to the asyncio side and back: open, do, close."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chasqui.config import Endpoint
from chasqui.connection import Connection
from chasqui.keys import Keys
from chasqui.queue import Queue

T = TypeVar("T")


def on_queue(name: str, redis_url: str | None, deed: Callable[[Queue], Awaitable[T]]) -> T:
    """What `deed` makes of an open queue."""

    async def run() -> T:
        async with Queue(name, redis_url=redis_url) as queue:
            return await deed(queue)

    return asyncio.run(run())


def on_server(
    redis_url: str | None,
    deed: Callable[[Connection], Awaitable[T]],
    *,
    queue: str = "chasqui",
    is_reader: bool = False,
) -> T:
    """What `deed` makes of an open connection to the server that has the queue."""

    async def run() -> T:
        connection = Connection(
            Endpoint.parse(redis_url),
            key=Keys(queue).stream,
            client_name="chasqui-cli",
            is_reader=is_reader,
        )
        try:
            return await deed(connection)
        finally:
            await connection.close()

    return asyncio.run(run())
