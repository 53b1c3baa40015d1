"""Where a stream is read from and to: id arithmetic, counted boundaries, exact loss counts.

A range runs from behind one id up to and including another, so neighbouring ranges share an id and
never an entry. A walk over small pages counts its entries. It uses XRANGE, read by a builder that
keeps nothing: that takes a fifth of the server's time that a script takes, because a script turns
every field into a Lua string. Around each page the server says how many entries the stream has lost
at its head. With the ordinal of the last entry read, that gives the number lost unread.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chasqui._core.columns import ColumnBuilder
from chasqui._core.reply import ReplyError
from chasqui.errors import ChasquiError
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import exception_for, mapping

#: Every entry is behind this id.
BEGINNING: Final = "0-0"
#: The most entries between two marks.
SLICE: Final = 250
#: No task for fewer rows than this, unless minPartitions asks for it.
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
    """An entry of a stream: its id, and how many entries there are from behind the last mark up to
    and including it."""

    id: str
    count: int


@dataclass(frozen=True, slots=True)
class Range:
    """Entries behind `after` up to `last`; `count` of them when it was made."""

    after: str
    last: str
    count: int


@dataclass(frozen=True, slots=True)
class Position:
    """How far a stream was read: an id, and its ordinal among all entries ever added.

    The ordinal is None if it is unknown: entries may be deleted anywhere, or the server does not
    count what it adds.
    """

    id: str
    ordinal: int | None


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found."""

    marks: tuple[Mark, ...]
    #: Where it ended: at the last entry walked over, or at the start.
    end: Position
    #: Entries between the start and the end that were trimmed unread; None if not known.
    lost: int | None

    @property
    def count(self) -> int:
        return sum(mark.count for mark in self.marks)

    def __add__(self, more: "Walked") -> "Walked":
        """This walk, and the one that began where it ended."""
        is_known = self.lost is not None and more.lost is not None
        lost = self.lost + more.lost if is_known else None  # type: ignore[operator]
        return Walked(self.marks + more.marks, more.end, lost)


def order(entry_id: str) -> tuple[int, int]:
    """A stream id in a form that compares as Redis compares ids."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def time_of(entry_id: str) -> datetime:
    """When an entry was added."""
    return datetime.fromtimestamp(order(entry_id)[0] / 1000, UTC)


def before_ms(unix_ms: int) -> str:
    """The id right before the first that can be added at a time."""
    return BEGINNING if unix_ms <= 0 else f"{unix_ms - 1}-{_MAX_SEQUENCE}"


def until_ms(unix_ms: int) -> str:
    """The last id that can be added at a time."""
    return f"{unix_ms}-{_MAX_SEQUENCE}"


def full_id(text: str) -> str:
    """An id as Redis writes it: `1794` is short for `1794-0`."""
    return text if _ID.fullmatch(text) else f"{text}-0"


def walk(
    stream: bytes,
    start: Position,
    pacing: ReadPacing,
    last: str = "+",
    *,
    most: int | None = None,
    step: int = SLICE,
    counts_loss: bool = True,
) -> Plan[Walked]:
    """Count the entries behind a position, up to an id or `most` of them."""
    builder = ColumnBuilder(())
    marks: list[Mark] = []
    reached, ordinal = start.id, start.ordinal
    lost: int | None = 0 if counts_loss and ordinal is not None else None
    left = most if most is not None else 2**53
    while left > 0:
        size, known = pacing.ask(min(left, step)), builder.size
        words = ("XRANGE", stream, f"({reached}", last, "COUNT", size)
        if lost is None:
            count, newest = yield commands(words, effect=Effect.READ, builder=builder)
        else:
            facts, count, newest = yield from _page_with_facts(stream, words, builder)
            ordinal, lost = _after_trimming(facts, ordinal, lost)
        if count:
            reached = newest.decode()
            marks.append(Mark(reached, count))
            if ordinal is not None:
                ordinal += count
        left -= count
        if count < size:
            break
        pacing.rest(count, builder.size - known)
    return Walked(tuple(marks), Position(reached, ordinal if counts_loss else None), lost)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the server says about a stream."""

    #: Entries ever added; None if the server does not count them.
    added: int | None
    length: int
    last_id: str
    #: None if the stream is empty.
    first_id: str | None = None

    @property
    def trimmed(self) -> int | None:
        return None if self.added is None else self.added - self.length


