"""TLS in front of a server that has none, and certificates good and bad, made by `openssl`."""

import asyncio
import contextlib
import ssl
import subprocess
import tempfile
import threading
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

_CONFIG = """
[ca]
default_ca = ca_default
[ca_default]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = policy
x509_extensions = extensions
[policy]
commonName = supplied
[extensions]
subjectAltName = {where}
extendedKeyUsage = {usage}
"""


def make_authority(folder: Path, name: str) -> Path:
    """A certificate authority; the path of its certificate. Its key lies beside."""
    certificate = folder / f"{name}.pem"
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", folder / f"{name}.key", "-out", certificate, "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"),
    )
    return certificate


def make_certificate(
    folder: Path, authority: Path, name: str, *, is_expired: bool = False, usage: str = "serverAuth"
) -> Path:
    """A certificate for a host name or address, with its key in the same file; with
    `usage="clientAuth"` that of a client."""
    where = f"IP:{name}" if name.replace(".", "").isdigit() else f"DNS:{name}"
    with tempfile.TemporaryDirectory(dir=folder) as made:
        work = Path(made)
        (work / "index").touch()
        (work / "config").write_text(_CONFIG.format(folder=work, where=where, usage=usage))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", work / "key", "-out", work / "request", "-subj", "/CN=server"),
        )
        # `ca`, because only it takes a date in the past in every version of openssl.
        end = "20200102000000Z" if is_expired else "20990101000000Z"
        _openssl(
            *("ca", "-batch", "-notext", "-config", work / "config", "-in", work / "request"),
            *("-out", work / "certificate", "-cert", authority),
            *("-keyfile", authority.with_suffix(".key"), "-startdate", "20200101000000Z"),
            *("-enddate", end),
        )
        both = folder / f"{uuid.uuid4().hex}.pem"
        both.write_bytes((work / "key").read_bytes() + (work / "certificate").read_bytes())
    return both


class TlsRelay:
    """Takes TLS off and forwards to a server's port. Runs in a thread of its own."""

    def __init__(self, upstream_port: int, certificate: Path) -> None:
        self._upstream_port = upstream_port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._stop: asyncio.Event
        self._relays: set[asyncio.Task[None]] = set()
        self.port = 0
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))
        self._thread.start()
        assert self._is_up.wait(10)

    def use(self, certificate: Path) -> None:
        """Show another certificate from now on; the links that are there are cut."""
        self._context.load_cert_chain(certificate)
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for task in self._relays:
            task.cancel()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        # Refused handshakes are what the tests are about: no log lines for them.
        self._loop.set_exception_handler(lambda loop, context: None)
        relays = self._relays

        def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._relay(reader, writer))
            relays.add(task)
            task.add_done_callback(relays.discard)

        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._stop.wait()
        server.close()
        for task in list(relays):
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_read, to_write = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, to_write))
                group.create_task(_copy(to_read, writer))
        finally:
            for one in (writer, to_write):
                one.transport.abort()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await one.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)
