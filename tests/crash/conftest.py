"""Real processes to harm, and the books to judge by."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from chasqui import sync
from chasqui.model.keys import DEFAULT_GROUP, Keys
from tests.crash.workers import SETTINGS
from tests.ledger import Audit, Census, Ledger, audit

ROOT = Path(__file__).parents[2]
#: How long a test waits for a fact before it fails.
WAIT_S = 40.0
#: Longer than a busy machine keeps a process waiting: what is renewed is not taken over.
LEASE_MS = 2000


def eventually(fact: Callable[[], object], what: str, *, limit_s: float = WAIT_S) -> None:
    """Return when a fact about another process has become true."""
    deadline_s = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"it never came true in {limit_s:g} s: {what}")
        time.sleep(0.01)


class WorkerProcess:
    """One worker of the fleet."""

    def __init__(
        self, fleet: "Fleet", who: str, arguments: list[str], told: dict[str, Any]
    ) -> None:
        self.who = who
        self._fleet = fleet
        self._log = fleet.folder / f"{who}.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chasqui", "worker", *arguments],
                cwd=ROOT,
                env=os.environ | {"CHASQUI_URL": fleet.url, SETTINGS: json.dumps(told)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and a line in the books."""
        self.process.kill()
        self.process.wait()
        self._fleet.ledger.write("dead", -1, self.who)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def wait(self, limit_s: float = WAIT_S) -> int:
        """Its exit code."""
        code = self.process.wait(limit_s)
        self._fleet.ledger.write("dead", -1, self.who)
        return code

    def open_gate(self) -> None:
        """Let held handlers go on."""
        (self._fleet.folder / f"gate-{self.who}").touch()


class Fleet:
    """Workers of one queue, its producer, and its books."""

    def __init__(self, url: str, queue_name: str, folder: Path) -> None:
        self.url = url
        self.queue_name = queue_name
        self.folder = folder
        self.keys = Keys(queue_name)
        self.ledger = Ledger(folder)
        self.queue = sync.Queue(queue_name, redis_url=url)
        self.client = redis.Redis.from_url(url)
        self.workers: list[WorkerProcess] = []
        self.added: list[int] = []
        self.unknown: list[int] = []

    def add(self, name: str, count: int, **data: Any) -> list[int]:
        """Add jobs; their numbers."""
        numbers = list(range(len(self.added), len(self.added) + count))
        self.queue.add_bulk([{"name": name, "data": {"n": n, **data}} for n in numbers])
        self.added += numbers
        return numbers

    def start(
        self,
        who: str,
        *arguments: str,
        target: str = "tests.crash.workers:make",
        fails: bool = False,
        dies_before_flush: int = 0,
        **options: Any,
    ) -> WorkerProcess:
        """Start a worker with these options of `Worker`."""
        defaults = {"claim_min_idle_ms": LEASE_MS, "run_scheduler": False, "concurrency": 20}
        told = {
            "queue": self.queue_name,
            "folder": str(self.folder),
            "who": who,
            "fails": fails,
            "dies_before_flush": dies_before_flush,
            "options": defaults | options,
        }
        worker = WorkerProcess(self, who, [target, *arguments], told)
        self.workers.append(worker)
        return worker

    def consumers(self) -> dict[str, int]:
        """The consumers of the group, each with how many entries it has."""
        try:
            found = self.client.xinfo_consumers(self.keys.stream, DEFAULT_GROUP)
        except redis.ResponseError:
            return {}
        return {consumer["name"].decode(): consumer["pending"] for consumer in found}

    def started(self, *who: str) -> None:
        """Return when these workers take part in the group."""
        eventually(lambda: set(who) <= self.consumers().keys(), f"{who} read the queue")

    def ended(self, count: int, limit_s: float = WAIT_S) -> None:
        """Return when so many jobs have been completed."""
        eventually(
            lambda: len({fact.n for fact in self.ledger.read("end")}) >= count,
            f"{count} jobs are completed",
            limit_s=limit_s,
        )

    def rest(self) -> Census:
        """The census, once nothing is pending any more."""
        eventually(lambda: not self.census().pending, "nothing is pending")
        return self.census()

    def census(self) -> Census:
        return Census.take(self.url, self.queue_name)

    def audit(self) -> Audit:
        """What is wrong, now."""
        lives = any(worker.process.poll() is None for worker in self.workers)
        return audit(
            self.added,
            self.ledger.read(),
            self.census(),
            unknown=self.unknown,
            lease_ms=LEASE_MS if lives else None,
        )

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.signal(signal.SIGCONT)
                worker.kill()
        self.queue.close()
        self.client.close()


@pytest.fixture
def make_fleet(queue_name: str, tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    """Gathers a fleet at a server; the logs of its workers are shown when the test fails."""
    fleets: list[Fleet] = []

    def make(url: str) -> Fleet:
        fleets.append(Fleet(url, queue_name, tmp_path))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
        for worker in fleet.workers:
            print(f"── {worker.who}\n{worker.log}")


@pytest.fixture
def fleet(make_fleet: Callable[[str], Fleet], server: Any) -> Fleet:
    """A fleet at each kind of server."""
    return make_fleet(server.url)
