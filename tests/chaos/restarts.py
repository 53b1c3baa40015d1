"""`python -m tests.chaos.restarts`: a server that goes and comes back again and again, with jobs in
hand each time. One worker, so that no other can stand in for it: a job that is added when the
server answers again must be done, and soon, and while it is away it is not dialled in a storm."""

import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.figure import Figure, Say, silent
from tests.chaos.table import quantiles
from tests.crash.conftest import WAIT_S, Fleet, eventually
from tests.proxy import Proxy
from tests.servers import Server

WITHIN_S, MOST_DIALS = 1.0, 5
#: Longer than any outage here, so that no lease lapses and every extra run is a fault.
LEASE_MS = 20_000
#: More descriptors than at the start are a leak only if restarts leave some behind.
LEAKED = 10
#: Jobs that are under way when the server goes.
IN_HAND = 20
#: How long it is away, mostly, and one time in `RARE` for longer: then dials can be counted.
AWAY_S, LONG_S, RARE = (0.0, 0.3), (1.5, 3.0), 20
#: How long it is there: links that break young are made anew more slowly than old ones.
THERE_S = (0.0, 1.2)


class Dials(Proxy):
    """A link that notes when it was dialled."""

    def __init__(self, upstream: str) -> None:
        self.at_s: list[float] = []
        super().__init__(upstream)

    def _dial(self) -> socket.socket:
        self.at_s.append(time.monotonic())
        return super()._dial()

    def most_in_a_second(self, start_s: float, end_s: float) -> int:
        """The most dials in any second between two moments."""
        times_s = [at_s for at_s in self.at_s if start_s <= at_s < end_s]
        return max((sum(a <= b < a + 1 for b in times_s) for a in times_s), default=0)


class Restarts:
    """One server, one worker behind a link that counts, and the books."""

    def __init__(self, server: Server, link: Dials, fleet: Fleet, luck: random.Random) -> None:
        self.recovered_s: list[float] = []
        self.most_dials = 0
        #: Restarts after which no job was done.
        self.silent: list[int] = []
        self._server = server
        self._link = link
        self._fleet = fleet
        self._luck = luck
        self._ended_s: dict[int, float] = {}

    def restart(self, n: int) -> None:
        """Once: away, back, a job."""
        fleet, luck, link = self._fleet, self._luck, self._link
        time.sleep(luck.uniform(*THERE_S))
        link.at_s.clear()
        fleet.add("work", IN_HAND)
        gone_s = time.monotonic()
        if luck.random() < 0.5:
            self._server.kill()
        else:
            self._server.stop()
        time.sleep(luck.uniform(*(AWAY_S if luck.randrange(RARE) else LONG_S)))
        starts_s = time.monotonic()
        self._server.start()
        back_s = time.monotonic()
        self.most_dials = max(self.most_dials, link.most_in_a_second(gone_s, starts_s))
        (probe,) = fleet.add("quick", 1)
        try:
            eventually(lambda: self._has_ended(probe), f"{probe} is done")
        except AssertionError:
            self.silent.append(n)
        else:
            self.recovered_s.append(self._ended_s[probe] - back_s)

    def _has_ended(self, n: int) -> bool:
        for fact in self._fleet.ledger.read_more():
            if fact.kind == "end":
                self._ended_s.setdefault(fact.n, fact.at_s)
        return n in self._ended_s


def measure(kind: str, count: int, seed: int, *, say: Say = silent) -> dict[str, Any]:
    """Restart so many times, and look into the books."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(kind, appendonly="yes", appendfsync="always") as server,
        Dials(server.url) as link,
    ):
        fleet = Fleet(server.url, "restarts", Path(folder))
        try:
            worker = fleet.start("only", claim_min_idle_ms=LEASE_MS, redis_url=link.url)
            fleet.started("only")
            restarts = Restarts(server, link, fleet, random.Random(seed))
            descriptors, began_s = [_descriptors(worker.pid)], time.monotonic()
            for n in range(1, count + 1):
                restarts.restart(n)
                say(n)
            seconds = time.monotonic() - began_s
            eventually(lambda: fleet.census().is_empty, "all is acknowledged")
            found = fleet.audit()
            descriptors.append(_descriptors(worker.pid))
        finally:
            fleet.close()
    return {
        "server": kind, "seed": seed, "restarts": count, "jobs": len(fleet.added),
        "silent": restarts.silent, "recovered_s": quantiles(sorted(restarts.recovered_s)),
        "most_dials_in_a_second": restarts.most_dials, "extra_runs": found.extra_runs,
        "faults": {name: sorted(numbers) for name, numbers in found.faults.items()},
        "descriptors": descriptors, "seconds": round(seconds),
    }  # fmt: skip


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = [f"{name}: {numbers}" for name, numbers in told["faults"].items()]
    if told["silent"]:
        found.append(f"nothing done within {WAIT_S:g} s after restarts {told['silent']}")
    if told["recovered_s"].get("p99", WAIT_S) > WITHIN_S:
        found.append(f"p99 of the time to the next job done is over {WITHIN_S:g} s")
    if told["most_dials_in_a_second"] > MOST_DIALS:
        found.append(f"{told['most_dials_in_a_second']} dials in a second")
    before, after = told["descriptors"]
    if after >= before + LEAKED:
        found.append(f"{before} descriptors at the start, {after} at the end")
    if told["extra_runs"]:
        found.append(f"{told['extra_runs']} runs more than jobs")
    return found


def main() -> int:
    figure = Figure("restarts", __doc__)
    figure.parser.add_argument("--restarts", type=int, default=1000)
    asked = figure.arguments()
    told = measure(asked.server, asked.restarts, asked.seed, say=figure.say)
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
