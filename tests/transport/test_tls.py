"""TLS: a good certificate is accepted, and every kind of bad one is refused by default."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import UnreachableError
from chasqui.model.config import Endpoint
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.link import Link
from chasqui.transport.request import Effect, commands
from tests import tls
from tests.servers import KINDS, Server

BAD = ["unknown authority", "wrong name", "expired"]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    """Each kind of server on this machine in turn."""
    return shared_server(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Path:
    return tls.make_authority(folder, "good")


def bad_certificate(folder: Path, authority: Path, fault: str) -> Path:
    if fault == "unknown authority":
        authority = tls.make_authority(folder, "unknown")
    name = "elsewhere.example" if fault == "wrong name" else "127.0.0.1"
    return tls.make_certificate(folder, authority, name, is_expired=fault == "expired")


def url(relay: tls.TlsRelay, authority: Path) -> str:
    return f"rediss://127.0.0.1:{relay.port}?ssl_ca_certs={authority}"


@pytest.mark.both_loops
async def test_a_good_certificate_is_accepted(
    redis_86: Server, connect: Callable[..., Connection], folder: Path, authority: Path
) -> None:
    good = tls.make_certificate(folder, authority, "127.0.0.1")
    with tls.TlsRelay(redis_86.port, good) as relay:
        connection = connect(url(relay, authority))
        body = "x" * 300_000
        assert len(await connection.execute("ECHO", body, effect=Effect.READ)) == len(body)
        await connection.close()


@pytest.mark.both_loops
@pytest.mark.parametrize("size", [300_000, 600_000, 1_000_000])
async def test_what_came_before_the_end_of_a_link_is_read(
    folder: Path, authority: Path, size: int
) -> None:
    """A server that answers and goes, while its client has no time to look."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.make_certificate(folder, authority, "127.0.0.1"))
    is_over = threading.Event()

    def answer() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as peer:
            peer.recv(100)
            peer.sendall(b"$%d\r\n%b\r\n" % (size, b"x" * size))
        is_over.set()

    loop, link = asyncio.get_running_loop(), Link(Endpoint.parse("redis://127.0.0.1"))
    trusting = ssl.create_default_context(cafile=str(authority))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        answered = pool.submit(answer)
        host, port = listener.getsockname()
        await loop.create_connection(lambda: link, host, port, ssl=trusting)
        request = commands(("ECHO", "x"), effect=Effect.READ)
        request.outcome = loop.create_future()
        link.send([request])
        await asyncio.sleep(0)
        assert is_over.wait(20)  # it is all in the buffers in between
        assert len(await request.outcome) == size
        link.abort()
        await link.lost
        answered.result()


@pytest.mark.fault(38)
@pytest.mark.both_loops
@pytest.mark.parametrize("fault", BAD)
async def test_a_bad_certificate_is_refused(
    server: Server, connect: Callable[..., Connection], folder: Path, authority: Path, fault: str
) -> None:
    bad = bad_certificate(folder, authority, fault)
    with (
        tls.TlsRelay(server.port, bad) as relay,
        pytest.raises(UnreachableError, match="certificate"),
    ):
        await connect(url(relay, authority)).execute("PING", effect=Effect.READ)


def test_a_good_certificate_is_accepted_by_the_blocking_connection(
    redis_86: Server,
    connect_blocking: Callable[..., BlockingConnection],
    folder: Path,
    authority: Path,
) -> None:
    def plan() -> object:
        bodies = (f"{i}".ljust(50_000) for i in range(200))
        return (yield (commands(("ECHO", body), effect=Effect.READ) for body in bodies))

    good = tls.make_certificate(folder, authority, "127.0.0.1")
    with tls.TlsRelay(redis_86.port, good) as relay:
        connection = connect_blocking(url(relay, authority))
        assert connection.execute("ECHO", "x", effect=Effect.READ) == b"x"
        replies = connection.run(plan())
        assert [reply.strip() for reply in replies] == [b"%d" % i for i in range(200)]
        connection.close()


@pytest.mark.fault(38)
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_certificate_is_refused_by_the_blocking_connection(
    server: Server,
    connect_blocking: Callable[..., BlockingConnection],
    folder: Path,
    authority: Path,
    fault: str,
) -> None:
    bad = bad_certificate(folder, authority, fault)
    with (
        tls.TlsRelay(server.port, bad) as relay,
        pytest.raises(UnreachableError, match="certificate"),
    ):
        connect_blocking(url(relay, authority)).execute("PING", effect=Effect.READ)


async def _for_ever(connection: Connection, **options: Any) -> None:
    while True:
        await connection.execute("ECHO", "x", effect=Effect.READ, **options)


@pytest.mark.fault(38)
@pytest.mark.slow
async def test_a_renewed_certificate_is_accepted_on_the_next_link(
    server: Server, connect: Callable[..., Connection], folder: Path, authority: Path
) -> None:
    """Good, then expired, then renewed; the client is not told."""
    good = tls.make_certificate(folder, authority, "127.0.0.1")
    with tls.TlsRelay(server.port, good) as relay:
        connection = connect(url(relay, authority))
        assert await connection.execute("ECHO", "x", effect=Effect.READ) == b"x"
        relay.use(bad_certificate(folder, authority, "expired"))
        with pytest.raises(UnreachableError):
            await _for_ever(connection, timeout_s=1)  # the old link may live for a moment
        relay.use(tls.make_certificate(folder, authority, "127.0.0.1"))
        assert await connection.execute("ECHO", "x", effect=Effect.READ) == b"x"
        await connection.close()


@pytest.mark.fault(38, control=True)
@pytest.mark.parametrize("fault", BAD)
async def test_whoever_asks_for_no_check_gets_none(
    server: Server, folder: Path, authority: Path, fault: str
) -> None:
    careless = ssl.create_default_context()
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    with tls.TlsRelay(server.port, bad_certificate(folder, authority, fault)) as relay:
        endpoint = Endpoint.parse(f"rediss://127.0.0.1:{relay.port}", tls_context=careless)
        connection = Connection(endpoint, key=b"k")
        assert await connection.execute("ECHO", "x", effect=Effect.READ) == b"x"
        await connection.close()


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=false", "verify=0"])
def test_a_url_cannot_turn_the_check_off(option: str) -> None:
    with pytest.raises(ValueError, match="option"):
        Endpoint.parse(f"rediss://127.0.0.1:6379?{option}")


def test_old_versions_of_tls_are_refused() -> None:
    context = Endpoint.parse("rediss://127.0.0.1").tls
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
