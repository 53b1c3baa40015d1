"""How these tests run a duty, and wait for what it does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from chasqui.duty import Duty

#: How long a test waits for a fact before it fails.
WAIT_S = 20.0
#: The pause between two looks at a fact that nobody announces.
LOOK_S = 0.01

Redis = Callable[..., Awaitable[Any]]


@contextlib.asynccontextmanager
async def running(duty: Duty) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a duty; it is stopped at the end, and must end by itself then."""
    stop = asyncio.Event()
    task = asyncio.create_task(duty.run(stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(WAIT_S):
            await task


async def eventually(fact: Callable[[], Awaitable[Any]]) -> Any:
    """What a look finds as soon as it finds anything."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await fact()):  # noqa: ASYNC110  nobody sets an event
            await asyncio.sleep(LOOK_S)
    return found


async def entries(redis: Redis, key: bytes) -> list[dict[bytes, bytes]]:
    """The fields of every entry of a stream, in order."""
    reply = await redis("XRANGE", key, "-", "+")
    return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reply]


async def stream_of(redis: Redis, key: bytes, count: int) -> list[dict[bytes, bytes]]:
    """The entries of a stream as soon as there are that many."""

    async def enough() -> bool:
        return bool(await redis("XLEN", key) >= count)

    await eventually(enough)
    return await entries(redis, key)
