"""Books kept outside Redis: what was added, what ran and when, where everything is, what is wrong.

A process writes its own file, one line per fact, each line in one write: whatever kills it, the
facts before stay readable. Jobs are known by the number in their data, `{"n": 7}`, which the test
chose; ids and entries come and go.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from chasqui._core.envelope import decode_delayed_member, decode_envelope
from chasqui.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.payload import decode


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: what happened to which job, in whose hands, when (monotonic, of the machine)."""

    kind: str
    n: int
    who: str
    at_s: float


class Ledger:
    """The books of one test, in a folder: a file for each process that writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._pid = 0
        self._facts: list[Fact] = []
        self._read_bytes: dict[Path, int] = {}

    def write(self, kind: str, n: int, who: str) -> None:
        """Add a fact. A run is `start`, then `end` or `fail`; `dead` is the end of a consumer."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = self.folder / f"{self._pid}.ledger"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._fd, f"{kind} {n} {who} {time.monotonic():.6f}\n".encode())

    def read(self, kind: str | None = None) -> list[Fact]:
        """The facts of all processes so far, in the order of time."""
        for path in self.folder.glob("*.ledger"):
            with open(path, "rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                for line in whole.decode().split("\n"):
                    what, n, who, at_s = line.split()
                    self._facts.append(Fact(what, int(n), who, float(at_s)))
        self._facts.sort(key=lambda fact: fact.at_s)
        return [fact for fact in self._facts if kind in (None, fact.kind)]

    def count(self, kind: str) -> int:
        return len(self.read(kind))


@dataclass(frozen=True, slots=True)
class Census:
    """Where the jobs of a queue are, at rest: their numbers, with repetitions if there are any."""

    stream: list[int]
    #: Of those in the stream, the ones delivered and not acknowledged: number → idle ms.
    pending: dict[int, int]
    delayed: list[int]
    dlq: list[int]

    @classmethod
    def take(cls, url: str, queue_name: str) -> "Census":
        keys = Keys(queue_name)
        with redis.Redis.from_url(url) as client:
            entries = {
                entry_id: number(fields[ENVELOPE])
                for entry_id, fields in client.xrange(keys.stream)
            }
            return cls(
                stream=list(entries.values()),
                pending={
                    entries.get(held["message_id"], -1): held["time_since_delivered"]
                    for held in _pending(client, keys)
                },
                delayed=[
                    number(decode_delayed_member(member)[1])
                    for member in client.zrange(keys.delayed, 0, -1)
                ],
                dlq=[number(fields[ENVELOPE]) for _, fields in client.xrange(keys.dlq)],
            )

    @property
    def is_empty(self) -> bool:
        return not (self.stream or self.pending or self.delayed or self.dlq)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the books say is wrong. Right is: all fields empty, `extra` within what faults allow."""

    #: Added for sure, and nowhere to be found.
    lost: set[int]
    #: Somewhere, and never added.
    unexpected: set[int]
    #: In two places at once, or twice in one.
    doubled: set[int]
    #: Both completed and in the DLQ.
    contradictory: set[int]
    #: Pending for longer than three leases although a worker lives.
    stuck: set[int]
    #: Ran in two handlers at the same time.
    overlapping: set[int]
    #: Runs begun beyond the first, by job.
    extra: Counter[int] = field(default_factory=Counter)

    @property
    def faults(self) -> dict[str, set[int]]:
        """What must never be, by name; overlaps apart, for a zombie may cause them."""
        names = ("lost", "unexpected", "doubled", "contradictory", "stuck")
        return {name: found for name in names if (found := getattr(self, name))}

    @property
    def extra_runs(self) -> int:
        return self.extra.total()


def audit(
    added: Iterable[int],
    facts: list[Fact],
    census: Census,
    *,
    unknown: Iterable[int] = (),
    lease_ms: int | None = None,
) -> Audit:
    """Judge the books. `unknown` are jobs whose add may or may not have happened; `lease_ms` is
    that of the workers that live, None if there are none."""
    sure = set(added)
    started = Counter(fact.n for fact in facts if fact.kind == "start")
    completed = {fact.n for fact in facts if fact.kind == "end"}
    places = Counter([*census.stream, *census.delayed, *census.dlq])
    present = completed | places.keys()
    return Audit(
        lost=sure - present,
        unexpected=(present | started.keys()) - sure - set(unknown),
        doubled={n for n, times in places.items() if times > 1},
        contradictory=completed & set(census.dlq),
        stuck={
            n
            for n, idle_ms in census.pending.items()
            if lease_ms is not None and idle_ms > 3 * lease_ms
        },
        overlapping=_overlapping(facts),
        extra=Counter({n: times - 1 for n, times in started.items() if times > 1}),
    )


def number(envelope: bytes) -> int:
    """The number of the job in an envelope."""
    data: dict[str, Any] = decode(decode_envelope(envelope).payload)
    return int(data["n"])


def _overlapping(facts: list[Fact]) -> set[int]:
    running: dict[int, str] = {}
    found = set()
    for fact in facts:
        if fact.kind == "start":
            if running.get(fact.n, fact.who) != fact.who:
                found.add(fact.n)
            running[fact.n] = fact.who
        elif fact.kind in ("end", "fail") and running.get(fact.n) == fact.who:
            del running[fact.n]
        elif fact.kind == "dead":
            running = {n: who for n, who in running.items() if who != fact.who}
    return found


def _pending(client: redis.Redis, keys: Keys) -> list[dict[str, Any]]:
    try:
        return client.xpending_range(keys.stream, DEFAULT_GROUP, "-", "+", 1_000_000)
    except redis.ResponseError as error:
        if "NOGROUP" not in str(error):
            raise
        return []
