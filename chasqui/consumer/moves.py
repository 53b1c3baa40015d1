"""Moves of failed jobs out of the stream, as the scripts take them: to the delayed set for a retry,
or to the dead-letter queue. No I/O."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from chasqui import events, scripts
from chasqui._core.entry import Entry
from chasqui._core.envelope import encode_delayed_member
from chasqui._core.payload import pack
from chasqui.model.keys import (
    ATTEMPTS,
    CONSUMER,
    DETAIL,
    ENVELOPE,
    ERROR,
    EVENT,
    EVENT_ATTEMPT,
    EVENT_CREATED,
    EVENT_DURATION_US,
    EVENT_JOB_ID,
    EVENT_TS,
    FAILED_AT,
    NAME,
    REASON,
    RUN_BEFORE,
    SOURCE_ID,
    TRACEBACK,
    TRACEPARENT,
    Keys,
)
from chasqui.transport.request import Effect, Request
from chasqui.producing.tracing import carried_by

#: What the scripts answer for an entry that was moved.
MOVED: Final = ord("1")
#: What is kept of an error's text.
ERROR_CHARS: Final = 2000
#: What is kept of a traceback: its end, where the error is.
TRACEBACK_BYTES: Final = 8192
ANY_SIZE: Final = 1 << 40


@dataclass(slots=True, eq=False)
class Move:
    """One entry on its way out of the stream."""

    entry: Entry
    #: Runs behind it.
    runs: int
    #: To the delayed set: due in so many ms.
    delay_ms: int | None = None
    #: To the DLQ: the run that was the last, 0 if there was none; why, and what the handler raised.
    attempt: int = 0
    reason: str = ""
    detail: str | None = None
    error: str | None = None
    traceback: str | None = None
    #: How long that run took; None if there was none.
    duration_us: int | None = None
    #: Called once the entry has really moved.
    on_moved: Callable[[], None] = field(default=lambda: None)


def retry(keys: Keys, group: str, consumer: str, moves: list[Move]) -> Request:
    """Put entries into the delayed set, each after its delay; per entry MOVED, or not ours."""
    arguments: list[Any] = [group, consumer]
    names = [keys.stream, keys.delayed, keys.wake, keys.traces]
    for move in moves:
        entry = move.entry
        member = encode_delayed_member(entry.name, entry.with_attempt(move.runs))
        trace = b" ".join(carried_by(entry))
        names.append(keys.didx(entry.job_id))
        if trace:
            names.append(keys.trace(entry.job_id))
        arguments += (entry.id, move.delay_ms, member, trace)
    return scripts.call(scripts.RETRY, names, arguments, Effect.IDEMPOTENT)


def bury(
    keys: Keys,
    group: str,
    consumer: str,
    moves: list[Move],
    *,
    max_len: int | None = None,
    tells: bool,
    keeps: bool = False,
) -> Request:
    """Put entries into the dead-letter queue, which keeps `max_len`; per entry MOVED, or not ours.
    `tells` writes an event for each, `keeps` an entry of the history."""
    told = [_dlq_event(move) for move in moves] if tells else []
    arguments: list[Any] = [group, consumer, "" if max_len is None else max_len]
    kept = [_history_entry(move) for move in moves] if keeps else []
    arguments += (keys.events if tells else b"", pack(told, ANY_SIZE))
    arguments += (keys.history if keeps else b"", pack(kept, ANY_SIZE))
    for move in moves:
        fields = _dlq_fields(move, consumer)
        arguments += (move.entry.id, len(fields), *fields)
    return scripts.call(scripts.BURY, [keys.stream, keys.dlq], arguments, Effect.IDEMPOTENT)


def _dlq_fields(move: Move, consumer: str) -> list[Any]:
    """chasquimq's fields, then ours."""
    entry = move.entry
    fields: list[Any] = [ENVELOPE, entry.envelope or b""]
    if entry.name:
        fields += (NAME, entry.name)
    fields += (SOURCE_ID, entry.id, REASON, move.reason)
    if move.detail is not None:
        fields += (DETAIL, move.detail)
    if move.error is not None:
        fields += (ERROR, _utf8(move.error[:ERROR_CHARS]))
    if move.traceback is not None:
        fields += (TRACEBACK, _utf8(move.traceback)[-TRACEBACK_BYTES:])
    fields += (ATTEMPTS, move.runs, FAILED_AT, time.time_ns() // 1_000_000)
    fields += (CONSUMER, consumer)
    for field_name, context in zip((TRACEPARENT, RUN_BEFORE), carried_by(entry), strict=False):
        fields += (field_name, context)
    return fields


def _dlq_event(move: Move) -> list[str]:
    """The fields of the event that tells whoever waits for a job that it is dead. As text: scripts
    can unpack no bytes."""
    entry = move.entry
    fields: dict[bytes, str] = {
        EVENT: events.DLQ.decode(),
        EVENT_JOB_ID: entry.job_id,
        EVENT_TS: str(time.time_ns() // 1_000_000),
        **({NAME: entry.name} if entry.name else {}),
        EVENT_ATTEMPT: str(move.attempt),
        REASON: move.reason,
    }
    if entry.untold_created_ms is not None:
        fields[EVENT_CREATED] = str(entry.untold_created_ms)
    return [text for field, value in fields.items() for text in (field.decode(), value)]


def _history_entry(move: Move) -> list[str]:
    """The fields of the history's entry, but the envelope: that of the event, and how long the run
    took."""
    fields = _dlq_event(move)
    if move.duration_us is not None:
        fields += (EVENT_DURATION_US.decode(), str(move.duration_us))
    return fields


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")
