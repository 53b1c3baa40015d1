"""A host of several addresses: whichever answers first is used."""

import asyncio
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import UnreachableError
from chasqui.transport.request import Effect
from tests import tls
from tests.fixtures import Connect
from tests.servers import Server
from tests.transport.test_blocking_threads import Connect as ConnectBlocking

pytestmark = pytest.mark.both_loops

HOST = "redis.test"
#: A port where nobody listens, at any address of this machine.
CLOSED = 1

Resolve = Callable[..., None]
Call = Callable[[str], Any]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Says what the addresses of the host are."""
    real, known = socket.getaddrinfo, list[tuple[str, int]]()

    def look_up(host: str, *rest: Any, **options: Any) -> Any:
        if host != HOST:
            return real(host, *rest, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return lambda *addresses: known.extend(addresses)


@pytest.fixture
def hole() -> Iterator[tuple[str, int]]:
    """An address that swallows whatever it is sent: its queue of links is full."""
    opened = [socket.create_server(("127.0.0.2", 0), backlog=0)]
    address = opened[0].getsockname()
    try:
        while True:
            opened.append(socket.socket())
            opened[-1].setblocking(False)
            opened[-1].connect_ex(address)
            poller = select.poll()
            poller.register(opened[-1], select.POLLOUT)
            if not poller.poll(100):
                break
        yield address
    finally:
        for one in opened:
            one.close()


@pytest.fixture(params=["asyncio", "blocking"])
def call(
    request: pytest.FixtureRequest, connect: Connect, connect_blocking: ConnectBlocking
) -> Call:
    """Sends a command over a connection of its own; the reply."""

    async def call(url: str) -> Any:
        if request.param == "asyncio":
            return await connect(url).execute("ECHO", "x", effect=Effect.READ)
        connection = connect_blocking(url)
        return await asyncio.to_thread(connection.execute, "ECHO", "x", effect=Effect.READ)

    return call


async def test_an_address_that_swallows_everything_holds_up_nobody(
    server: Server, call: Call, resolve: Resolve, hole: tuple[str, int]
) -> None:
    resolve(hole, hole, ("127.0.0.1", server.port))
    assert await call(f"redis://{HOST}:{server.port}") == b"x"


async def test_nor_does_one_that_refuses(server: Server, call: Call, resolve: Resolve) -> None:
    # Neither is it waited for: the twenty head starts would be longer than a dial may take.
    resolve(*[("127.0.0.3", CLOSED)] * 20, ("127.0.0.1", server.port))
    assert await call(f"redis://{HOST}:{server.port}") == b"x"


async def test_the_name_in_a_certificate_is_the_hosts(
    redis_86: Server, call: Call, resolve: Resolve, hole: tuple[str, int], tmp_path: Path
) -> None:
    authority = tls.make_authority(tmp_path, "authority")
    good, bad = (tls.make_certificate(tmp_path, authority, name) for name in (HOST, "127.0.0.1"))
    with tls.TlsRelay(redis_86.port, good) as relay:
        resolve(hole, ("127.0.0.1", relay.port))
        url = f"rediss://{HOST}:{relay.port}?ssl_ca_certs={authority}"
        assert await call(url) == b"x"
        relay.use(bad)
        with pytest.raises(UnreachableError, match="certificate"):
            await call(url)


async def test_what_the_last_one_said_is_told(call: Call, resolve: Resolve) -> None:
    resolve(("127.0.0.2", CLOSED), ("127.0.0.1", CLOSED))
    with pytest.raises(UnreachableError, match=f"{HOST}.*{os.strerror(errno.ECONNREFUSED)}"):
        await call(f"redis://{HOST}:{CLOSED}")


async def test_all_that_swallow_take_no_longer_than_a_dial_may(
    call: Call, resolve: Resolve, hole: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("link", "blocking_dialler"):
        monkeypatch.setattr(f"chasqui.transport.{module}.CONNECT_TIMEOUT_S", 0.5)
    resolve(*[hole] * 20)
    with pytest.raises(UnreachableError, match=HOST):
        await call(f"redis://{HOST}:{CLOSED}")
