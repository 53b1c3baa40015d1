"""Both queues behind one face, and a plain client to see what they left in Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui import sync
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.servers import RemoteServer, Server


class Awaited:
    """A `sync.Queue` with the face of a `Queue`: each call runs in some thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.queue = sync.Queue(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.queue, name)
        if not callable(value):
            return value

        async def call(*arguments: Any, **options: Any) -> Any:
            return await asyncio.to_thread(value, *arguments, **options)

        return call

    async def iter_dlq(self, **options: Any) -> AsyncIterator[Any]:
        for job in self.queue.iter_dlq(**options):
            yield job


@pytest.fixture(params=[Queue, Awaited], ids=["async", "sync"])
async def queue_at(
    request: pytest.FixtureRequest, queue_name: str
) -> AsyncIterator[Callable[..., Any]]:
    """Makes queues of one kind at a URL, and closes them after the test."""
    made: list[Any] = []

    def make(url: str, name: str = queue_name, **options: Any) -> Any:
        made.append(request.param(name, redis_url=url, **options))
        return made[-1]

    yield make
    for queue in made:
        await queue.close()


@pytest.fixture
def make_queue(queue_at: Callable[..., Any], server: Server | RemoteServer) -> Callable[..., Any]:
    """The same on one server after the other."""

    def make(*arguments: Any, redis_url: str = server.url, **options: Any) -> Any:
        return queue_at(redis_url, *arguments, **options)

    return make


@pytest.fixture
def queue(make_queue: Callable[..., Any]) -> Any:
    """A queue of one kind on one server."""
    return make_queue()


@pytest.fixture
def redis(server: Server | RemoteServer) -> Iterator[redis_py.Redis]:
    """A client of another make, for what is really there."""
    with redis_py.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def keys(queue_name: str) -> Keys:
    """The test's keys."""
    return Keys(queue_name)


@pytest.fixture
def bury(redis: redis_py.Redis, keys: Keys) -> Callable[..., list[str]]:
    """Puts jobs into the dead-letter queue, as a worker would; their ids there."""

    def put(count: int, name: str = "mail", reason: str = "failed", first: int = 0) -> list[str]:
        pipeline = redis.pipeline(transaction=False)
        for number in range(first, first + count):
            envelope = msgpack.packb([f"job-{number}", msgpack.packb(number), 1, 3])
            pipeline.xadd(
                keys.dlq, {"d": envelope, "n": name, "source_id": "1-1", "reason": reason}
            )
        return [dlq_id.decode() for dlq_id in pipeline.execute()]

    return put


def now_ms() -> int:
    return time.time_ns() // 1_000_000
