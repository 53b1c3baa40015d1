"""Whether jobs have ended, by where they are: no event is needed, and none can have been trimmed.

A job that has not ended is in the stream or in the delayed set; a dead one is in the dead-letter
queue. One that is in none of them has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chasqui import dlq
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.dlq import DeadJob
from chasqui.model.job import drawn_ms
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Plan, commands

_PAGE: Final = 1000
# Only its id is of interest: whatever its size.
_ANY_SIZE: Final = 1 << 40
#: How much later than its entry a marker may say that a job came.
_EARLIER_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """How it stands with some jobs. All is None: they have ended well."""

    #: One of them that the queue has no trace of.
    unknown: str | None = None
    #: One of them that is in the dead-letter queue.
    dead: DeadJob | None = None
    #: One of them that has not ended.
    left: str | None = None


def standing(keys: Keys, job_ids: Sequence[str]) -> Plan[Standing]:
    """How it stands with these jobs. What costs most, the stream, is read from when the first of
    them was added, and only until one of them is found."""
    wanted = frozenset(job_ids)
    if not wanted:
        return Standing()
    since_ms, unmarked = yield from _added_ms(keys, sorted(wanted))
    # It may move from one place to the other while we look.
    for _ in range(2):
        dead = yield from _in_dlq(keys, wanted, since_ms)
        if dead is not None:
            return Standing(dead=dead)
        left = yield from _in_stream(keys, wanted, since_ms)
        if left is None:
            left = yield from _in_delayed(keys, wanted)
        if left is not None:
            return Standing(left=left)
    return Standing(unknown=unmarked)


def _added_ms(keys: Keys, job_ids: Sequence[str]) -> Plan[tuple[int, str | None]]:
    """When the first of the jobs was added, by the server's clock, 0 if that is not known; and one
    of them that left no trace: a producer that gives an id to a job leaves a marker."""
    since_ms, unmarked = 1 << 53, None
    for start in range(0, len(job_ids), _PAGE):
        part = job_ids[start : start + _PAGE]
        names = [(keys.unique(one), keys.dlid(one), keys.result(one)) for one in part]
        values = yield commands(("MGET", *(key for of in names for key in of)), effect=Effect.READ)
        for i, job_id in enumerate(part):
            *marks, result = values[3 * i : 3 * i + 3]
            if not drawn_ms(job_id) and not any(marks) and result is None:
                unmarked = job_id
            # When it was created by its producer's clock, and when it came by the server's.
            pairs = [mark.split() for mark in marks if mark is not None]
            came_ms = [int(pair[1]) - _EARLIER_MS for pair in pairs if len(pair) == 2]
            # Not by the time in a ULID: the producer's clock may have been ahead.
            since_ms = min(since_ms, max([0, *came_ms]))
    return since_ms, unmarked


def _in_dlq(keys: Keys, wanted: frozenset[str], since_ms: int) -> Plan[DeadJob | None]:
    since = datetime.fromtimestamp(since_ms // 1000, UTC)
    selection = dlq.Selection(since=since, where=lambda dead: dead.job_id in wanted)
    return next(iter((yield from dlq.peek(keys, 1, selection))), None)


def _in_stream(keys: Keys, wanted: frozenset[str], since_ms: int) -> Plan[str | None]:
    start = str(since_ms).encode()
    while True:
        page: list[Entry] = yield commands(
            ("XRANGE", keys.stream, start, "+", "COUNT", _PAGE),
            effect=Effect.READ,
            builder=EntryBuilder("range", _ANY_SIZE),
        )
        found = next((entry.job_id for entry in page if entry.job_id in wanted), None)
        if found is not None or len(page) < _PAGE:
            return found
        start = b"(" + page[-1].id


def _in_delayed(keys: Keys, wanted: frozenset[str]) -> Plan[str | None]:
    """By the index that we write. A delayed job of chasquimq that nobody can cancel is not seen."""
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
