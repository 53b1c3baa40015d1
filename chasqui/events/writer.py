"""Lifecycle events in the queue's events stream: best effort, never in a job's way.

They are encoded into one buffer and leave with the acknowledgements; the stream is trimmed now and
then instead of by every XADD. While there is no link they are dropped. How a job ended is not:
whoever waits for it must hear of it. So `completed` is a part of the acknowledgement, which the
acker sends, and `dlq` a part of the move to the dead-letter queue, which the relocator makes.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xadd_event, xadd_run_event
from chasqui._core.entry import Entry
from chasqui._core.reply import ReplyError
from chasqui.transport.connection import Connection
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.model.keys import (
    EVENT_ATTEMPT,
    EVENT_BACKOFF_MS,
    EVENT_CREATED,
    EVENT_DURATION_US,
    EVENT_TYPE,
    REASON,
    Keys,
)
from chasqui.transport.request import Effect, Request
from chasqui.managing.retention import Log, Trimmer

logger = logging.getLogger(__name__)

WAITING: Final = b"waiting"
ACTIVE: Final = b"active"
COMPLETED: Final = b"completed"
FAILED: Final = b"failed"
RETRY_SCHEDULED: Final = b"retry-scheduled"
DLQ: Final = b"dlq"
DRAINED: Final = b"drained"

#: An `active` event is in Redis this long after the run began, at the latest.
FLUSH_S: Final = 0.005
FLUSH_BYTES: Final = 256 * 1024
#: The reason of a failed run is somebody's str(): it is cut where it stops being read.
REASON_CHARS: Final = 1000
#: How often to say that events cannot be written.
COMPLAIN_S: Final = 10.0


class EventWriter:
    """Writes the events of one queue."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.events
        self._buffer = CommandBuffer()
        self._timer: asyncio.TimerHandle | None = None
        self._trimmer = Trimmer(Log.events(keys))
        self._replies = _Replies(keys.queue)
        #: Takes the replies to events that somebody else sent.
        self.take_replies = self._replies.set_result
        #: Called when it is time for `run_once`, by one who calls that and may send more behind it.
        self.on_due: Callable[[], object] = self.run_once

    def active(self, entry: Entry) -> None:
        xadd_run_event(
            self._buffer, self._key, ACTIVE, entry, time.time_ns() // 1_000_000, entry.attempt + 1
        )
        if self._timer is None:
            self._arm()

    def failed(self, entry: Entry, kind: str, reason: str, duration_us: int) -> None:
        """A run raised: `kind` is the type of what it raised, `reason` its text."""
        attempt = entry.attempt + 1
        fields: tuple[Any, ...] = (EVENT_ATTEMPT, attempt, REASON, _short(reason))
        fields += (EVENT_DURATION_US, duration_us, EVENT_TYPE, _short(kind))
        self._write(FAILED, entry, fields)

    def retry_scheduled(self, entry: Entry, attempt: int, backoff_ms: int) -> None:
        self._write(RETRY_SCHEDULED, entry, (EVENT_ATTEMPT, attempt, EVENT_BACKOFF_MS, backoff_ms))

    def drained(self) -> None:
        self._write(DRAINED, None, ())

    def run_once(self) -> int:
        """Send what has gathered; how many events that was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        buffer = self._buffer
        count = buffer.commands
        if count == 0:
            return 0
        if self._connection.is_connected:
            request = Request(bytes(buffer), Effect.ONCE, count=count, raises=False)
            self._connection.post(request, self._replies)
            self.wrote(count)
        buffer.clear()
        return count

    def wrote(self, count: int) -> None:
        """So many events were written, here or by a script: trim the stream if it is time. Those of
        acknowledgements need not be counted: each has an `active` before it."""
        trim = self._trimmer.wrote(count)
        if trim is not None and self._connection.is_connected:
            self._connection.post(trim, self._replies)

    def _write(self, event: bytes, entry: Entry | None, fields: tuple[Any, ...]) -> None:
        buffer, job_id, name = self._buffer, "", ""
        if entry is not None:
            job_id, name, created_ms = entry.job_id, entry.name, entry.untold_created_ms
            if created_ms is not None:
                fields += (EVENT_CREATED, created_ms)
        xadd_event(buffer, self._key, event, job_id, time.time_ns() // 1_000_000, name, fields)
        if self._timer is None:
            self._arm()
        elif len(buffer) >= FLUSH_BYTES:
            self.run_once()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.on_due()


class _Replies:
    """Takes the replies to events, which nobody waits for; tells of errors now and then."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._next_s = 0.0

    def done(self) -> bool:
        return False

    def set_result(self, replies: Any, /) -> None:
        # What is wrong with the key shows in each of them.
        reply = replies[0] if type(replies) is list else replies
        if type(reply) is ReplyError:
            self._complain(reply.message)

    def set_exception(self, error: Exception, /) -> None:
        if not isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection tells
            self._complain(str(error))

    def _complain(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + COMPLAIN_S
            fields = {"queue": self._queue}
            logger.warning(
                "queue %s: events could not be written: %s", self._queue, what, extra=fields
            )


def _short(reason: str) -> bytes:
    return reason[:REASON_CHARS].encode(errors="replace")
