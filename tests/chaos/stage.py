"""The stage: one server, and behind a breakable link each, the producers and workers."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import redis

from chasqui.model.keys import DEFAULT_GROUP, Keys
from tests.chaos.programs.common import TOLD, Gate, Told
from tests.chaos.subjects import ROOT, Subject
from tests.facts import Ledger
from tests.proxy import Proxy
from tests.servers import Server

T = TypeVar("T")

QUEUE = "chaos"
#: How long a question to the server is repeated while faults keep it from answering.
ASK_S = 60.0
ASK_PAUSE_S = 0.05
END_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Link(Proxy):
    """A proxy that can also lose all replies for a while, and be late by chance."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.is_swallowing = False
        #: Added to `delay_s` in part, a random one each time.
        self.jitter_s = 0.0

    def _send(self, sock: socket.socket, data: bytes, direction: str) -> bool:
        if self.is_swallowing and direction == "client":
            return True
        if self.jitter_s:
            time.sleep(random.uniform(0, self.jitter_s))
        return super()._send(sock, data, direction)


class Member:
    """One place of a worker or producer, its link, and the process that fills it now."""

    def __init__(self, stage: "Stage", told: Told, command: tuple[str, ...]) -> None:
        self.role, self.place = told.role, told.place
        self.name = f"{told.role}-{told.place}"
        self.link = Link(stage.server.url)
        #: Held by the fault that has hold of this place.
        self.lock = threading.Lock()
        self.generation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._stage = stage
        self._told = told
        self._command = command
        self._numbers = told.numbers
        self._started_s = 0.0
        #: How many commands its link had seen before this process.
        self._commands = 0

    @property
    def who(self) -> str:
        """The name of the process in the books: no two processes have the same."""
        return f"{self.name}.{self.generation}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def age_s(self) -> float:
        """How long ago its process was started."""
        return time.monotonic() - self._started_s

    def start(self, **changes: Any) -> None:
        """Start a process; of a producer, `numbers` are the jobs that are left."""
        self.generation += 1
        self._numbers = changes.get("numbers", self._told.numbers)
        self._started_s = time.monotonic()
        self._commands = len(self.link.commands)
        told = asdict(self._told) | {"who": self.who, "url": self.link.url} | changes
        with open(self._stage.folder / f"{self.who}.log", "wb") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=os.environ | {TOLD: json.dumps(told), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,  # ends when we do, and so does the process
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_up(self, limit_s: float) -> None:
        """Return when the process has found the server: from then on it drains when it is told to.
        One that never does is judged by what it does then."""
        deadline_s = time.monotonic() + limit_s
        while self.is_running and not self.link.open_links and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and a line in the books."""
        assert self.process is not None
        self.process.kill()
        self._buried()

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None, and it is killed, if it does not end."""
        assert self.process is not None
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._buried()
        return code

    def numbers_left(self) -> tuple[int, int]:
        """The jobs that this producer, now dead, has not tried."""
        assert self.process is not None
        first, last = self._numbers
        book = self._stage.folder / f"{self.process.pid}.ledger"
        if book.exists():
            tried = [
                line.split()[1] for line in book.read_bytes().split(b"\n") if line[:4] == b"try "
            ]
            first = int(tried[-1]) + 1 if tried else first
        return first, last

    def rss_mb(self) -> float:
        return int(self._proc("statm").read_text().split()[1]) * _PAGE_BYTES / 2**20

    def fds(self) -> int:
        return len(os.listdir(self._proc("fd")))

    @property
    def has_read(self) -> bool:
        """Whether the process, a worker of ours, has tried to read: from then on it must drain. One
        that finds no server to begin with, or no place there, ends with an error before that."""
        return b"XREADGROUP" in self.link.commands[self._commands :]

    def last_words(self) -> str:
        """The last lines that the process has printed, as one."""
        log = (self._stage.folder / f"{self.who}.log").read_text(errors="replace")
        return " / ".join(log.strip().splitlines()[-3:])

    def close(self) -> None:
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.kill()
        elif self.process is not None:
            self._buried()
        self.link.close()

    def _buried(self) -> None:
        assert self.process is not None
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._stage.ledger.write("dead", -1, self.who)

    def _proc(self, name: str) -> Path:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/{name}")


class Stage:
    """All processes of one run. Ends with its `with` block, and nothing is left."""

    def __init__(
        self, subject: Subject, kind: str, *, jobs: int, workers: int, producers: int, lease_ms: int
    ) -> None:
        self.subject = subject
        #: By which the length of faults is measured.
        self.fault_s = lease_ms / 1000
        #: After how long others take over what a lost worker had.
        self.lease_s = self.fault_s if subject.recovers_s is None else subject.recovers_s
        self.jobs = jobs
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=base))
        self.ledger = Ledger(self.folder)
        self.gate = Gate(self.folder, is_new=True)
        self.keys = Keys(QUEUE)
        #: Held by the fault that has hold of the server.
        self.server_lock = threading.Lock()
        self.server = Server(kind, **_settings(kind))
        self.client = redis.Redis.from_url(self.server.url, socket_timeout=30)
        share = -(-jobs // producers)
        told = {"url": self.server.url, "queue": QUEUE, "folder": str(self.folder), "who": ""}
        shared: dict[str, Any] = {
            **told, "lease_ms": lease_ms, "is_mixed": subject.is_mixed, "producers": producers,
            "is_default": subject.is_default,
        }  # fmt: skip
        self.workers = [
            Member(self, Told(role="worker", place=i, **shared), subject.worker)
            for i in range(workers)
        ]
        self.producers = [
            Member(
                self,
                Told(
                    role="producer",
                    place=i,
                    numbers=(i * share, min(jobs, (i + 1) * share)),
                    origin=i * share,
                    **shared,
                ),
                subject.producer,
            )
            for i in range(producers)
        ]

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.producers]

    def ask(self, question: Callable[[redis.Redis], T]) -> T:
        """Ask the server, past all links, until it answers."""
        deadline_s = time.monotonic() + ASK_S
        while True:
            try:
                return question(self.client)
            except (redis.RedisError, OSError) as error:
                is_answer = isinstance(error, redis.ResponseError) and "BUSY" not in str(error)
                if is_answer or time.monotonic() > deadline_s:
                    raise
                time.sleep(ASK_PAUSE_S)

    def pending(self, *whose: Member) -> int:
        """How many entries these workers have in hand by the server's account."""
        if not self.subject.is_ours:
            return 0
        names = {member.who for member in whose}
        try:
            found = self.ask(lambda client: client.xinfo_consumers(self.keys.stream, DEFAULT_GROUP))
        except redis.ResponseError:  # neither stream nor group yet
            return 0
        return sum(one["pending"] for one in found if one["name"].decode() in names)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            with contextlib.suppress(Exception):
                member.close()
        self.client.close()
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _settings(kind: str) -> dict[str, str]:
    settings = {"appendonly": "yes", "appendfsync": "always"}
    if kind != "redis-6.2":  # which always allows it
        settings["enable_debug_command"] = "yes"
    return settings
