"""Entries that nobody renews or takes over while a run goes on: looked for now and then, and judged
at its end, when it is known what struck meanwhile."""

import time
from typing import NamedTuple

import redis

from chasqui.consuming.takeover_pause import MOST_LEASES
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE
from tests.chaos.scene import Record
from tests.chaos.stage import Stage
from tests.ledger import HANDED_BACK_MS, number

#: While a worker lives, no entry is left alone for longer.
LEASES = 3
#: Nobody need take one over for so many leases after links broke again and again: what is left
#: alone for as long as that, and longer, with no fault at work, has no excuse.
CALM_LEASES = MOST_LEASES


class Stale(NamedTuple):
    """A job in somebody's hands that was left alone for long."""

    n: int
    at_s: float
    idle_s: float


def look(stage: Stage) -> list[Stale]:
    """What has been left alone for so long that it may be stuck."""

    def ask(client: redis.Redis) -> list[Stale]:
        found = []
        at_s, idle_ms = time.monotonic(), int((LEASES + CALM_LEASES) * stage.lease_s * 1000)
        stream = stage.keys.stream
        for held in client.xpending_range(stream, DEFAULT_GROUP, "-", "+", 100, idle=idle_ms):
            if held["time_since_delivered"] >= HANDED_BACK_MS:
                continue  # it was given this age a moment ago
            for _, fields in client.xrange(stream, held["message_id"], held["message_id"]):
                idle_s = held["time_since_delivered"] / 1000
                found.append(Stale(number(fields[ENVELOPE]), at_s, idle_s))
        return found

    try:
        return stage.ask(ask)
    except redis.ResponseError:  # neither stream nor group
        return []


def stuck(found: list[Stale], records: list[Record], lease_s: float) -> set[int]:
    """Those that were left alone although no fault was at work for long enough."""
    return {
        one.n
        for one in found
        if _calm_s(one.at_s - one.idle_s + LEASES * lease_s, one.at_s, records)
        > CALM_LEASES * lease_s
    }


def _calm_s(from_s: float, to_s: float, records: list[Record]) -> float:
    """For how long no fault was at work between two moments."""
    calm_s, free_s = 0.0, from_s
    for record in sorted(records, key=lambda record: record.at_s):
        if record.over_s > free_s:
            calm_s += max(0.0, min(record.at_s, to_s) - free_s)
            free_s = record.over_s
    return calm_s + max(0.0, to_s - free_s)
