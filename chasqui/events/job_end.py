"""How a job ended: what events, the dead-letter queue and a stored result say about it. No I/O.

Waiters read the events on from now and, at the same time, back to when the job was added or, where
that is unknown, to the oldest event: the newest pages at once, the others with pauses in between,
so that no waiter keeps a core busy. Where events cannot be read, waiters poll for the result.

Only the server's clock decides which job an event belongs to. An id that `add` makes up is never
used twice; for any other id the server knows when it was taken.
"""

import math
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any, Final

from chasqui.errors import JobFailedError
from chasqui.events.kinds import COMPLETED, DLQ
from chasqui.events.log import BLOCK_MS, EventLog, QueueEvent
from chasqui.managing import dlq
from chasqui.model.job import is_drawn
from chasqui.model.keys import REASON, Keys, check_ids, shown
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import time_us

#: How far before a time that the caller names to start, because clocks differ.
EARLIER_MS: Final = 1000
#: Events in one read.
READ_COUNT: Final = 1000
#: Pages of the past to read at once, and the pause before each further page: a full log is read
#: within ten seconds, for a few percent of a core.
PAGES_AT_ONCE: Final = 4
PAGE_PAUSE_S: Final = 0.1
#: A dead job reaches the dead-letter queue at most this long before its event.
FOUND_WITHIN_MS: Final = 60_000
#: How often, and with which pause, to look for a result after the job is done: chasquimq's workers
#: announce the end first and store the result after that.
GRACE_LOOKS, GRACE_S = 5, 0.02
#: The longest pause between two looks for a result: no sleep takes every number.
MAX_POLL_S: Final = 3600.0

_COMPLETED = COMPLETED.decode()
_DLQ = DLQ.decode()


@dataclass(frozen=True, slots=True)
class End:
    """The end of a job: it is done, or it is in the dead-letter queue."""

    #: In unix milliseconds, by the server's clock.
    at_ms: int
    #: Why the job is in the dead-letter queue; None if it is done.
    reason: str | None = None

    @property
    def is_dead(self) -> bool:
        return self.reason is not None


def may_be_end(entry: Any) -> bool:
    """Whether an entry of the events stream may announce an end: most do not, and need no
    parsing."""
    fields = entry[1]
    return COMPLETED in fields or DLQ in fields


def end_in(event: QueueEvent) -> End | None:
    """The end that an event announces; None for any other event."""
    if event.name not in (_COMPLETED, _DLQ):
        return None
    reason = str(event.fields.get(REASON.decode(), "")) if event.name == _DLQ else None
    return End(int(event.id.partition("-")[0]), reason)


def raise_if_dead(keys: Keys, job_id: str, end: End) -> Plan[None]:
    """Raise JobFailedError if the job is still in the dead-letter queue; if it was replayed, it may
    yet be done."""
    dead = yield from dlq.find(keys, job_id, end.at_ms - FOUND_WITHIN_MS, end.at_ms)
    if dead is not None:
        raise JobFailedError(job_id, end.reason or "", dead.error or dead.detail)


def added_ms(keys: Keys, job_id: str, since_ms: int | None) -> Plan[int]:
    """When the job was added, by the server's clock: an earlier end belongs to an earlier job with
    the same id. 0 where that is unknown or cannot happen. The caller's `since_ms` is by the clock
    of this machine."""
    if since_ms:
        told = yield commands(("TIME",), effect=Effect.READ)
        ahead_ms = time_us(told) // 1000 - time.time_ns() // 1_000_000
        return max(0, since_ms + ahead_ms - EARLIER_MS)
    if since_ms == 0 or is_drawn(job_id):
        return 0
    mget = ("MGET", keys.unique(job_id), keys.dlid(job_id))
    values = yield commands(mget, effect=Effect.READ, raises=False)
    if not isinstance(values, list):
        return 0  # this user may not read them
    # Two times: of creation by the producer's clock, of arrival by the server's. chasquimq writes
    # less.
    marks = [value.split() for value in values if value is not None]
    return max((int(mark[1]) for mark in marks if len(mark) == 2), default=0)


def events_from_now(keys: Keys) -> EventLog:
    """A reader of the events that are written from its first read on."""
    return EventLog(keys, "$", block_ms=BLOCK_MS, count=READ_COUNT)


class Past:
    """Reads events backwards from a place in the log."""

    def __init__(self, keys: Keys, before: str, from_ms: int = 0) -> None:
        self._keys = keys
        #: Events before this id are still to be read; None: all are read.
        self.before: str | None = before
        self._from_ms = from_ms
        self._pages = 0
        self._next_s = 0.0

    @property
    def wait_s(self) -> float:
        """How long until the next page is due."""
        return max(0.0, self._next_s - time.monotonic())

    def read(self) -> Plan[list[Any]]:
        """The entries of the next page, newest first."""
        entries: list[Any] = yield commands(
            ("XREVRANGE", self._keys.events, self.before, self._from_ms, "COUNT", READ_COUNT),
            effect=Effect.READ,
        )
        is_last = len(entries) < READ_COUNT
        self.before = None if is_last else f"({entries[-1][0].decode()}"
        self._pages += 1
        if self._pages >= PAGES_AT_ONCE:
            self._next_s = time.monotonic() + PAGE_PAUSE_S
        return entries


class ResultWait:
    """Decides how long to wait until a job has a stored result."""

    needs_result = True

    def __init__(
        self, job_id: str, timeout_s: float | None, poll_interval_s: float, since_ms: int | None
    ) -> None:
        check_ids([job_id])
        if since_ms is not None and (
            isinstance(since_ms, bool) or not isinstance(since_ms, int) or since_ms < 0
        ):
            raise ValueError(f"since_ms must be a non-negative int or None, got {shown(since_ms)}")
        self.job_id = job_id
        self.since_ms = since_ms
        self._timeout_s = math.inf if timeout_s is None else _seconds("timeout", timeout_s)
        self._poll_interval_s = min(_seconds("poll_interval", poll_interval_s), MAX_POLL_S)
        self._started_s = time.monotonic()
        self._may_warn = self.needs_result
        self._grace_looks = GRACE_LOOKS

    def pause_s(self, end: End | None) -> float | None:
        """How long to wait before the next look for a result, which was not there; None if the job
        is done without one. Raises TimeoutError if this was the last look."""
        if end is not None and not self.needs_result:
            self._grace_looks -= 1
            return GRACE_S if self._grace_looks >= 0 else None
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._timeout_s:
            raise TimeoutError(f"job {self.job_id} has no result after {self._timeout_s:g} s")
        if waited_s > 1 and self._may_warn:
            self._may_warn = False
            warnings.warn(
                "wait_for_result has been waiting for more than 1 s: does the worker have "
                "store_results=True, and does its handler return something?",
                RuntimeWarning,
                stacklevel=5,  # who called Job.wait_for_result
            )
        return min(self._poll_interval_s, self._timeout_s - waited_s)


class EndWait(ResultWait):
    """The same, until the job is done, with or without a stored result."""

    needs_result = False


def _seconds(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{what} must be a positive number of seconds, got {shown(value)}")
    return float(min(value, sys.maxsize))  # as good as forever
