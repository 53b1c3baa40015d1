"""Judges a run by its books: what is lost, unexpected, stuck or done too often, and how late."""

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from tests.chaos.jobs import plan_of
from tests.chaos.scene import DEATH, Record
from tests.chaos.stage import QUEUE, Stage
from tests.chaos.stale import Stale
from tests.chaos.stale import stuck as stuck_meanwhile
from tests.facts import Fact, Ledger
from tests.ledger import Audit, Census, audit

_MARK = re.compile(rb"chaos-job:(\d+):")
#: How all of a key is read, by its type; streams apart.
_READ: dict[bytes, Callable[[Any, bytes], Any]] = {
    b"string": lambda pipe, key: pipe.get(key),
    b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
    b"hash": lambda pipe, key: pipe.hgetall(key),
    b"zset": lambda pipe, key: pipe.zrange(key, 0, -1),
    b"set": lambda pipe, key: pipe.smembers(key),
}
#: Links that a worker may have more at the end than at the start: those that are just replaced.
FDS_SLACK = 6
#: A server that is back for less than this before it is struck again need not see a job done.
SHORT_RETURN_S = 1.0
#: A worker is silent that has done nothing, while others did so much, long after a fault.
SILENT_LEASES, SILENT_JOBS = 2, 1000
#: What producers write down of an add.
OUTCOMES = ("try", "ok", "unknown", "refused")


