"""`python -m tests.chaos.failovers`: primaries that are killed, stopped for a while or told to hand
over, under Sentinel and in a cluster, while adds wait for a replica. How long after there is a new
primary, and the old one is none, a job is done that was added then; and nothing is lost that was
confirmed."""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from chasqui import sync
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from tests.chaos.figure import Figure, Say, silent
from tests.chaos.table import quantiles
from tests.crash.conftest import Fleet, eventually
from tests.crash.load import Load
from tests.ledger import Census, audit
from tests.servers import Server
from tests.servers.groups import Cluster, Watched, is_primary

QUEUE = "failovers"
WITHIN_S = 2.0
WAYS = ("killed", "stopped", "told")
#: The numbers of the load's jobs begin here; those before are the probes'.
FIRST = 1_000_000
#: How long the load goes on between two failovers.
CALM_S = (0.1, 0.5)
#: How long a server is silent that is taken for dead: no busy machine makes one of the others so.
DOWN_MS = 1000
#: How long sentinels and nodes may take to choose: those that stand against each other try again.
ELECTION_S = 90.0
#: One that was told to hand over and has not by then never will.
TOLD_S = 15.0


class Group(Protocol):
    """Servers of which one has the queue."""

    @property
    def url(self) -> str: ...
    def primary(self) -> Server: ...
    def is_replaced(self, old: Server) -> bool: ...
    def hand_over(self) -> None: ...
    def wait_until_whole(self) -> None: ...
    def close(self) -> None: ...


class Sentinels:
    """A primary and two replicas, watched by three sentinels."""

    def __init__(self, kind: str) -> None:
        self._group = Watched(kind, replicas=2, sentinels=3, down_after_ms=DOWN_MS)
        self.url, self.close, self.hand_over = (
            self._group.url, self._group.close, self._group.fail_over,
        )  # fmt: skip

    def primary(self) -> Server:
        return self._group.primary

    def is_replaced(self, old: Server) -> bool:
        return self._group.primary is not old

    def wait_until_whole(self) -> None:
        self._group.wait_until_whole(2)


class Shards:
    """A cluster of three primaries with a replica each; the queue is in one shard."""

    def __init__(self, kind: str) -> None:
        self._group = Cluster(
            kind, replicas=1, cluster_node_timeout=str(DOWN_MS), repl_diskless_sync_delay="0"
        )
        self.url, self.close = self._group.url, self._group.close
        self.wait_until_whole = self._group.wait_until_whole
        members = self._group.members
        at = members.index(self._group.owner(Keys(QUEUE).stream.decode()))
        self._pair = (members[at], members[at + 3])

    def primary(self) -> Server:
        return next(member for member in self._pair if is_primary(member))

    def is_replaced(self, old: Server) -> bool:
        return is_primary(self._other(old))

    def hand_over(self) -> None:
        self._group.fail_over(self._other(self.primary()))

    def _other(self, one: Server) -> Server:
        return next(member for member in self._pair if member is not one)


GROUPS: dict[str, Callable[[str], Group]] = {"sentinel": Sentinels, "cluster": Shards}


class Probes:
    """Jobs that are added when a new primary is there."""

    def __init__(self, group: Group, fleet: Fleet) -> None:
        self.added: list[int] = []
        #: Adds that no replica confirmed in time.
        self.unknown: list[int] = []
        self._queue = sync.Queue(QUEUE, redis_url=group.url, durable="replica")
        self._fleet = fleet
        self._ended_s: dict[int, float] = {}
        self._add(0)  # one that has never found its server does not wait for it

    def send(self, n: int) -> threading.Thread:
        """Begin to add one; its confirmation may take a replica that is not there yet."""
        thread = threading.Thread(target=self._add, args=(n,))
        thread.start()
        return thread

    def ended_s(self, n: int) -> float:
        """When it was done."""
        eventually(lambda: self._has_ended(n), f"probe {n} is done")
        return self._ended_s[n]

    def close(self) -> None:
        self._queue.close()

    def _add(self, n: int) -> None:
        try:
            self._queue.add("quick", {"n": n})
            self.added.append(n)
        except ChasquiError:
            self.unknown.append(n)

    def _has_ended(self, n: int) -> bool:
        for fact in self._fleet.ledger.read_more():
            if fact.kind == "end" and fact.n < FIRST:
                self._ended_s.setdefault(fact.n, fact.at_s)
        return n in self._ended_s


