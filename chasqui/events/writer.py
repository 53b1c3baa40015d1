"""Lifecycle events in the queue's events stream: best effort, never in a job's way.

They are encoded into one buffer and leave with the acknowledgements. The stream is trimmed now and
then, not by every XADD. While there is no link, events are dropped, but for the end of a job, which
callers wait for: the acknowledgement itself writes `completed`, and the move to the dead-letter
queue writes `dlq`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xadd_event, xadd_run_event
from chasqui._core.entry import Entry
from chasqui._core.reply import ReplyError
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.events.kinds import ACTIVE, DLQ, DRAINED, FAILED, RETRY_SCHEDULED, WAITING
from chasqui.managing.retention import Log, Trimmer
from chasqui.model.keys import (
    EVENT_ATTEMPT,
    EVENT_BACKOFF_MS,
    EVENT_CREATED,
    EVENT_DURATION_US,
    EVENT_TYPE,
    REASON,
    Keys,
)
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request

logger = logging.getLogger(__name__)

#: An `active` event is in Redis at most this long after the run began.
FLUSH_S: Final = 0.005
FLUSH_BYTES: Final = 256 * 1024
#: The text of an exception may be long: it is cut here.
REASON_CHARS: Final = 1000
#: How often to log that events cannot be written.
LOG_EVERY_S: Final = 10.0


class EventWriter:
    """Writes the events of one queue."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._key = keys.events
        self._buffer = CommandBuffer()
        self._timer: asyncio.TimerHandle | None = None
        self._trimmer = Trimmer(Log.events(keys))
        self._replies = _Replies(keys.queue)
        #: Takes the replies to events that other code sent.
        self.take_replies = self._replies.set_result
        #: Called when it is time to send: a worker calls `run_once` there, and sends more with it.
        self.on_due: Callable[[], object] = self.run_once

    def active(self, entry: Entry) -> None:
        xadd_run_event(
            self._buffer, self._key, ACTIVE, entry, time.time_ns() // 1_000_000, entry.attempt + 1
        )
        if self._timer is None:
            self._arm()

    def failed(self, entry: Entry, kind: str, reason: str, duration_us: int) -> None:
        """A run raised an exception: `kind` is its type, `reason` its text."""
        attempt = entry.attempt + 1
        fields: tuple[Any, ...] = (EVENT_ATTEMPT, attempt, REASON, _short(reason))
        fields += (EVENT_DURATION_US, duration_us, EVENT_TYPE, _short(kind))
        self._write(FAILED, entry, fields)

    def retry_scheduled(self, entry: Entry, attempt: int, backoff_ms: int) -> None:
        self._write(RETRY_SCHEDULED, entry, (EVENT_ATTEMPT, attempt, EVENT_BACKOFF_MS, backoff_ms))

    def promoted(
        self, jobs: Iterable[tuple[bytes, bytes, bytes | None]], malformed: int, now_ms: int
    ) -> None:
        """Send the events of one promotion: of each job its id, its name, and when it was created
        if its id does not tell; and how many members were not jobs."""
        buffer, key = self._buffer, self._key
        for _ in range(malformed):
            fields = (EVENT_ATTEMPT, 0, REASON, b"malformed")
            xadd_event(buffer, key, DLQ, "", now_ms, "", fields)
        for job_id, name, created in jobs:
            own = None if created is None else (EVENT_CREATED, created)
            texts = job_id.decode(errors="replace"), name.decode(errors="replace")
            xadd_event(buffer, key, WAITING, texts[0], now_ms, texts[1], own)
        self.run_once()

    def drained(self) -> None:
        self._write(DRAINED, None, ())

    def run_once(self) -> int:
        """Send the events in the buffer; how many there were."""
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
        """Count events that were written, here or by a script, and trim the stream if it is time.
        Those of acknowledgements need no counting: each has an `active` before it."""
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
    """Takes the replies to events, which nobody waits for; logs errors now and then."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._next_s = 0.0

    def done(self) -> bool:
        return False

    def set_result(self, replies: Any, /) -> None:
        # If something is wrong with the key, each of them shows it.
        reply = replies[0] if type(replies) is list else replies
        if type(reply) is ReplyError:
            self._log(reply.message)

    def set_exception(self, error: Exception, /) -> None:
        if not isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection logs it
            self._log(str(error))

    def _log(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            fields = {"queue": self._queue}
            logger.warning(
                "queue %s: events could not be written: %s", self._queue, what, extra=fields
            )


def _short(reason: str) -> bytes:
    return reason[:REASON_CHARS].encode(errors="replace")
