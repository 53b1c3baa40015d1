"""Promoters and schedulers on each server, and a plain connection to see what they did."""

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.timed.promoter import PromoterConfig, PromoterLoop
from chasqui.timed.scheduler import SchedulerConfig, SchedulerLoop
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.servers import RemoteServer, Server
from tests.timed.facts import Redis


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(queue_name)


@pytest.fixture
def connect(connect: Callable[..., Connection]) -> Callable[..., Connection]:
    """Makes connections that say they are a worker's, for its loops."""
    return functools.partial(connect, client_name="chasqui-worker")


@pytest.fixture
def redis(server: Server | RemoteServer, connect: Callable[..., Connection]) -> Redis:
    """Runs plain commands: `await redis("GET", key)`."""
    connection = connect(server.url, client_name="test")

    async def run(*arguments: Any) -> Any:
        return await connection.execute(*arguments, effect=Effect.READ)

    return run


@pytest.fixture
async def queue(server: Server | RemoteServer, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, redis_url=server.url) as queue:
        yield queue


@pytest.fixture
def make_promoter(
    server: Server | RemoteServer, keys: Keys, connect: Callable[..., Connection]
) -> Callable[..., PromoterLoop]:
    """Makes promoters of the test's queue; settings, and `url` where it is not the server's."""

    def make(*, url: str | None = None, metrics: Any = None, **settings: Any) -> PromoterLoop:
        url = url or server.url
        config = PromoterConfig(**settings)
        return PromoterLoop(keys, connect(url), connect(url), config, metrics=metrics)

    return make


@pytest.fixture
def make_scheduler(
    server: Server | RemoteServer, keys: Keys, connect: Callable[..., Connection]
) -> Callable[..., SchedulerLoop]:
    """Makes schedulers of the test's queue; settings, and `url` where it is not the server's."""

    def make(*, url: str | None = None, metrics: Any = None, **settings: Any) -> SchedulerLoop:
        url = url or server.url
        config = SchedulerConfig(**settings)
        return SchedulerLoop(keys, connect(url), connect(url), config, metrics=metrics)

    return make