def fail_over(group: Group, way: str, probes: Probes, n: int) -> float:
    """Replace the primary; how long after that the probe was done."""
    old = group.primary()
    if way == "killed":
        old.kill()
    elif way == "stopped":
        os.kill(old.pid, signal.SIGSTOP)
    try:
        while way == "told" and not _has_handed_over(group, old):
            pass
        eventually(lambda: group.is_replaced(old), "there is a new primary", limit_s=ELECTION_S)
    finally:
        if way == "stopped":
            os.kill(old.pid, signal.SIGCONT)
    if way != "killed":  # until it knows, it may still serve
        eventually(lambda: _has_given_up(old), "the old one has given up", limit_s=ELECTION_S)
    new_s = time.monotonic()
    adding = probes.send(n)
    passed_s = probes.ended_s(n) - new_s
    if way == "killed":
        old.start()
    adding.join()
    group.wait_until_whole()
    return passed_s


def _has_given_up(old: Server) -> bool:
    try:
        return not is_primary(old)
    except OSError:  # it hangs up on everybody when it does
        return False


def _has_handed_over(group: Group, old: Server) -> bool:
    """Tell it to; sentinels give up where the news of a replica are too old for them."""
    group.hand_over()
    try:
        eventually(lambda: group.is_replaced(old), "it hands over", limit_s=TOLD_S)
    except AssertionError:
        return False
    return True


def measure(kind: str, name: str, count: int, seed: int, *, say: Say = silent) -> dict[str, Any]:
    """Replace the primary of a group so many times, and look into the books."""
    luck = random.Random(seed)
    took_s: dict[str, list[float]] = {way: [] for way in WAYS}
    group = GROUPS[name](kind)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(group.primary().url, QUEUE, Path(folder))
        probes = Probes(group, fleet)
        try:
            for who in ("one", "other"):
                fleet.start(who, redis_url=group.url)
            fleet.started("one", "other")
            with Load(group.url, QUEUE, first=FIRST, durable="replica") as load:
                for n in range(1, count + 1):
                    time.sleep(luck.uniform(*CALM_S))
                    way = WAYS[n % len(WAYS)]
                    took_s[way].append(fail_over(group, way, probes, n))
                    say(n)
            added, unknown = probes.added + load.added, probes.unknown + load.unknown
            url = group.primary().url
            eventually(lambda: not Census.take(url, QUEUE).stream, "all is done")
            facts = fleet.ledger.read()
            found = audit(added, facts, Census.take(url, QUEUE), unknown=unknown)
        finally:
            probes.close()
            fleet.close()
            group.close()
    return {
        "seed": seed, "failovers": count, "confirmed": len(added), "unknown": len(unknown),
        "took_s": quantiles(sorted(s for times_s in took_s.values() for s in times_s)),
        "by_way_s": {way: quantiles(sorted(times_s)) for way, times_s in took_s.items()},
        "extra_runs": found.extra_runs,
        "faults": {name: sorted(numbers)[:100] for name, numbers in found.faults.items()},
    }  # fmt: skip


def wrong(told: dict[str, dict[str, Any]]) -> list[str]:
    """What must not be."""
    found = []
    for name, one in told.items():
        found += [f"{name}: {fault}: {numbers}" for fault, numbers in one["faults"].items()]
        if one["took_s"]["p99"] > WITHIN_S:
            found.append(f"{name}: p99 of the time to the next job done is over {WITHIN_S:g} s")
    return found


def main() -> int:
    figure = Figure("failovers", __doc__)
    figure.parser.add_argument("--failovers", type=int, default=30, help="in each group")
    figure.parser.add_argument("--only", choices=list(GROUPS))
    asked = figure.arguments()
    told: dict[str, Any] = {}
    for name in [asked.only] if asked.only else list(GROUPS):
        told[name] = measure(asked.server, name, asked.failovers, asked.seed, say=figure.say)
    return figure.end(asked.json, {"server": asked.server, **told}, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
