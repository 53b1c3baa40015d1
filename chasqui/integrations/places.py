"""Whether jobs have ended, by where they are: it needs no events, which may have been trimmed.

A job that has not ended is in the stream or in the delayed set; a dead one is in the dead-letter
queue. A job that is in none of them has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chasqui.managing import dlq
from chasqui.managing.dead_jobs import DeadJob, Selection
from chasqui.managing.entries import search
from chasqui.model.job import is_drawn
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Plan, commands

_PAGE: Final = 1000
#: How much later than its entry a job's marker may be.
_EARLIER_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """Where some jobs are. If all is None, they have ended well."""

    #: One that the queue has no trace of.
    unknown: str | None = None
    #: One that is in the dead-letter queue.
    dead: DeadJob | None = None
    #: One that has not ended.
    left: str | None = None


def standing(keys: Keys, job_ids: Sequence[str]) -> Plan[Standing]:
    """Where these jobs are. The stream, which costs most, is read from the time when the first of
    them was added, and only until one of them is found."""
    wanted = frozenset(job_ids)
    if not wanted:
        return Standing()
    since_ms, unmarked = yield from _added_ms(keys, sorted(wanted))
    # Twice: a job may move from one place to another between two looks.
    for _ in range(2):
        dead = yield from _in_dlq(keys, wanted, since_ms)
        if dead is not None:
            return Standing(dead=dead)
        entry = yield from search(keys.stream, wanted, start=str(since_ms).encode())
        left = entry.job_id if entry is not None else (yield from _in_delayed(keys, wanted))
        if left is not None:
            return Standing(left=left)
    return Standing(unknown=unmarked)


def _added_ms(keys: Keys, job_ids: Sequence[str]) -> Plan[tuple[int, str | None]]:
    """When the first of the jobs was added, by the server's clock, 0 if unknown; and a job without
    a trace, if any: a job with an id of the caller's has a marker."""
    since_ms, unmarked = 1 << 53, None
    for start in range(0, len(job_ids), _PAGE):
        part = job_ids[start : start + _PAGE]
        names = [(keys.unique(one), keys.dlid(one), keys.result(one)) for one in part]
        values = yield commands(("MGET", *(key for of in names for key in of)), effect=Effect.READ)
        for i, job_id in enumerate(part):
            *marks, result = values[3 * i : 3 * i + 3]
            if not is_drawn(job_id) and not any(marks) and result is None:
                unmarked = job_id
            # Two times: of creation by the producer's clock, of arrival by the server's.
            pairs = [mark.split() for mark in marks if mark is not None]
            came_ms = [int(pair[1]) - _EARLIER_MS for pair in pairs if len(pair) == 2]
            # The time in a ULID does not count: the producer's clock may have been ahead.
            since_ms = min(since_ms, max([0, *came_ms]))
    return since_ms, unmarked


def _in_dlq(keys: Keys, wanted: frozenset[str], since_ms: int) -> Plan[DeadJob | None]:
    since = datetime.fromtimestamp(since_ms // 1000, UTC)
    selection = Selection(since=since, where=lambda dead: dead.job_id in wanted)
    return next(iter((yield from dlq.peek(keys, 1, selection))), None)


def _in_delayed(keys: Keys, wanted: frozenset[str]) -> Plan[str | None]:
    """Uses the index that our producers write: it misses a delayed job of chasquimq without one."""
    job_ids = sorted(wanted)
    for start in range(0, len(job_ids), _PAGE):
        part = job_ids[start : start + _PAGE]
        members = yield commands(("MGET", *map(keys.didx, part)), effect=Effect.READ)
        indexed = [pair for pair in zip(part, members, strict=True) if pair[1] is not None]
        if not indexed:
            continue
        calls = [("ZSCORE", keys.delayed, member) for _, member in indexed]
        scores: Any = yield commands(*calls, effect=Effect.READ)
        for (job_id, _), score in zip(indexed, scores if len(calls) > 1 else [scores], strict=True):
            if score is not None:
                return job_id
    return None
