"""Runs asyncio code from a plain function: connect, work, close."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from chasqui.errors import ChasquiError
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.transport.connection import Connection

logger = logging.getLogger(__name__)

T = TypeVar("T")


def on_queue(name: str, redis_url: str | None, work: Callable[[Queue], Awaitable[T]]) -> T:
    """The result of `work` with an open queue."""

    async def run() -> T:
        async with Queue(name, redis_url=redis_url) as queue:
            return await work(queue)

    return asyncio.run(run())


@contextmanager
def deleted_after(name: str, redis_url: str | None) -> Iterator[None]:
    """Delete a queue after its use, also if that fails."""
    try:
        yield
    except BaseException:
        try:
            _delete(name, redis_url)
        except ChasquiError as error:  # only logged: the first error is raised
            fields = {"queue": name}
            logger.error("queue %s could not be deleted: %s", name, error, extra=fields)
        raise
    _delete(name, redis_url)


def _delete(name: str, redis_url: str | None) -> None:
    on_queue(name, redis_url, lambda queue: queue.obliterate(force=True))


def on_server(
    redis_url: str | None,
    work: Callable[[Connection], Awaitable[T]],
    *,
    queue: str = "chasqui",
    is_reader: bool = False,
) -> T:
    """The result of `work` with an open connection to the server that has the queue."""

    async def run() -> T:
        async with connection_to(redis_url, queue=queue, is_reader=is_reader) as connection:
            return await work(connection)

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
    """Work until it is done, or until SIGINT or SIGTERM, which is the normal way to end it.

    The signal cancels the work, or calls `on_signal`, which makes the work end.
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
