"""From a plain function to the asyncio side and back: open, do, close."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from chasqui.model.config import Endpoint
from chasqui.transport.connection import Connection
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.queue import Queue

logger = logging.getLogger(__name__)

T = TypeVar("T")


def on_queue(name: str, redis_url: str | None, deed: Callable[[Queue], Awaitable[T]]) -> T:
    """What `deed` makes of an open queue."""

    async def run() -> T:
        async with Queue(name, redis_url=redis_url) as queue:
            return await deed(queue)

    return asyncio.run(run())


@contextmanager
def deleted_after(name: str, redis_url: str | None) -> Iterator[None]:
    """Around the use of a queue that is to leave nothing behind."""
    try:
        yield
    except BaseException:
        try:
            _delete(name, redis_url)
        except ChasquiError as error:  # what went wrong first is what is told
            fields = {"queue": name}
            logger.error("queue %s could not be deleted: %s", name, error, extra=fields)
        raise
    _delete(name, redis_url)


def _delete(name: str, redis_url: str | None) -> None:
    on_queue(name, redis_url, lambda queue: queue.obliterate(force=True))


def on_server(
    redis_url: str | None,
    deed: Callable[[Connection], Awaitable[T]],
    *,
    queue: str = "chasqui",
    is_reader: bool = False,
) -> T:
    """What `deed` makes of an open connection to the server that has the queue."""

    async def run() -> T:
        async with connection_to(redis_url, queue=queue, is_reader=is_reader) as connection:
            return await deed(connection)

    return asyncio.run(run())


@asynccontextmanager
async def connection_to(
    redis_url: str | None, *, queue: str = "chasqui", is_reader: bool = False
) -> AsyncIterator[Connection]:
    """A connection to the server that has the queue."""
    connection = Connection(
        Endpoint.parse(redis_url),
        key=Keys(queue).stream,
        client_name="chasqui-cli",
        is_reader=is_reader,
    )
    try:
        yield connection
    finally:
        await connection.close()


def until_signal(
    work: Callable[[], Coroutine[Any, Any, None]], on_signal: Callable[[], object] | None = None
) -> None:
    """Work until it is done, or until SIGINT or SIGTERM: that is no error, but the way to end it.

    The signal cancels the work, or calls `on_signal`, which lets it come to its end.
    """

    async def run() -> None:
        task = asyncio.ensure_future(work())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal or task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    asyncio.run(run())
