"""What tests of all rooms share: both event loops, connections that are closed, proxies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest

from chasqui.model.config import Endpoint
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request, commands
from tests.proxy import Proxy

Connect = Callable[..., Connection]
MakeProxy = Callable[[str], Proxy]


def _new_uvloop() -> asyncio.AbstractEventLoop:
    import uvloop  # here: the tests of the core run without it

    return uvloop.new_event_loop()


LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": _new_uvloop,
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "both_loops(on=None): runs on asyncio's event loop and on uvloop; "
        "with `on`, on uvloop only with that server and no blocking queue",
    )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("both_loops"):
        return LOOPS
    return {"asyncio": LOOPS["asyncio"]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    spared = [item for item in items if _is_spared(item)]
    if spared:
        config.hook.pytest_deselected(items=spared)
        items[:] = [item for item in items if not _is_spared(item)]


def _is_spared(item: pytest.Item) -> bool:
    """Whether this is a run on uvloop that its mark leaves out."""
    mark = item.get_closest_marker("both_loops")
    run = item.callspec.id if hasattr(item, "callspec") else ""
    if mark is None or "on" not in mark.kwargs or "uvloop" not in run:
        return False
    return mark.kwargs["on"] not in run or "-sync" in run


@pytest.fixture
def make_proxy() -> Iterator[Callable[[str], Proxy]]:
    """Starts proxies in front of servers."""
    proxies: list[Proxy] = []

    def make(url: str) -> Proxy:
        proxies.append(Proxy(url))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture
async def connect(queue_name: str) -> AsyncIterator[Callable[..., Connection]]:
    """Makes connections to a URL, and closes them after the test."""
    made: list[Connection] = []

    def make(url: str, **options: Any) -> Connection:
        options.setdefault("key", b"{chasqui:%b}" % queue_name.encode())
        made.append(Connection(Endpoint.parse(url), **options))
        return made[-1]

    yield make
    for connection in made:
        await connection.close()


@pytest.fixture
def connect_blocking(queue_name: str) -> Iterator[Callable[..., BlockingConnection]]:
    """Makes blocking connections to a URL, and closes them after the test."""
    made: list[BlockingConnection] = []

    def make(url: str, **options: Any) -> BlockingConnection:
        options.setdefault("key", b"{chasqui:%b}" % queue_name.encode())
        made.append(BlockingConnection(Endpoint.parse(url), **options))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


def echo(tag: object) -> Request:
    return commands(("ECHO", str(tag)), effect=Effect.READ)


def incr(key: str, effect: Effect, **options: Any) -> Request:
    return commands(("INCR", key), effect=effect, **options)


async def until(fact: Callable[[], bool]) -> None:
    """Let the loop turn until something is true."""
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110 - what is watched has no event of its own
            await asyncio.sleep(0)
