"""Books kept outside Redis: the facts that processes write down, and reading them back.

A process writes its own file, one line per fact, each line in one write: whatever kills it, the
facts before stay readable. Standard library only: programs of other queues keep the same books.
"""

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
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
        self._append(f"{kind} {n} {who} {time.monotonic():.6f}\n")

    def write_all(self, kind: str, numbers: Iterable[int], who: str) -> None:
        """Add the same fact of many jobs, in one write."""
        at_s = time.monotonic()
        self._append("".join(f"{kind} {n} {who} {at_s:.6f}\n" for n in numbers))

    def read(self, kind: str | None = None) -> list[Fact]:
        """The facts of all processes so far, in the order of time."""
        self.read_more()
        self._facts.sort(key=lambda fact: fact.at_s)
        return [fact for fact in self._facts if kind in (None, fact.kind)]

    def read_more(self) -> list[Fact]:
        """The facts that nobody has read before; those of one process are in order."""
        found = []
        for path in self.folder.glob("*.ledger"):
            with open(path, "rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                for line in whole.decode().split("\n"):
                    kind, n, who, at_s = line.split()
                    found.append(Fact(sys.intern(kind), int(n), sys.intern(who), float(at_s)))
        self._facts += found
        return found

    def count(self, kind: str) -> int:
        return len(self.read(kind))

    def _append(self, lines: str) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = self.folder / f"{self._pid}.ledger"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._fd, lines.encode())
