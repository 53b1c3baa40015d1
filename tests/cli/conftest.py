"""Runs the command line as users do, and returns its output and its exit code.

A command runs in this process, which is quicker, unless a process of its own proves more.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self
from unittest.mock import patch

import pyte
import pytest
import redis

from chasqui import __main__ as command_line
from chasqui._core.envelope import encode_envelope
from chasqui.model.keys import Keys
from chasqui.model.payload import encode
from tests.servers import Server

_VARIABLES = ("CHASQUI_URL", "CHASQUI_REDIS_URL", "REDIS_URL", "COLUMNS", "LINES")


@dataclass(frozen=True)
class Ran:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """A piped table, its header left out."""
        return [line.split("\t") for line in self.out.splitlines()[1:]]


class Chasqui(Protocol):
    def __call__(self, *arguments: str, **options: Any) -> Ran: ...


def environment(**variables: str) -> dict[str, str]:
    """This environment, without the variables that name a server."""
    inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    return inherited | variables


def run(*arguments: str, url: str | None = None, stdin: str = "") -> Ran:
    """Run a command with its output piped."""
    done = subprocess.run(
        [sys.executable, "-m", "chasqui", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=50,
        env=environment(**({"CHASQUI_URL": url} if url else {})),
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def call(*arguments: str, url: str | None = None, stdin: str = "") -> Ran:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    variables = environment(**({"CHASQUI_URL": url} if url else {}))
    with (
        patch.dict(os.environ, variables, clear=True),
        patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _logging_left_as_it_was(),
    ):
        code = command_line.run(arguments)
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _logging_left_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    names = ("chasqui", "chasqui.transport.server", "chasqui.transport.recovery")
    loggers = root, *map(logging.getLogger, names)
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def running(*arguments: str, url: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs a command until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "chasqui", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(CHASQUI_URL=url, PYTHONUNBUFFERED="1"),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> Ran:
    """Send a running command a signal; its exit code and the rest of its output."""
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return Ran(process.returncode, out, err)


class Terminal:
    """A command in a terminal of 80 columns and 24 lines, with its screen and its keys."""

    def __init__(self, *arguments: str, url: str) -> None:
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chasqui", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(CHASQUI_URL=url, TERM="xterm-256color"),
            start_new_session=True,
        )
        os.close(theirs)

    @property
    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, pattern: str, *, is_there: bool = True) -> None:
        """Read until the screen shows the pattern, or no longer does.

        The rest may be half drawn then, so wait for each thing that you need.
        """
        until_s = time.monotonic() + 30
        while bool(re.search(pattern, self.shown, re.MULTILINE)) is not is_there:
            if not self._read(until_s):
                pytest.fail(f"{pattern!r} is_there={not is_there}:\n{self.shown}")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def interrupt(self) -> int:
        """Ctrl+C; the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Read until the command ends; its exit code."""
        until_s = time.monotonic() + 30
        while self._read(until_s):
            pass
        return self._process.wait(30)

    def _read(self, until_s: float) -> bool:
        """Read the next output; False if there is no more."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, until_s - time.monotonic()))
        try:
            chunk = os.read(self._ours, 65536) if ready else b""
        except OSError:  # Linux reports a terminal without processes like this
            chunk = b""
        self._stream.feed(chunk)
        return bool(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def run_in_terminal(*arguments: str, url: str) -> Ran:
    """Run a command in a terminal of 80 columns; `out` has its text without escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = environment(CHASQUI_URL=url, TERM="xterm")
    command = [sys.executable, "-m", "chasqui", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux reports a terminal without processes like this
                break
            if not chunk:
                break
            shown += chunk
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")
    return Ran(process.returncode, text, "")


@pytest.fixture
def chasqui(valkey_9: Server) -> Chasqui:
    """Runs `chasqui`, in this process, against the run's Valkey 9."""

    def give(*arguments: str, **options: Any) -> Ran:
        return call(*arguments, url=valkey_9.url, **options)

    return give


@pytest.fixture
def bury(valkey_9: Server, queue_name: str) -> Callable[..., str]:
    """Buries a job in the DLQ of `queue_name`, as a worker would; its DLQ id."""

    def give(name: str, data: Any, reason: str, **fields: str) -> str:
        envelope = encode_envelope(f"id-{name}", encode(data), 1_700_000_000_000, 2)
        entry = {"d": envelope, "n": name, "source_id": "5-0", "reason": reason, **fields}
        with redis.Redis.from_url(valkey_9.url) as client:
            return client.xadd(Keys(queue_name).dlq, entry).decode()

    return give