class Tally:
    """What the books say so far, kept up to date while they are written."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.facts: list[Fact] = []
        self.counts: Counter[str] = Counter()
        self.by_outcome: dict[str, set[int]] = {kind: set() for kind in OUTCOMES}
        self.completed: set[int] = set()
        self.buried: set[int] = set()
        #: Processes that have completed a job.
        self.finishers: set[str] = set()

    @property
    def settled(self) -> int:
        """Jobs that need nothing more."""
        return len(self.completed) + len(self.buried) + self.counts["refused"]

    def unfinished(self) -> set[int]:
        """Jobs that were added for sure and have not been done."""
        return self.by_outcome["ok"] - self.completed - self.buried

    def read(self) -> None:
        fresh = self._ledger.read_more()
        self.facts += fresh
        for fact in fresh:
            self.counts[fact.kind] += 1
            if fact.kind == "end":
                self.completed.add(fact.n)
                self.finishers.add(fact.who)
            elif fact.kind == "bury":
                self.buried.add(fact.n)
            elif fact.kind in self.by_outcome:
                self.by_outcome[fact.kind].add(fact.n)


@dataclass
class Result:
    """What a run says, as it goes into the table and the JSON file."""

    jobs: int = 0
    confirmed: int = 0
    refused: int = 0
    unknown: int = 0
    #: Of the unknown ones, those that were added.
    recovered: int = 0
    lost: int = 0
    unexpected: int = 0
    stuck: int = 0
    #: In two places at once, or both done and dead.
    doubled: int = 0
    #: Dead although their handler would have succeeded.
    buried_wrongly: int = 0
    extra_runs: int = 0
    #: The most that the faults allow; None where that cannot be known.
    extra_bound: int | None = None
    #: Extra runs of jobs whose worker no fault had struck: there is no reason for one, be it after
    #: the other or at the same time.
    uncaused: int = 0
    #: Ran in two places at once; who is cut off or stopped cannot know that others took over.
    overlapping: int = 0
    completed: int = 0
    dead: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    #: Workers that ended by themselves, and were started again.
    deaths: int = 0
    #: Seconds from the loss of a worker until each of its jobs began elsewhere.
    taken_over_s: list[float] = field(default_factory=list)
    #: Seconds from the end of each fault until the next job was done.
    resumed_s: list[float] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    #: Some of the numbers behind each figure that should be 0.
    examples: dict[str, list[int]] = field(default_factory=dict)

    @property
    def violations(self) -> list[str]:
        """What must not be, in words; empty if all is well."""
        names = ("lost", "unexpected", "stuck", "doubled", "buried_wrongly", "uncaused")
        found = [f"{name}: {getattr(self, name)}" for name in names if getattr(self, name)]
        if self.extra_bound is not None and self.extra_runs > self.extra_bound:
            found.append(f"{self.extra_runs} extra runs, {self.extra_bound} are allowed")
        return found + self.errors


def judge(
    stage: Stage, tally: Tally, records: list[Record], before: Any, after: Any, *, seconds: float,
    hang: bool, exit_codes: list[int | None], stale: list[Stale],
) -> Result:  # fmt: skip
    """The verdict. `hang`: the queue never came to rest; `stale`: what was seen left alone on the
    way."""
    facts = sorted(tally.facts, key=lambda fact: fact.at_s)
    outcomes = tally.by_outcome
    unknown = outcomes["try"] - outcomes["ok"] - outcomes["refused"]
    found, places = _audit(stage, tally, facts, unknown)
    stuck = (
        found.stuck | (places if hang else set()) | stuck_meanwhile(stale, records, stage.lease_s)
    )
    struck = [r for r in records if not r.was_skipped and r.kind != DEATH]
    no_cause = uncaused(facts, records, stage.lease_s) if stage.subject.is_ours else []
    result = Result(
        jobs=len(outcomes["try"]),
        confirmed=len(outcomes["ok"]),
        refused=len(outcomes["refused"]),
        unknown=len(unknown),
        recovered=len(unknown & (tally.completed | tally.buried)),
        lost=len(found.lost),
        unexpected=len(found.unexpected),
        stuck=len(stuck),
        doubled=len(found.doubled | found.contradictory),
        buried_wrongly=len(_buried_wrongly(stage)),
        extra_runs=found.extra_runs,
        extra_bound=sum(r.may_repeat for r in records) if stage.subject.is_ours else None,
        uncaused=len(no_cause),
        overlapping=len(found.overlapping),
        completed=len(tally.completed),
        dead=len(tally.buried),
        faults=dict(sorted(Counter(r.kind for r in struck).items())),
        deaths=sum(r.kind == DEATH for r in records),
        taken_over_s=_taken_over(facts, records),
        resumed_s=_resumed(facts, records),
        before=asdict(before),
        after=asdict(after),
        seconds=round(seconds, 1),
        errors=[r.error for r in records if r.error and (stage.subject.is_ours or r.kind != DEATH)],
    )
    doubtful = {
        "lost": found.lost,
        "unexpected": found.unexpected,
        "stuck": stuck,
        "doubled": found.doubled | found.contradictory,
        "uncaused": no_cause,
    }
    for name, numbers in doubtful.items():
        if numbers:
            result.examples[name] = sorted(numbers)[:10]
    if stage.subject.is_ours:
        if hang and not places:
            result.errors.append("the queue never came to rest")
        result.errors += [f"a worker ended with {code}" for code in exit_codes if code != 0]
        result.errors += [
            f"{who} did nothing any more after a fault"
            for who in silent(facts, records, stage.lease_s)
        ]
        if max(after.fds, default=0) > max(before.fds, default=0) + FDS_SLACK:
            result.errors.append(f"open files grew from {before.fds} to {after.fds}")
    return result


def _audit(
    stage: Stage, tally: Tally, facts: list[Fact], unknown: set[int]
) -> tuple[Audit, set[int]]:
    """What is wrong, and which jobs are still somewhere on their way."""
    if stage.subject.is_ours:
        census = stage.ask(lambda client: Census.take(stage.server.url, QUEUE))
        on_the_way = {*census.stream, *census.delayed}
    else:
        on_the_way = stage.ask(numbers_anywhere) - tally.completed
        census = Census(stream=list(on_the_way), pending={}, delayed=[], dlq=[])
    found = audit(
        tally.by_outcome["ok"],
        facts,
        census,
        unknown=unknown,
        lease_ms=int(stage.lease_s * 1000),
        runs_of=lambda n: plan_of(n, is_mixed=stage.subject.is_mixed).runs,
    )
    return found, on_the_way


def _buried_wrongly(stage: Stage) -> set[int]:
    """Jobs in the DLQ whose handler would have succeeded."""
    if not stage.subject.is_ours:
        return set()
    dead = Census.take(stage.server.url, QUEUE).dlq
    return {n for n in dead if not plan_of(n, is_mixed=stage.subject.is_mixed).ends_dead}


def numbers_anywhere(client: redis.Redis) -> set[int]:
    """Every job whose mark is in any key, whatever queue it belongs to."""
    found: set[int] = set()
    keys = list(client.scan_iter(count=1000))
    for start in range(0, len(keys), 1000):
        some = keys[start : start + 1000]
        with client.pipeline(transaction=False) as pipe:
            for key in some:
                pipe.type(key)
            kinds = dict(zip(some, pipe.execute(), strict=True))
            read = [key for key in some if kinds[key] in _READ]
            for key in read:
                _READ[kinds[key]](pipe, key)
            values = dict(zip(read, pipe.execute(), strict=True))
        for key in some:
            value = _not_done(client, key) if kinds[key] == b"stream" else values.get(key)
            text = key + (value if isinstance(value, bytes) else repr(value).encode())
            found.update(int(n) for n in _MARK.findall(text))
    return found


def _not_done(client: redis.Redis, stream: bytes) -> list[Any]:
    """The entries of a stream that some group has yet to read or to acknowledge."""
    entries = client.xrange(stream)
    groups = client.xinfo_groups(stream)
    if not groups:
        return entries
    left: set[bytes] = set()
    for group in groups:
        pending = client.xpending_range(stream, group["name"], "-", "+", 1_000_000)
        left.update(held["message_id"] for held in pending)
        last = b"(" + group["last-delivered-id"]
        left.update(entry_id for entry_id, _ in client.xrange(stream, min=last.decode()))
    return [(entry_id, fields) for entry_id, fields in entries if entry_id in left]


def uncaused(facts: list[Fact], records: list[Record], lease_s: float) -> list[int]:
    """Jobs that ran again although their run had not failed and nothing had struck its worker.

    Two leases on either side count: a run is struck until so long after its end, by when it has
    long been acknowledged or buried, and a fault strikes runs that begin so soon after it. When the
    second run comes does not matter.
    """
    slack_s = 2 * lease_s
    found = []
    running: dict[int, Fact] = {}
    ended_s: dict[int, float] = {}
    for fact in facts:
        before = running.get(fact.n)
        is_its_own = before is not None and before.who == fact.who
        if fact.kind == "fail" and is_its_own:
            del running[fact.n]  # the next run is a planned one
        elif fact.kind in ("end", "bury") and is_its_own:
            ended_s[fact.n] = fact.at_s
        elif fact.kind == "start":
            until_s = min(fact.at_s, ended_s.pop(fact.n, math.inf) + slack_s)
            if before is not None and not any(
                before.who in record.struck
                and record.at_s <= until_s
                and before.at_s <= record.over_s + slack_s
                for record in records
            ):
                found.append(fact.n)
            running[fact.n] = fact
    return found


def silent(facts: list[Fact], records: list[Record], lease_s: float) -> list[str]:
    """Workers that were struck, live on, and do no job any more, while others do many.

    They are looked at from two leases after the fault until the next one in their place. One that
    found no server when it began, and ended, is started again without being a fault."""
    ends = [fact for fact in facts if fact.kind == "end"]
    gone_s = {fact.who: fact.at_s for fact in facts if fact.kind == "dead"}
    times = [fact.at_s for fact in ends]
    struck = [record for record in records if not record.was_skipped]
    found = []
    for record in struck:
        for who in record.awaits:
            place = who.partition(".")[0]
            again_s = [
                other.at_s
                for other in struck
                if other is not record
                and other.over_s > record.over_s
                and other.target.partition(".")[0] in (place, "all workers")
            ]
            first = bisect_left(times, record.over_s + SILENT_LEASES * lease_s)
            last_s = min([*again_s, gone_s.get(who, math.inf)])
            later = ends[first : bisect_left(times, last_s)]
            if len(later) >= SILENT_JOBS and all(fact.who != who for fact in later):
                found.append(who)
    return found


def _taken_over(facts: list[Fact], records: list[Record]) -> list[float]:
    """For each job that ran when its worker was lost: how long until it began elsewhere."""
    starts = defaultdict(list)
    for fact in facts:
        if fact.kind == "start":
            starts[fact.n].append(fact)
    done = {(fact.n, fact.who) for fact in facts if fact.kind in ("end", "fail", "bury")}
    waits = []
    for record in records:
        for who in record.lost:
            lost_s = next((f.at_s for f in facts if f.kind == "dead" and f.who == who), record.at_s)
            for n, its in starts.items():
                if any(f.who == who for f in its) and (n, who) not in done:
                    later = [f.at_s for f in its if f.who != who and f.at_s > lost_s]
                    waits += [round(later[0] - lost_s, 3)] if later else []
    return sorted(waits)


def _resumed(facts: list[Fact], records: list[Record]) -> list[float]:
    """For each fault, how long after its end the next job was done, by those it struck.

    A server that was struck again before that, and so soon that nobody owes a job, does not count.
    """
    ends = [fact for fact in facts if fact.kind == "end"]
    times = [fact.at_s for fact in ends]
    waits = []
    strikes_s = sorted(record.at_s for record in records if record.target == "server")
    for record in records:
        if record.was_skipped:
            continue
        if record.target == "server":
            again = next((at_s for at_s in strikes_s if at_s > record.at_s), math.inf)
            is_done = bisect_left(times, record.over_s) < bisect_left(times, again)
            if again < record.over_s + SHORT_RETURN_S and not is_done:
                continue
        for i in range(bisect_left(times, record.over_s), len(ends)):
            if not record.awaits or ends[i].who in record.awaits:
                waits.append(round(times[i] - record.over_s, 3))
                break
    return sorted(waits)
