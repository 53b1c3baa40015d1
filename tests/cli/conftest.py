"""The command line as its users have it: a process, with its output and its exit code."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import redis

from chasqui._core.envelope import encode_envelope
from chasqui.keys import Keys
from chasqui.payload import encode
from tests.servers import Server

_VARIABLES = ("CHASQUI_URL", "CHASQUI_REDIS_URL", "REDIS_URL", "COLUMNS", "LINES")


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

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
    """This environment, without what says where the server is."""
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


def run_in_terminal(*arguments: str, url: str) -> Ran:
    """Run a command in a terminal of 80 columns; `out` is what it showed, without colours."""
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
            except OSError:  # how Linux says that nobody has the terminal any more
                break
            if not chunk:
                break
            shown += chunk
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).replace("\r\n", "\n")
    return Ran(process.returncode, text, "")


@pytest.fixture
def chasqui(valkey_9: Server) -> Chasqui:
    """Runs `chasqui` against the run's Valkey 9."""

    def give(*arguments: str, **options: Any) -> Ran:
        return run(*arguments, url=valkey_9.url, **options)

    return give


@pytest.fixture
def bury(valkey_9: Server, queue_name: str) -> Callable[..., str]:
    """Puts a job into the dead-letter queue of `queue_name`, as a worker would; its DLQ id."""

    def give(name: str, data: Any, reason: str, **fields: str) -> str:
        envelope = encode_envelope(f"id-{name}", encode(data), 1_700_000_000_000, 2)
        entry = {"d": envelope, "n": name, "source_id": "5-0", "reason": reason, **fields}
        with redis.Redis.from_url(valkey_9.url) as client:
            return client.xadd(Keys(queue_name).dlq, entry).decode()

    return give
