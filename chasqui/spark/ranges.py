"""Where a stream is read from and to: id arithmetic, counted boundaries, exact loss counts.

A range runs from behind one id up to another one, included, so neighbouring ranges share an id and
never an entry. Its entries are counted by a walk on the server, in slices that hold it up for a few
milliseconds each. Every slice tells how many entries the stream has lost at its head so far; with
the ordinal of the last entry that was read, that gives the number that was lost unread.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from chasqui import scripts
from chasqui.errors import ChasquiError
from chasqui.request import Effect, Plan

WALK: Final = scripts.load("spark_walk")
#: Behind this id lies everything.
BEGINNING: Final = "0-0"
#: The most entries that one script call walks over: a good millisecond of the server's time.
SLICE: Final = 500
#: No task for fewer rows than this, unless it is asked for.
WORTH_A_TASK: Final = 1000
DEFAULT_TASKS: Final = 4

_MAX_SEQUENCE = 2**64 - 1
_ID = re.compile(r"\d{1,20}-\d{1,20}")


class DataLossError(ChasquiError):
    """Entries were trimmed before they were read."""

    def __init__(self, queue: str, table: str, lost: int | None, why: str = "") -> None:
        self.queue, self.table, self.lost = queue, table, lost
        counted = "an unknown number of" if lost is None else f"{lost:,}"
        super().__init__(
            f"{counted} entries of {table} of queue {queue!r} were gone before they were read"
            f"{why}: read more often, keep more of them, or go on with failOnDataLoss=false"
        )

    def __reduce__(self) -> tuple[type, tuple[str, str, int | None]]:
        return DataLossError, (self.queue, self.table, self.lost)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream: the id of an entry, and how many entries lie between the last mark and
    it, itself included."""

    id: str
    count: int


@dataclass(frozen=True, slots=True)
class Range:
    """Entries behind `after` up to `last`; `count` of them when it was made."""

    after: str
    last: str
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """How far a stream was read: an id, and its ordinal among all entries ever added.

    The ordinal is None where it cannot be known: where entries are deleted out of turn, or on a
    server that does not count them.
    """

    id: str
    ordinal: int | None


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found."""

    marks: tuple[Mark, ...]
    #: Where it ended: the place of the last entry walked over, or of the start.
    end: Place
    #: Entries between the start and the end that were trimmed unread; None if not known.
    lost: int | None

    @property
    def count(self) -> int:
        return sum(mark.count for mark in self.marks)


def order(entry_id: str) -> tuple[int, int]:
    """A stream id as something that compares as Redis compares them."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def before_ms(unix_ms: int) -> str:
    """The id right before everything that was added at a time or later."""
    return BEGINNING if unix_ms <= 0 else f"{unix_ms - 1}-{_MAX_SEQUENCE}"


def until_ms(unix_ms: int) -> str:
    """The last id that can have been added at a time or earlier."""
    return f"{unix_ms}-{_MAX_SEQUENCE}"


def full_id(text: str) -> str:
    """An id as Redis writes it: `1794` is short for `1794-0`."""
    return text if _ID.fullmatch(text) else f"{text}-0"


def walk(
    stream: bytes,
    start: Place,
    last: str = "+",
    *,
    most: int | None = None,
    step: int = SLICE,
    counts_loss: bool = True,
) -> Plan[Walked]:
    """Count the entries behind a place, up to an id or `most` of them."""
    marks: list[Mark] = []
    place, ordinal = start.id, start.ordinal
    lost: int | None = 0 if counts_loss and ordinal is not None else None
    left = most if most is not None else 2**53
    step = min(step, SLICE)
    while left > 0:
        slice_size = min(left, SLICE)
        added, length, _, _, *found = yield scripts.call(
            WALK, [stream], [place, last, step, slice_size], Effect.READ
        )
        if not counts_loss or added < 0:
            ordinal = lost = None
        elif ordinal is not None and lost is not None:
            trimmed = added - length
            if added < ordinal:  # the stream was deleted and made anew
                ordinal, lost = trimmed, None
            elif trimmed > ordinal:
                lost += trimmed - ordinal
                ordinal = trimmed
        new = [
            Mark(entry_id.decode(), count)
            for entry_id, count in zip(found[::2], found[1::2], strict=True)
        ]
        marks += new
        count = sum(mark.count for mark in new)
        if ordinal is not None:
            ordinal += count
        if new:
            place = new[-1].id
        left -= count
        if count < slice_size:
            break
    return Walked(tuple(marks), Place(place, ordinal), lost)


def tip(stream: bytes) -> Plan[Place]:
    """The end of a stream now."""
    added, _, _, last, *_ = yield scripts.call(WALK, [stream], ["0", "+", 1, 0], Effect.READ)
    return Place(last.decode(), None if added < 0 else added)


def head(stream: bytes) -> Plan[Place]:
    """The place right before the first entry that is still there."""
    added, length, _, _, *_ = yield scripts.call(WALK, [stream], ["0", "+", 1, 0], Effect.READ)
    return Place(BEGINNING, None if added < 0 else added - length)


def cut(after: str, marks: Sequence[Mark], most_rows: int, least_parts: int) -> list[Range]:
    """The walked entries as ranges of about the same size, about `most_rows` at most.

    With `least_parts` of 0 there are as many as seem worth a task.
    """
    total = sum(mark.count for mark in marks)
    parts = least_parts or min(DEFAULT_TASKS, max(1, total // WORTH_A_TASK))
    parts = max(parts, -(-total // most_rows))
    return list(_ranges(after, marks, total, parts))


def _ranges(after: str, marks: Sequence[Mark], total: int, parts: int) -> Iterator[Range]:
    passed = count = done = 0
    for mark in marks:
        passed += mark.count
        count += mark.count
        if passed * parts >= total * (done + 1):
            yield Range(after, mark.id, count)
            after, count = mark.id, 0
            done = passed * parts // total


def step_for(total: int, least_parts: int, most_rows: int) -> int:
    """Entries per mark: fine enough to cut even parts, coarse enough to be few."""
    parts = least_parts or DEFAULT_TASKS
    return max(1, min(SLICE, most_rows, -(-total // (4 * parts))))
