"""One private server process: its folder, its port, its life and its sure end."""

import atexit
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.binaries import find
from tests.servers.kinds import KINDS, Kind

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0

#: Below the ephemeral ports of Linux and macOS: no outgoing connection can take a port while its
#: server is down for a restart.
_PORTS = range(10_240, 32_000)
#: Waits for the end of its input, then ends the process and removes the folder it was given.
_GUARD = ("/bin/sh", "-c", 'read _; kill -9 "$1"; rm -rf "$2"', "guard")
_TMPFS = Path("/dev/shm")
_TMPFS_MIN_FREE_BYTES = 1 << 30


class ServerStartError(Exception):
    """The server did not come up; the text ends with the tail of its log."""


class Server:
    """A server of one kind on 127.0.0.1 and a unix socket, with a folder of its own.

    Settings are the server's own, with underscores: `Server("redis-8.6", appendonly="yes")`.
    It ends with `close()`, with its `with` block, or with this process, however that one ends.
    """

    def __init__(self, kind: Kind | str, **settings: str) -> None:
        self.kind = kind if isinstance(kind, Kind) else KINDS[kind]
        self.binary = find(self.kind)
        self.directory = Path(tempfile.mkdtemp(prefix="chasqui-", dir=_base()))
        self.settings = {"save": "", "appendonly": "no"} | settings
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The name of its kind."""
        return self.kind.name

    @property
    def url(self) -> str:
        """Where to connect over TCP; the same after a restart."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        """Where its unix socket is."""
        return self.directory / "socket"

    @property
    def unix_url(self) -> str:
        """Where to connect over the unix socket."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise RuntimeError(f"the {self.name} server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and return when it answers; the same port and data as before."""
        if self._process is not None:
            raise RuntimeError(f"the {self.name} server is already running")
        for _ in range(10):
            port = self.port or _free_port()
            if self._launch(port):
                self.port = port
                return
            if self.port or "already in use" not in self._log_tail():
                break  # only a new server may look for another port
        raise ServerStartError(f"the {self.name} server did not start:\n{self._log_tail()}")

    def stop(self) -> None:
        """End the server the orderly way, its data written."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def restart(self) -> None:
        """Stop the server if it runs, and start it again on the same port and data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _launch(self, port: int) -> bool:
        """Whether a server on this port came up; if not, nothing of it is left but its log."""
        command = self._command(port)
        # Sessions of their own: an interrupt at the keyboard is for the tests, not for the server.
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # The guard reads a pipe that only we hold: it ends when we do, even by SIGKILL. The
        # kernel's parent-death signal would go off with the thread that started the server.
        self._guard = subprocess.Popen(
            [*_GUARD, str(self._process.pid), str(self.directory)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            if self._answers():
                return True
            time.sleep(0.005)
        self.kill()
        return False

    def _answers(self) -> bool:
        """Whether it is up and has loaded its data; at its socket, as the port may be another's."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1)
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                # A server with a password says so instead: it is up all the same.
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _command(self, port: int) -> list[str]:
        """The command line of a server on this port."""
        settings = {"bind": "127.0.0.1", "port": str(port), "unixsocket": str(self.socket)}
        settings |= {"dir": str(self.directory), "daemonize": "no"} | self.settings
        command = [str(self.binary)]
        for name, value in settings.items():
            command += [f"--{name.replace('_', '-')}", value]
        return command

    @property
    def _log(self) -> Path:
        return self.directory / "server.log"

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def _base() -> Path | None:
    """A folder in memory if there is room, so that fsync costs the tests nothing."""
    if os.access(_TMPFS, os.W_OK) and shutil.disk_usage(_TMPFS).free >= _TMPFS_MIN_FREE_BYTES:
        return _TMPFS
    return None


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerStartError("no free port on 127.0.0.1")
