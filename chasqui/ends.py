"""How jobs end, told to those who wait by the queue's events.

On an event loop one reader serves all waiters: it starts with the first of them, where his job was
added, and stops when there has been none for a while. A thread that waits reads by itself, see
follower.py. Where events cannot be read nobody is told anything, and waiters look for themselves.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from chasqui import dlq, events
from chasqui.connection import Connection
from chasqui.errors import AuthenticationError, JobFailedError
from chasqui.event_log import BLOCK_MS, EventLog, QueueEvent
from chasqui.keys import REASON, Keys
from chasqui.request import Effect, Plan, commands

logger = logging.getLogger(__name__)

#: How long the reader outlives its last waiter.
LINGER_S: Final = 5.0
#: After the events could not be read.
AGAIN_S: Final = 0.5
#: How much earlier than a job was added to start, for what the clocks may differ by.
EARLIER_MS: Final = 1000
READ_COUNT: Final = 1000
#: How long before its event a job went to the dead-letter queue, at most.
FOUND_WITHIN_MS: Final = 60_000
#: A result is looked for so often and so long after the job is done: chasquimq's workers tell
#: that first and store it then.
GRACE_LOOKS, GRACE_S = 5, 0.02
#: Ends that are remembered for waiters to come.
KNOWN_MAX: Final = 50_000

_COMPLETED = events.COMPLETED.decode()
_DLQ = events.DLQ.decode()


@dataclass(frozen=True, slots=True)
class End:
    """A job is over: done, or in the dead-letter queue."""

    #: When, in unix milliseconds by the server's clock.
    at_ms: int
    #: Why it is in the dead-letter queue; None if it is done.
    reason: str | None = None

    @property
    def is_dead(self) -> bool:
        return self.reason is not None


def raise_if_dead(keys: Keys, job_id: str, end: End) -> Plan[None]:
    """Raise what is known of a job in the dead-letter queue; nothing if it is not there any more:
    replayed, it may yet be done."""
    dead = yield from dlq.find(keys, job_id, end.at_ms - FOUND_WITHIN_MS, end.at_ms)
    if dead is not None:
        raise JobFailedError(job_id, end.reason or "", dead.error or dead.detail)


class Watch:
    """What one waiter is told of his job."""

    __slots__ = ("_news", "end", "since_ms")

    def __init__(self, since_ms: int) -> None:
        #: What was before is of no interest: another job may have had the id.
        self.since_ms = since_ms
        self.end: End | None = None
        self._news = asyncio.Event()

    async def wait(self, limit_s: float) -> None:
        """Return when the job has ended, or after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def tell(self, end: End) -> None:
        self.end = end
        self._news.set()

    def forget(self, end: End) -> None:
        if self.end is end:
            self.end = None
            self._news.clear()


