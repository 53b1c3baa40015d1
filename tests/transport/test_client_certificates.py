"""TLS where the server asks who we are: certificates of clients, by files that the URL names."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import UnreachableError
from chasqui.model.config import Endpoint
from chasqui.transport.request import Effect
from tests import tls
from tests.faults.fake import FakeServer
from tests.fixtures import Connect
from tests.transport.test_blocking_threads import Connect as ConnectBlocking

pytestmark = [pytest.mark.both_loops, pytest.mark.fault(38)]

Call = Callable[[str], Awaitable[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Path:
    return tls.make_authority(folder, "good")


@pytest.fixture(scope="module")
def certificate(folder: Path, authority: Path) -> Path:
    return tls.make_certificate(folder, authority, "client.example", usage="clientAuth")


class Door(FakeServer):
    """A server behind TLS, in threads: asyncio's own sends no alert before it hangs up."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(link):
            encrypted = self._context.wrap_socket(
                link, server_side=True, do_handshake_on_connect=False
            )
            self._links.add(encrypted)
            with encrypted:
                try:
                    encrypted.do_handshake()
                except ssl.SSLError:
                    # Else what the client has sent by now would take the alert from it.
                    socket.socket.shutdown(encrypted, socket.SHUT_WR)
                    while socket.socket.recv(encrypted, 1 << 16):
                        pass
                    return
                super()._serve(encrypted)


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda v: v.name)
def url(request: pytest.FixtureRequest, folder: Path, authority: Path) -> Iterator[str]:
    """Of a server that takes only clients of the authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.load_cert_chain(tls.make_certificate(folder, authority, "127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = request.param
    with Door(context) as door:
        yield f"{door.url.replace('redis', 'rediss')}?ssl_ca_certs={authority}"


@pytest.fixture(params=["asyncio", "blocking"])
def call(
    request: pytest.FixtureRequest, connect: Connect, connect_blocking: ConnectBlocking
) -> Call:
    async def call(url: str) -> Any:
        if request.param == "asyncio":
            connection = connect(url)
            try:
                return await connection.execute("ECHO", "x", effect=Effect.READ)
            finally:
                await connection.close()
        blocking = connect_blocking(url)
        try:
            return await asyncio.to_thread(blocking.execute, "ECHO", "x", effect=Effect.READ)
        finally:
            blocking.close()

    return call


async def test_a_client_with_a_certificate_gets_in(url: str, call: Call, certificate: Path) -> None:
    assert await call(f"{url}&ssl_certfile={certificate}") == b"x"


@pytest.fixture
def apart(certificate: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The certificate, and its key in another file."""
    key, mark, rest = certificate.read_text().partition("-----BEGIN CERTIFICATE-----")
    (tmp_path / "key.pem").write_text(key)
    (tmp_path / "certificate.pem").write_text(mark + rest)
    return tmp_path / "certificate.pem", tmp_path / "key.pem"


async def test_the_key_may_be_in_a_file_of_its_own(
    url: str, call: Call, apart: tuple[Path, Path]
) -> None:
    certificate, key = apart
    assert await call(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}") == b"x"


async def test_one_without_is_told_why_it_does_not(url: str, call: Call) -> None:
    with pytest.raises(UnreachableError, match="ALERT"):
        await call(url)


async def test_nor_does_one_of_another_authority(url: str, call: Call, folder: Path) -> None:
    other = tls.make_authority(folder, "unknown")
    stranger = tls.make_certificate(folder, other, "client.example", usage="clientAuth")
    with pytest.raises(UnreachableError, match="UNKNOWN_CA"):
        await call(f"{url}&ssl_certfile={stranger}")


async def test_nor_does_the_certificate_of_a_server(
    url: str, call: Call, folder: Path, authority: Path
) -> None:
    wrong = tls.make_certificate(folder, authority, "client.example")
    with pytest.raises(UnreachableError, match="CERTIFICATE"):
        await call(f"{url}&ssl_certfile={wrong}")


# ── Files that are no use ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, option: str, content: str | None
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"{option} in redis_url cannot be used"):
        Endpoint.parse(f"rediss://127.0.0.1?{option}={file}")


def test_a_key_needs_its_certificate(certificate: Path) -> None:
    with pytest.raises(ValueError, match="ssl_keyfile without ssl_certfile"):
        Endpoint.parse(f"rediss://127.0.0.1?ssl_keyfile={certificate}")


def test_a_key_of_another_certificate(folder: Path, authority: Path, certificate: Path) -> None:
    other = tls.make_certificate(folder, authority, "client.example", usage="clientAuth")
    with pytest.raises(
        ValueError, match="ssl_certfile and ssl_keyfile in redis_url cannot be used"
    ):
        Endpoint.parse(f"rediss://127.0.0.1?ssl_certfile={certificate}&ssl_keyfile={other}")


def test_nobody_is_asked_for_the_password_of_a_key(apart: tuple[Path, Path]) -> None:
    certificate, key = apart
    locked = key.with_name("locked.pem")
    locking = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(locking, check=True, capture_output=True, timeout=20)
    with pytest.raises(ValueError, match="must not be encrypted"):
        Endpoint.parse(f"rediss://127.0.0.1?ssl_certfile={certificate}&ssl_keyfile={locked}")