def _page_with_facts(
    stream: bytes, words: tuple[Any, ...], builder: ColumnBuilder
) -> Plan[tuple[_Facts, int, Any]]:
    """A page, and the facts about the stream at that moment."""
    while True:
        page = commands(words, effect=Effect.READ, builder=builder)
        # Ask before and after: if nothing was trimmed in between, the facts are of one moment.
        replies = yield iter((_info(stream), page, _info(stream)))
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        before, (count, newest), after = replies
        facts = _facts(after)
        if _facts(before).trimmed == facts.trimmed:
            return facts, count, newest


def _after_trimming(
    facts: _Facts, ordinal: int | None, lost: int | None
) -> tuple[int | None, int | None]:
    """The ordinal before a page and the entries lost so far, corrected by what was trimmed."""
    trimmed = facts.trimmed
    if trimmed is None or facts.added is None or ordinal is None or lost is None:
        return None, None
    if facts.added < ordinal:  # the stream was deleted and created again
        return trimmed, None
    if trimmed > ordinal:
        return trimmed, lost + trimmed - ordinal
    return ordinal, lost


def _info(stream: bytes) -> Request:
    return commands(("XINFO", "STREAM", stream), effect=Effect.READ, raises=False)


def _facts(reply: Any) -> _Facts:
    if isinstance(reply, ReplyError):
        if reply.code != "ERR":
            raise exception_for(reply)
        return _Facts(0, 0, BEGINNING)  # there is no such stream
    pairs = mapping(reply)
    first = pairs[b"first-entry"]
    return _Facts(
        pairs.get(b"entries-added"),
        pairs[b"length"],
        pairs[b"last-generated-id"].decode(),
        None if first is None else first[0].decode(),
    )


def tip(stream: bytes) -> Plan[Position]:
    """The end of a stream now."""
    facts = _facts((yield _info(stream)))
    return Position(facts.last_id, facts.added)


def head(stream: bytes) -> Plan[Position]:
    """The position right before the first entry that is left."""
    facts = _facts((yield _info(stream)))
    return Position(BEGINNING, facts.trimmed)


def oldest(stream: bytes) -> Plan[tuple[str | None, int | None]]:
    """The id of the first entry that is left, and how many were before it, if known."""
    facts = _facts((yield _info(stream)))
    return facts.first_id, facts.trimmed


def cut(after: str, marks: Sequence[Mark], most_rows: int, least_parts: int) -> list[Range]:
    """The walked entries as ranges of about the same size, `most_rows` at most.

    With `least_parts=0` there are as many as are worth a task. A mark is never cut in two.
    """
    total = sum(mark.count for mark in marks)
    parts = least_parts or min(DEFAULT_TASKS, max(1, total // WORTH_A_TASK))
    parts = max(parts, -(-total // most_rows))
    return list(_ranges(after, marks, total, parts, most_rows))


def _ranges(
    after: str, marks: Sequence[Mark], total: int, parts: int, most_rows: int
) -> Iterator[Range]:
    passed = count = done = 0
    behind = after
    for mark in marks:
        if count and count + mark.count > most_rows:
            yield Range(after, behind, count)
            after, count = behind, 0
        passed += mark.count
        count += mark.count
        behind = mark.id
        if passed * parts >= total * (done + 1):
            yield Range(after, mark.id, count)
            after, count = mark.id, 0
            done = passed * parts // total


def step_for(total: int, least_parts: int, most_rows: int) -> int:
    """Entries per mark: fine enough to cut even parts, coarse enough to be few."""
    parts = least_parts or DEFAULT_TASKS
    return max(1, min(SLICE, most_rows, -(-total // (4 * parts))))
