"""`python -m tests.chaos.leases`: handlers four leases long, half of them blocking the loop, and
always some workers that wait for what lapses. None may run twice."""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.conduct import HANG_S
from tests.chaos.figure import Figure, Say, silent
from tests.crash.conftest import Fleet, eventually
from tests.facts import Fact
from tests.servers import Server

LEASE_MS = 1000
LEASES = 4
#: Workers whose loop nobody blocks, at any moment.
SPARE = 4
#: Jobs of one worker at once: those that are not blocked have room for all that do not block.
SLOTS = 32
#: Processes that are started at a time.
_START = 8
_LOOK_S = 0.02


def measure(
    kind: str, jobs: int, processes: int, seed: int, *, say: Say = silent, **start: Any
) -> dict[str, Any]:
    """Have them all done, and look into the books. `start` goes to each worker."""
    luck = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, Server(kind) as server:
        fleet = Fleet(server.url, "leases", Path(folder))
        try:
            workers = [f"w{i}" for i in range(processes)]
            for first in range(0, processes, _START):
                for who in workers[first : first + _START]:
                    fleet.start(
                        who, concurrency=SLOTS, read_count=1, claim_min_idle_ms=LEASE_MS, **start
                    )
                fleet.started(*workers[first : first + _START])
            began_s = time.monotonic()
            names = _feed(fleet, jobs, processes - SPARE, luck, say)
            seconds = time.monotonic() - began_s
            eventually(lambda: not fleet.census().pending, "all is acknowledged")
            found, facts = fleet.audit(), fleet.ledger.read()
        finally:
            fleet.close()
    lengths_s = _lengths_s(facts)
    return {
        "server": kind, "seed": seed, "jobs": jobs, "lease_ms": LEASE_MS, "processes": processes,
        "done": len(lengths_s), "blocking": Counter(names[n] for n in lengths_s)["block"],
        "shortest_s": round(min(lengths_s.values(), default=0.0), 2),
        "extra_runs": found.extra_runs, "at_once_in_two": len(found.overlapping),
        "faults": {name: sorted(numbers) for name, numbers in found.faults.items()},
        "seconds": round(seconds),
    }  # fmt: skip


def _feed(
    fleet: Fleet, jobs: int, most_blocking: int, luck: random.Random, say: Say
) -> dict[int, str]:
    """Add jobs as others are done, so that they never take all workers; the name of each."""
    most = {"block": most_blocking, "long": SPARE * SLOTS // 2}
    left = {"block": jobs // 2, "long": jobs - jobs // 2}
    names: dict[int, str] = {}
    in_hand: dict[str, set[int]] = {"block": set(), "long": set()}
    moved_s = time.monotonic()
    while (left["block"] or left["long"] or any(in_hand.values())) and (
        time.monotonic() - moved_s < HANG_S
    ):
        for name in most:
            count = min(most[name] - len(in_hand[name]), left[name])
            if count > 0:
                length_s = LEASE_MS / 1000 * luck.uniform(LEASES, LEASES + 0.5)
                added = fleet.add(name, count, s=length_s)
                in_hand[name].update(added)
                names.update(dict.fromkeys(added, name))
                left[name] -= count
        for fact in fleet.ledger.read_more():
            if fact.kind == "end":
                in_hand[names[fact.n]].discard(fact.n)
                moved_s = time.monotonic()
        say(len(names) - sum(map(len, in_hand.values())))
        time.sleep(_LOOK_S)
    return names


def _lengths_s(facts: list[Fact]) -> dict[int, float]:
    """How long each job that was done ran, the last time."""
    began_s = {(fact.n, fact.who): fact.at_s for fact in facts if fact.kind == "start"}
    return {fact.n: fact.at_s - began_s[fact.n, fact.who] for fact in facts if fact.kind == "end"}


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = [f"{name}: {numbers}" for name, numbers in told["faults"].items()]
    if told["done"] != told["jobs"] or told["blocking"] != told["jobs"] // 2:
        found.append(f"{told['done']} of {told['jobs']} done, {told['blocking']} blocking")
    if told["shortest_s"] < LEASES * told["lease_ms"] / 1000:
        found.append(f"a run took only {told['shortest_s']} s")
    if told["extra_runs"]:
        found.append(f"{told['extra_runs']} runs more than jobs")
    return found


def main() -> int:
    figure = Figure("leases", __doc__)
    figure.parser.add_argument("--jobs", type=int, default=10_000)
    figure.parser.add_argument("--processes", type=int, default=64)
    asked = figure.arguments()
    told = measure(asked.server, asked.jobs, asked.processes, asked.seed, say=figure.say)
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
