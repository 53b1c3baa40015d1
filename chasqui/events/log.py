"""Reading the events stream: an event, a reader's place in it, and gaps. Plans, no I/O.

A place is the id of the last event read, so a lost link costs nothing: the next read goes on from
there. If the server has trimmed events in between, a `gap` event stands in their place.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.model.config import MAX_MS, check_int
from chasqui.model.keys import (
    EVENT,
    EVENT_ATTEMPT,
    EVENT_BACKOFF_MS,
    EVENT_CREATED,
    EVENT_DELAY_MS,
    EVENT_DURATION_US,
    EVENT_JOB_ID,
    EVENT_TS,
    NAME,
    Keys,
)
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import exception_for, mapping

logger = logging.getLogger(__name__)

CLIENT_NAME: Final = "chasqui-events"
#: The event that stands for events that were trimmed before they were read.
GAP: Final = "gap"
BLOCK_MS: Final = 5_000
#: A blocking read fails this long after its reply was due.
READ_SLACK_S: Final = 5.0

_NUMBERS = frozenset(
    (EVENT_ATTEMPT, EVENT_BACKOFF_MS, EVENT_CREATED, EVENT_DELAY_MS, EVENT_DURATION_US, EVENT_TS)
)
_EVENT_ID = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """One event. `fields` holds all but its name and its job.

    An event named `gap` stands for events that were trimmed unread. Its fields are `after` and
    `before`, the ids around it, and `missed`, how many there were. That is None where the server
    does not count (Redis below 7), and then there may have been none.
    """

    name: str
    #: None if the event is about the queue, as `drained` is.
    job_id: str | None
    job_name: str
    #: `attempt`, `backoff_ms`, `created`, `delay_ms`, `duration_us` and `ts` are int, others str.
    fields: dict[str, Any]
    #: Its place in the stream: a reader that starts there reads what comes behind it.
    id: str = field(default="", kw_only=True, compare=False)


class EventLog:
    """A reader's place in the events stream, and the plans that read on from it."""

    def __init__(self, keys: Keys, last_event_id: str, *, block_ms: int, count: int) -> None:
        if not isinstance(last_event_id, str) or not (
            last_event_id == "$" or _EVENT_ID.fullmatch(last_event_id)
        ):
            raise ValueError(
                f"last_event_id must be '$', '0' or the id of an event, got {last_event_id!r}"
            )
        check_int("block_ms", block_ms, 0, MAX_MS, takes_none=False)
        check_int("count", count, 1, takes_none=False)
        self._key = keys.events
        self._queue = keys.queue
        #: The last event read; None: start with what is written after the first read.
        self.cursor = None if last_event_id == "$" else _order(last_event_id.encode())
        #: How many events were ever written up to the cursor; None if unknown.
        self._position: int | None = None
        #: The server has replied.
        self.has_read = False
        self._block_ms = block_ms or BLOCK_MS
        self._count = count

    @property
    def timeout_s(self) -> float:
        """How long a read may take."""
        return self._block_ms / 1000 + READ_SLACK_S

    def pin(self) -> Plan[tuple[int, int]]:
        """Turn `$` into a place: all events written from now on will be read, however late. The
        place of the last event read."""
        if self.cursor is None:
            info = yield commands(("XINFO", "STREAM", self._key), effect=Effect.READ, raises=False)
            self.has_read = True
            facts = _facts(info)
            self.cursor, self._position = facts.last, facts.added
        return self.cursor

    def read(self, block_ms: int | None = None) -> Plan[list[QueueEvent]]:
        """The next events, or none if none came within `block_ms`, by default the reader's own."""
        block_ms = block_ms or self._block_ms
        after = id_of((yield from self.pin()))
        # In one frame, so that a repeat over a new link checks for a gap again.
        request = commands(
            ("XINFO", "STREAM", self._key),
            ("XREAD", "COUNT", self._count, "BLOCK", block_ms, "STREAMS", self._key, after),
            effect=Effect.READ,
            raises=False,
            timeout_s=block_ms / 1000 + READ_SLACK_S,
        )
        info, reply = yield request
        if isinstance(reply, ReplyError):
            raise exception_for(reply)
        self.has_read = True
        gap = self._gap(_facts(info))
        events = [parse_event(*entry) for entry in _entries(reply)]
        if events:
            self.cursor = _order(events[-1].id.encode())
            if self._position is not None:
                self._position += len(events)
        return events if gap is None else [gap, *events]

    def _gap(self, facts: "_Facts") -> QueueEvent | None:
        """The event for events that are gone behind the cursor, if any; updates the position."""
        cursor, position = self.cursor, self._position
        assert cursor is not None
        if facts.last <= cursor:  # all events are read, or the stream was made anew
            self._position = facts.added if facts.last == cursor else None
            return None
        if facts.first is not None and facts.first <= cursor:
            return None
        # All events before the first one left are gone; or all events are.
        gone = None if facts.added is None else facts.added - facts.length
        self._position = gone
        if facts.first is None:
            self.cursor = facts.last
        missed = None if gone is None or position is None else gone - position
        wants_what_is_left = cursor == (0, 0) and position is None
        if wants_what_is_left or gone == 0 or (missed is not None and missed <= 0):
            return None
        after, before = id_of(cursor), id_of(facts.first or facts.last)
        logger.warning(
            "%s events of queue %s were trimmed before they were read",
            "some" if missed is None else missed,
            self._queue,
            extra={"queue": self._queue, "missed": missed},
        )
        return QueueEvent(GAP, None, "", {"after": after, "before": before, "missed": missed})


# ── What the server says ────────────────────────────────────────────────────────────────────────


def parse_event(entry_id: bytes, pairs: list[bytes]) -> QueueEvent:
    """An entry of the events stream as an event. Raises for no content."""
    found: dict[bytes, bytes] = dict(zip(pairs[::2], pairs[1::2], strict=True))
    name, job_id, job_name = (_text(found.pop(one, b"")) for one in (EVENT, EVENT_JOB_ID, NAME))
    fields = {
        _text(key): _number(value) if key in _NUMBERS else _text(value)
        for key, value in found.items()
    }
    return QueueEvent(name, job_id or None, job_name, fields, id=entry_id.decode())


@dataclass(frozen=True, slots=True)
class _Facts:
    """What XINFO STREAM says."""

    length: int = 0
    #: The id of the first entry; None if there is none.
    first: tuple[int, int] | None = None
    #: The last id that the stream gave.
    last: tuple[int, int] = (0, 0)
    #: How many entries were ever written; None if the server does not count them.
    added: int | None = None


def _facts(info: Any) -> _Facts:
    """A missing stream has no entries. Other errors show on the read."""
    if isinstance(info, ReplyError):
        return _Facts(added=0)
    info = mapping(info)
    first = info.get(b"first-entry")
    return _Facts(
        info[b"length"],
        _order(first[0]) if first else None,
        _order(info[b"last-generated-id"]),
        info.get(b"entries-added"),
    )


def _entries(reply: Any) -> Iterator[tuple[bytes, list[bytes]]]:
    """The entries in a reply to XREAD of one stream."""
    if reply:
        streams = reply.items() if isinstance(reply, dict) else reply
        for _, entries in streams:
            yield from entries


def _order(entry_id: bytes) -> tuple[int, int]:
    """An entry's id, as its place among others."""
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number or 0)


def id_of(place: tuple[int, int]) -> str:
    return f"{place[0]}-{place[1]}"


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _number(value: bytes) -> int | str:
    text = _text(value)
    try:
        return int(text)
    except ValueError:
        return text
