"""What every program is told, and the producer's loop. Standard library only."""

import asyncio
import json
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.jobs import Plan, plan_of
from tests.facts import Ledger

TOLD = "CHAOS_TOLD"
#: The file through which the conductor says how many jobs all producers together may try.
GATE = "gate"
GATE_POLL_S = 0.01
#: Jobs of one bulk.
BULK = 20
#: After an add that failed, so that an outage does not eat all numbers.
PAUSE_S = 0.1

#: Adds some jobs and says of each how it went: ok, unknown, or refused, which means not added.
Add = Callable[[list[int]], Awaitable[dict[int, str]]]


@dataclass(frozen=True)
class Told:
    """What the conductor tells a program."""

    role: str
    url: str
    queue: str
    folder: str
    who: str
    #: Which of the workers or producers it is.
    place: int
    lease_ms: int
    is_mixed: bool
    #: A queue is left as its first example has it: only the pace is set.
    is_default: bool = False
    #: Of a producer: the jobs that are its own, and how many producers there are.
    numbers: tuple[int, int] = (0, 0)
    #: Where its numbers began before any restart.
    origin: int = 0
    producers: int = 1

    @classmethod
    def here(cls) -> "Told":
        """What this process was told. It ends when the conductor does."""
        told = json.loads(os.environ[TOLD])
        threading.Thread(target=_end_with_conductor, daemon=True).start()
        return cls(**{**told, "numbers": tuple(told["numbers"])})

    def ledger(self) -> Ledger:
        return Ledger(Path(self.folder))

    def plan(self, n: int) -> Plan:
        return plan_of(n, is_mixed=self.is_mixed, lease_ms=self.lease_ms)


class Gate:
    """How far producers may go. One writes, all read."""

    def __init__(self, folder: Path, *, is_new: bool = False) -> None:
        path = folder / GATE
        if is_new:
            path.write_bytes(bytes(8))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    @property
    def allowed(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    @allowed.setter
    def allowed(self, count: int) -> None:
        self._memory[:8] = count.to_bytes(8, "little")


class Runs:
    """What a handler does with a job of a queue that only has handlers: runs it, keeps books."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._ledger = told.ledger()

    async def work(self, n: int) -> None:
        self._ledger.write("start", n, self._told.who)
        await asyncio.sleep(self._told.plan(n).takes_ms / 1000)
        self._ledger.write("end", n, self._told.who)


async def produce(told: Told, add: Add) -> None:
    """Add the jobs that are this producer's own, as fast as the gate allows."""
    ledger, gate = told.ledger(), Gate(Path(told.folder))
    first, last = told.numbers
    for start in range(first, last, BULK):
        while (start - told.origin) * told.producers >= gate.allowed:  # noqa: ASYNC110
            await asyncio.sleep(GATE_POLL_S)
        numbers = list(range(start, min(start + BULK, last)))
        ledger.write_all("try", numbers, told.who)
        outcomes = await add(numbers)
        for kind in ("ok", "unknown", "refused"):
            if chosen := [n for n, outcome in outcomes.items() if outcome == kind]:
                ledger.write_all(kind, chosen, told.who)
        if any(outcome != "ok" for outcome in outcomes.values()):
            await asyncio.sleep(PAUSE_S)


async def one_by_one(
    numbers: Iterable[int], add: Callable[[int], Awaitable[object]], limit_s: float
) -> dict[int, str]:
    """Add jobs of a queue that cannot tell whether a failed add happened."""

    async def try_one(n: int) -> str:
        try:
            await asyncio.wait_for(add(n), limit_s)
        except Exception:
            return "unknown"
        return "ok"

    numbers = list(numbers)
    outcomes = await asyncio.gather(*map(try_one, numbers))
    return dict(zip(numbers, outcomes, strict=True))


def mark(n: int) -> str:
    """A text in the job's data by which it is found in any queue's keys."""
    return f"chaos-job:{n}:"


def _end_with_conductor() -> None:
    os.read(0, 1)
    os._exit(3)
