"""Moves of failed jobs out of the stream: to the delayed set for a retry, or to the DLQ. No I/O."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from chasqui._core.command import slices_by_size
from chasqui._core.entry import Entry
from chasqui._core.envelope import encode_delayed_member
from chasqui.events import kinds
from chasqui.model import payload
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
)
from chasqui.model.steps import Failed, StepId, step_of
from chasqui.producing.tracing import carried_by
from chasqui.scripts import flowing, settling
from chasqui.scripts.flowing import Bounds, StepBurial
from chasqui.scripts.settling import Burial, Consumer, Retry
from chasqui.transport.request import Request

#: The most that one script moves, in entries and in bytes of envelopes: it holds the server up.
MAX_MOVES: Final = 100
MOVE_BYTES: Final = 1 << 20
#: How much of an error's text the DLQ keeps.
ERROR_CHARS: Final = 2000
#: How much of a traceback it keeps: the end, where the error is.
TRACEBACK_BYTES: Final = 8192


@dataclass(slots=True, eq=False)
class Move:
    """One entry on its way out of the stream."""

    entry: Entry
    #: How many runs the job has behind it.
    runs: int
    #: To the delayed set: the ms until it is due. None: to the DLQ.
    delay_ms: int | None = None
    #: To the DLQ: the number of the last run, 0 if none; why, and what the handler raised.
    attempt: int = 0
    reason: str = ""
    detail: str | None = None
    error: str | None = None
    traceback: str | None = None
    #: How long the last run took; None if there was none.
    duration_us: int | None = None
    #: Called once the server has moved the entry.
    on_moved: Callable[[], None] = field(default=lambda: None)

    @property
    def step(self) -> StepId | None:
        """Which step of a flow goes to the DLQ; None if it is no such move."""
        return step_of(self.entry.job_id) if self.delay_ms is None else None


def parts(moves: list[Move]) -> Iterator[list[Move]]:
    """The moves in parts that one request each can make: to one place, and not too many."""
    retries = [move for move in moves if move.delay_ms is not None]
    burials = [move for move in moves if move.delay_ms is None and move.step is None]
    steps = [move for move in moves if move.step is not None]
    for alike in (retries, burials, steps):
        envelopes = [move.entry.envelope or b"" for move in alike]
        for part in slices_by_size(envelopes, MAX_MOVES, MOVE_BYTES):
            yield alike[part]


def retry(consumer: Consumer, moves: list[Move]) -> Request:
    """The request that puts entries into the delayed set; replies as `settling.retry` does."""
    retries: list[Retry] = []
    for move in moves:
        entry = move.entry
        member = encode_delayed_member(entry.name, entry.with_attempt(move.runs))
        trace = b" ".join(carried_by(entry))
        retries.append((entry.id, entry.job_id, move.delay_ms or 0, member, trace))
    return settling.retry(consumer, retries)


def bury(
    consumer: Consumer,
    moves: list[Move],
    *,
    max_len: int | None = None,
    events: bool = False,
    history: bool = False,
) -> Request:
    """The request that puts entries into the DLQ; takes and replies as `settling.bury` does."""
    burials = [_burial(consumer, move, events, history) for move in moves]
    return settling.bury(consumer, burials, max_len=max_len, events=events, history=history)


def bury_steps(
    consumer: Consumer, moves: list[Move], bounds: Bounds, *, events: bool, history: bool
) -> Request:
    """The same for steps of flows; replies as `flowing.bury` does."""
    burials = []
    for move in moves:
        place, job_id = move.step, move.entry.job_id
        assert place is not None
        error = move.error or move.detail
        text = None if error is None else _utf8(error[:ERROR_CHARS]).decode()
        stand_in = payload.encode(Failed(job_id, move.reason, text).to_data())
        burial = _burial(consumer, move, events, history)
        burials.append(StepBurial(job_id, place, stand_in, burial))
    return flowing.bury(consumer, burials, bounds, events=events, history=history)


def _burial(consumer: Consumer, move: Move, events: bool, history: bool) -> Burial:
    return Burial(
        move.entry.id,
        _dlq_fields(move, consumer.name),
        _event(move) if events else (),
        _history_entry(move) if history else (),
    )


def _dlq_fields(move: Move, consumer_id: str) -> list[Any]:
    """The fields of the entry in the DLQ: chasquimq's, then ours."""
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
    fields += (CONSUMER, consumer_id)
    for field_name, context in zip((TRACEPARENT, RUN_BEFORE), carried_by(entry), strict=False):
        fields += (field_name, context)
    return fields


def _event(move: Move) -> list[str]:
    """The fields of the `dlq` event."""
    entry = move.entry
    fields: dict[bytes, str] = {
        EVENT: kinds.DLQ.decode(),
        EVENT_JOB_ID: entry.job_id,
        EVENT_TS: str(time.time_ns() // 1_000_000),
        **({NAME: entry.name} if entry.name else {}),
        EVENT_ATTEMPT: str(move.attempt),
        REASON: move.reason,
    }
    if entry.untold_created_ms is not None:
        fields[EVENT_CREATED] = str(entry.untold_created_ms)
    return [text for name, value in fields.items() for text in (name.decode(), value)]


def _history_entry(move: Move) -> list[str]:
    """The fields of the history's entry, without the envelope: those of the event, and how long
    the run took."""
    fields = _event(move)
    if move.duration_us is not None:
        fields += (EVENT_DURATION_US.decode(), str(move.duration_us))
    return fields


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")