class JobEnds:
    """Tells waiters how their jobs ended. Belongs to one event loop."""

    def __init__(self, keys: Keys, connect: Callable[[], Connection]) -> None:
        self._keys = keys
        self._connect = connect
        self._watches: dict[str, list[Watch]] = {}
        self._known: dict[str, End] = {}
        #: All that ended since then is known, or will be read; by our clock.
        self._known_from_ms = 0
        #: How far the server's clock is ahead of ours.
        self._ahead_ms = 0
        self._reading: asyncio.Task[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None
        #: The server lets us read no events.
        self._is_refused = False

    @contextmanager
    def watch(self, job_id: str, since_ms: int | None) -> Iterator[Watch]:
        """Be told how a job ends, or has ended since then; None: as far back as events reach."""
        since_ms = since_ms or 0
        watch = Watch(since_ms)
        self._watches.setdefault(job_id, []).append(watch)
        self._start(since_ms)
        if (end := self._known.get(job_id)) is not None:
            self._tell(watch, end)
        try:
            yield watch
        finally:
            watches = self._watches[job_id]
            watches.remove(watch)
            if not watches:
                del self._watches[job_id]
            if not self._watches and self._reading is not None:
                loop = asyncio.get_running_loop()
                self._lingering = loop.call_later(LINGER_S, self.stop)

    def forget(self, job_id: str, end: End) -> None:
        """The job did not end there after all: wait for another end."""
        if self._known.get(job_id) is end:
            del self._known[job_id]
        for watch in self._watches.get(job_id, ()):
            watch.forget(end)

    def stop(self) -> None:
        """Read no more. The next waiter starts it again."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._known.clear()
        self._is_refused = False

    async def close(self) -> None:
        """Stop, and let go of the connection."""
        reading = self._reading
        if reading is not None and reading.get_loop().is_closed():
            self._reading = reading = None  # it ended with its event loop
        self.stop()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    def _start(self, since_ms: int) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._reading is not None and since_ms < self._known_from_ms:
            self.stop()  # it began too late for this one: begin again
        if self._reading is not None and self._reading.done() and not self._is_refused:
            self._reading = None
        if self._reading is None:
            self._known_from_ms = since_ms
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        """Read until cancelled."""
        connection = self._connect()
        log: EventLog | None = None
        try:
            while True:
                try:
                    if log is None:
                        begin = _begin(self._keys, self._known_from_ms)
                        begun, self._ahead_ms = await connection.run(begin)
                        log = begun
                    for event in await connection.run(log.read()):
                        self._take(event)
                except AuthenticationError as error:
                    self._is_refused = True
                    queue = self._keys.queue
                    logger.info(
                        "events of queue %s are not readable: %s",
                        queue,
                        error,
                        extra={"queue": queue},
                    )
                    return
                except Exception as error:  # a credential provider may raise anything
                    queue = self._keys.queue
                    fields = {"queue": queue}
                    logger.debug(
                        "events of queue %s cannot be read: %s", queue, error, extra=fields
                    )
                    await asyncio.sleep(AGAIN_S)
        finally:
            await connection.close()

    def _there(self, at_ms: int) -> int:
        """A moment of ours by the server's clock, or a little earlier."""
        return there(at_ms, self._ahead_ms)

    def _take(self, event: QueueEvent) -> None:
        end = end_in(event)
        if end is None or event.job_id is None:
            return
        self._remember(event.job_id, end)
        for watch in self._watches.get(event.job_id, ()):
            self._tell(watch, end)

    def _tell(self, watch: Watch, end: End) -> None:
        if end.at_ms >= self._there(watch.since_ms):
            watch.tell(end)

    def _remember(self, job_id: str, end: End) -> None:
        known = self._known
        known.pop(job_id, None)  # the latest goes behind all others
        known[job_id] = end
        if len(known) > KNOWN_MAX:
            oldest = next(iter(known))
            forgotten_ms = known.pop(oldest).at_ms - self._ahead_ms + EARLIER_MS
            self._known_from_ms = max(self._known_from_ms, forgotten_ms)


def _begin(keys: Keys, since_ms: int) -> Plan[tuple[EventLog, int]]:
    """Where to read from, for what ended since then; and how far the server's clock is ahead."""
    ahead = yield from ahead_ms()
    start_ms = there(since_ms, ahead)
    return EventLog(keys, f"{start_ms}-0", block_ms=BLOCK_MS, count=READ_COUNT), ahead


def ahead_ms() -> Plan[int]:
    """How far the server's clock is ahead of ours."""
    seconds, micros = yield commands(("TIME",), effect=Effect.READ)
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    return now_ms - time.time_ns() // 1_000_000


def there(at_ms: int, ahead_ms: int) -> int:
    """A moment of ours by the server's clock, or a little earlier; 0 is always."""
    return max(0, at_ms + ahead_ms - EARLIER_MS) if at_ms else 0


def end_in(event: QueueEvent) -> End | None:
    """The end that an event tells of, if it does."""
    if event.name not in (_COMPLETED, _DLQ):
        return None
    reason = str(event.fields.get(REASON.decode(), "")) if event.name == _DLQ else None
    return End(int(event.id.partition("-")[0]), reason)
