"""How jobs end, told to those who wait by the queue's events.

On an event loop one reader serves all waiters: it reads on from where it starts, which is with the
first of them, and stops when there has been none for a while. What was told before that is read
back, page by page, and remembered: the newest pages at once, the others with pauses between, so
that no waiter takes a core for itself. A thread that waits reads by itself, see follower.py. Where
events cannot be read nobody is told anything, and waiters look for themselves.

No clock but the server's has a say in whose end an event tells of. An id that `add` makes up is
never used twice; of others the server knows when they were taken.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from chasqui import dlq, events
from chasqui.transport.connection import Connection
from chasqui.errors import AuthenticationError, JobFailedError
from chasqui.events.log import BLOCK_MS, EventLog, QueueEvent, id_of, parse_event
from chasqui.model.job import drawn_ms
from chasqui.model.keys import REASON, Keys
from chasqui.transport.request import Effect, Plan, commands

logger = logging.getLogger(__name__)

#: How long the reader outlives its last waiter.
LINGER_S: Final = 5.0
#: After the events could not be read.
AGAIN_S: Final = 0.5
#: How much earlier than a moment of the caller's to start, for what the clocks may differ by.
EARLIER_MS: Final = 1000
READ_COUNT: Final = 1000
#: Pages of the past that are read at once, and how long to wait before each of the others: all that
#: a full log has is read within ten seconds, for some percent of a core.
PAGES_AT_ONCE: Final = 4
PAGE_PAUSE_S: Final = 0.1
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


def added_ms(keys: Keys, job_id: str, since_ms: int | None) -> Plan[int]:
    """When the job was added, by the server's clock: an end before that is another's, who had the
    id earlier. 0 where that is not known, or cannot be. A `since_ms` is what the caller says, by
    the clock of this machine."""
    if since_ms:
        seconds, micros = yield commands(("TIME",), effect=Effect.READ)
        ahead_ms = int(seconds) * 1000 + int(micros) // 1000 - time.time_ns() // 1_000_000
        return max(0, since_ms + ahead_ms - EARLIER_MS)
    if since_ms == 0 or drawn_ms(job_id):
        return 0
    mget = ("MGET", keys.unique(job_id), keys.dlid(job_id))
    values = yield commands(mget, effect=Effect.READ, raises=False)
    if not isinstance(values, list):
        return 0  # refused to this user
    # When it was created by its producer's clock, and when it came by the server's. chasquimq
    # writes less.
    marks = [value.split() for value in values if value is not None]
    return max((int(mark[1]) for mark in marks if len(mark) == 2), default=0)


class Past:
    """What was told up to a place in the log, read back from there."""

    def __init__(self, keys: Keys, before: str, from_ms: int = 0) -> None:
        self._keys = keys
        #: What lies before this id is still to be read; None: nothing.
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


class Watch:
    """What one waiter is told of his job."""

    __slots__ = ("_news", "end", "since_ms")

    def __init__(self, since_ms: int) -> None:
        #: What was before, by the server's clock, is another job's that had the id.
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

    def __init__(
        self,
        keys: Keys,
        connect: Callable[[], Connection],
        run: Callable[[Plan[list[Any]]], Awaitable[list[Any]]],
    ) -> None:
        self._keys = keys
        #: Makes the reader's connection, which is blocked by its reads.
        self._connect = connect
        #: Runs what is read of the past.
        self._run = run
        self._watches: dict[str, list[Watch]] = {}
        #: The latest end of each job: as they came, and, newest first, of the past.
        self._known: dict[str, End] = {}
        self._known_past: dict[str, End] = {}
        #: Ends up to this place may be unknown; None: there are none.
        self._unknown_to: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._looking_back: asyncio.Task[None] | None = None
        #: Something is forgotten that it has read, and somebody came since who may want it.
        self._has_forgotten = self._is_wanted_again = False
        self._lingering: asyncio.TimerHandle | None = None
        #: The server lets us read no events.
        self._is_refused = False

    @contextmanager
    def watch(self, job_id: str, since_ms: int) -> Iterator[Watch]:
        """Be told how a job ends, or has ended since then, by the server's clock."""
        watch = Watch(since_ms)
        self._watches.setdefault(job_id, []).append(watch)
        self._start()
        end = self._known.get(job_id) or self._known_past.get(job_id)
        if end is not None:
            self._tell(watch, end)
        if watch.end is None:
            self._look_back()
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
        for known in (self._known, self._known_past):
            if known.get(job_id) is end:
                del known[job_id]
        for watch in self._watches.get(job_id, ()):
            watch.forget(end)

    def stop(self) -> None:
        """Read no more. The next waiter starts it again."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        for task in (self._reading, self._looking_back):
            if task is not None:
                task.cancel()
        self._reading = self._looking_back = None
        self._known.clear()
        self._known_past.clear()
        self._unknown_to = None
        self._is_refused = False

    async def close(self) -> None:
        """Stop, and let go of the connection."""
        tasks = [task for task in (self._reading, self._looking_back) if task is not None]
        if any(task.get_loop().is_closed() for task in tasks):
            self._reading = self._looking_back = None  # they ended with their event loop
            tasks = []
        self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._reading is not None and self._reading.done() and not self._is_refused:
            self._reading = None
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    def _look_back(self) -> None:
        """Read the past in the background, unless all of it is known."""
        if self._unknown_to is None:
            return
        if self._looking_back is not None:
            self._is_wanted_again = self._has_forgotten
            return
        self._has_forgotten = self._is_wanted_again = False
        reading = self._read_past(Past(self._keys, self._unknown_to))
        self._looking_back = asyncio.get_running_loop().create_task(reading)

    async def _read(self) -> None:
        """Read on until cancelled."""
        connection = self._connect()
        log = EventLog(self._keys, "$", block_ms=BLOCK_MS, count=READ_COUNT)
        try:
            while True:
                try:
                    if log.cursor is None:
                        self._unknown_to = id_of(await connection.run(log.pin()))
                        self._look_back()
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
                    self._complain(error)
                    await asyncio.sleep(AGAIN_S)
        finally:
            await connection.close()

    async def _read_past(self, past: Past) -> None:
        """Read back while anybody waits, as far as events reach."""
        try:
            while self._watches and past.before is not None:
                await asyncio.sleep(past.wait_s)
                try:
                    entries = await self._run(past.read())
                except AuthenticationError:
                    return
                except Exception as error:
                    self._complain(error)
                    await asyncio.sleep(AGAIN_S)
                else:
                    self._take_past(entries)
                    if not self._has_forgotten:
                        self._unknown_to = past.before
        finally:
            if self._looking_back is asyncio.current_task():
                self._looking_back = None
                if self._is_wanted_again and self._watches:
                    self._look_back()

    def _complain(self, error: Exception) -> None:
        queue = self._keys.queue
        fields = {"queue": queue}
        logger.debug("events of queue %s cannot be read: %s", queue, error, extra=fields)

    def _take(self, event: QueueEvent) -> None:
        end = end_in(event)
        if end is None or event.job_id is None:
            return
        self._known.pop(event.job_id, None)  # the latest goes behind all others
        self._known[event.job_id] = end
        self._forget_oldest()
        for watch in self._watches.get(event.job_id, ()):
            self._tell(watch, end)

    def _take_past(self, entries: list[Any]) -> None:
        for entry in entries:
            if not is_end(entry):
                continue  # most are not: they are not parsed
            event = parse_event(*entry)
            end, job_id = end_in(event), event.job_id
            if end is None or job_id is None or job_id in self._known:
                continue
            end = self._known_past.setdefault(job_id, end)
            for watch in self._watches.get(job_id, ()):
                if watch.end is None:
                    self._tell(watch, end)
        self._forget_oldest()

    def _tell(self, watch: Watch, end: End) -> None:
        if end.at_ms >= watch.since_ms:
            watch.tell(end)

    def _forget_oldest(self) -> None:
        while len(self._known) + len(self._known_past) > KNOWN_MAX:
            if self._known_past:
                _, end = self._known_past.popitem()
            else:
                end = self._known.pop(next(iter(self._known)))
            self._has_forgotten = True
            if self._unknown_to is None or _ms_of(self._unknown_to) <= end.at_ms:
                self._unknown_to = str(end.at_ms)  # and all of that millisecond


def _ms_of(place: str) -> int:
    return int(place.lstrip("(").partition("-")[0])


def is_end(entry: Any) -> bool:
    """Whether an entry of the events stream may tell of an end."""
    fields = entry[1]
    return events.COMPLETED in fields or events.DLQ in fields


def end_in(event: QueueEvent) -> End | None:
    """The end that an event tells of, if it does."""
    if event.name not in (_COMPLETED, _DLQ):
        return None
    reason = str(event.fields.get(REASON.decode(), "")) if event.name == _DLQ else None
    return End(int(event.id.partition("-")[0]), reason)
