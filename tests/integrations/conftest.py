"""Workers of an app, for the libraries that look at their runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from chasqui import App
from tests.servers import Server

MakeApp = Callable[..., App[Any]]
Working = Callable[[App[Any]], AbstractAsyncContextManager[None]]


@pytest.fixture
async def make_app(valkey_9: Server, queue_name: str) -> AsyncIterator[MakeApp]:
    """Makes apps whose queue is the test's own."""
    made: list[App[Any]] = []

    def make(**options: Any) -> App[Any]:
        made.append(App(queue_name, redis_url=valkey_9.url, **options))
        return made[-1]

    yield make
    for app in made:
        await app.close()
        app.close_sync()


@pytest.fixture
def working() -> Working:
    """Runs the workers of an app within a block."""

    @asynccontextmanager
    async def run(app: App[Any]) -> AsyncIterator[None]:
        group = app.worker_group()
        running = asyncio.ensure_future(group.run())
        try:
            yield
        finally:
            await group.close()
            await running

    return run
