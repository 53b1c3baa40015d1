"""The books judged: where everything is, and what is wrong. What is in them: tests/facts.py.

Jobs are known by the number in their data, `{"n": 7}`, which the test chose; ids and entries come
and go.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import redis

from chasqui._core.envelope import decode_delayed_member, decode_envelope
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.model.payload import decode
from tests.facts import Fact, Ledger

_IS_MISSING = re.compile("NOGROUP|no such key")
#: The idle time that release.lua gives to what is handed back: beyond any lease.
HANDED_BACK_MS = 864_000_000

__all__ = ["HANDED_BACK_MS", "Audit", "Census", "Fact", "Ledger", "audit", "number"]


@dataclass(frozen=True, slots=True)
class Census:
    """Where the jobs of a queue are, at one moment: their numbers, with repetitions if any."""

    stream: list[int]
    #: Of those in the stream, the ones delivered and not acknowledged: number → idle ms.
    pending: dict[int, int]
    delayed: list[int]
    dlq: list[int]
    #: Of those in the stream, the ones delivered once and nobody's now: no worker will see them.
    forgotten: list[int] = field(default_factory=list)

    @classmethod
    def take(cls, url: str, queue_name: str) -> "Census":
        keys = Keys(queue_name)
        with redis.Redis.from_url(url) as client, client.pipeline() as moment:
            moment.xrange(keys.stream)
            moment.xpending_range(keys.stream, DEFAULT_GROUP, "-", "+", 1_000_000)
            moment.xinfo_groups(keys.stream)
            moment.zrange(keys.delayed, 0, -1)
            moment.xrange(keys.dlq)
            found = [_unless_missing(reply) for reply in moment.execute(raise_on_error=False)]
        waiting, held, groups, delayed, dead = found
        entries = {entry_id: number(fields[ENVELOPE]) for entry_id, fields in waiting}
        pending = {one["message_id"]: one["time_since_delivered"] for one in held}
        ours = [group for group in groups if group["name"] == DEFAULT_GROUP.encode()]
        delivered = _order(ours[0]["last-delivered-id"] if ours else b"0-0")
        return cls(
            stream=list(entries.values()),
            pending={entries.get(entry_id, -1): idle_ms for entry_id, idle_ms in pending.items()},
            delayed=[number(decode_delayed_member(member)[1]) for member in delayed],
            dlq=[number(fields[ENVELOPE]) for _, fields in dead],
            forgotten=[
                n
                for entry_id, n in entries.items()
                if entry_id not in pending and _order(entry_id) <= delivered
            ],
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
    #: Delivered and nobody's, or pending for longer than three leases although a worker lives.
    stuck: set[int]
    #: Ran in two handlers at the same time.
    overlapping: set[int]
    #: Runs begun beyond those that were planned, by job.
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
    runs_of: Callable[[int], int] = lambda n: 1,
) -> Audit:
    """Judge the books. `unknown` are jobs whose add may or may not have happened; `lease_ms` is
    that of the workers that live, None if there are none; `runs_of` says how often a job runs if
    nothing goes wrong."""
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
            *census.forgotten,
            *(
                n
                for n, idle_ms in census.pending.items()
                if lease_ms is not None and idle_ms > 3 * lease_ms
            ),
        },
        overlapping=_overlapping(facts),
        extra=Counter(
            {n: more for n, times in started.items() if (more := times - runs_of(n)) > 0}
        ),
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
        elif fact.kind in ("end", "fail", "bury") and running.get(fact.n) == fact.who:
            del running[fact.n]
        elif fact.kind == "dead":
            running = {n: who for n, who in running.items() if who != fact.who}
    return found


def _unless_missing(reply: Any) -> Any:
    """What a server said; nothing where there is no stream or no group."""
    if isinstance(reply, redis.ResponseError) and _IS_MISSING.match(str(reply)):
        return []
    if isinstance(reply, Exception):
        raise reply
    return reply


def _order(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)
