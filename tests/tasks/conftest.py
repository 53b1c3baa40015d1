"""Apps on a server, and their workers while a test needs them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chasqui import App, DeadJob
from chasqui.worker_group import WorkerGroup
from tests.servers import Server

#: How long a fact may take on a busy machine before the test says that it never came.
WAIT_S = 40.0
MakeApp = Callable[..., App[Any]]


@pytest.fixture
def make_app(valkey_9: Server, queue_name: str) -> Iterator[MakeApp]:
    """Makes apps of the test's queue, and closes what they opened without an event loop."""
    made: list[App[Any]] = []

    def make(queue: str = queue_name, **options: Any) -> App[Any]:
        made.append(App(queue, **{"redis_url": valkey_9.url, **options}))
        return made[-1]

    yield make
    for app in made:
        app.close_sync()


@pytest.fixture
async def app(make_app: MakeApp) -> AsyncIterator[App[None]]:
    """An app without a context."""
    async with make_app() as app:
        yield app


@asynccontextmanager
async def serving(
    app: App[Any], queues: list[str] | None = None, **options: Any
) -> AsyncIterator[WorkerGroup]:
    """The app's workers inside of the block; they drain at its end."""
    options = {"read_block_ms": 50, "shutdown_deadline_s": 20, **options}
    group = app.worker_group(queues, **options)
    running = asyncio.ensure_future(group.run())
    try:
        yield group
    finally:
        await group.close()
        async with asyncio.timeout(WAIT_S):
            await running


async def dead(app: App[Any], count: int = 1, queue: str | None = None) -> list[DeadJob]:
    """The dead jobs, once there are so many; oldest first."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = [job async for job in app.queue(queue).iter_dlq()]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


async def settled(app: App[Any], queue: str | None = None) -> None:
    """Return when no job waits, runs or is delayed."""
    async with asyncio.timeout(WAIT_S):
        while True:
            counts = await app.queue(queue).counts()
            if counts.waiting + counts.pending + counts.delayed == 0:
                return
            await asyncio.sleep(0.01)
