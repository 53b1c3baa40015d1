"""Waiting for the ends of jobs on an event loop: one reader of events serves all waiters.

The reader starts with the first waiter, reads on from there, and stops when nobody has waited for a
while. Earlier events are read back, page by page, and the ends in them are remembered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from chasqui.errors import AuthenticationError
from chasqui.events.job_end import End, Past, added_ms, end_in, events_from_now, may_be_end
from chasqui.events.log import CLIENT_NAME, QueueEvent, id_of, parse_event
from chasqui.model.config import CredentialProvider
from chasqui.model.keys import Keys
from chasqui.transport.connection import Connection

logger = logging.getLogger(__name__)

#: How long the reader outlives its last waiter.
LINGER_S: Final = 5.0
#: The pause after a failed read of events.
AGAIN_S: Final = 0.5
#: How many ends to remember for later waiters.
KNOWN_MAX: Final = 50_000


class JobEndWatcher:
    """Tells waiters how their jobs ended. Belongs to one event loop."""

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        credential_provider: CredentialProvider | None,
    ) -> None:
        self._keys = keys
        #: For reads that do not block; those that do have a connection of their own.
        self._connection = connection
        self._credential_provider = credential_provider
        self._waiters: dict[str, list[JobEndWaiter]] = {}
        #: The latest end of each job: in the order of arrival, and, newest first, of the past.
        self._known: dict[str, End] = {}
        self._known_past: dict[str, End] = {}
        #: Ends up to this place may be unknown; None: all are known.
        self._unknown_to: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._looking_back: asyncio.Task[None] | None = None
        #: Whether ends that it read were forgotten, and whether somebody who may want one of them
        #: has come since.
        self._has_forgotten = self._is_wanted_again = False
        self._lingering: asyncio.TimerHandle | None = None
        #: The server does not let us read events.
        self._is_refused = False

    @asynccontextmanager
    async def watch(self, job_id: str, since_ms: int | None) -> AsyncIterator["JobEndWaiter"]:
        """A waiter for the end of a job that was added at `since_ms`, or whenever that was."""
        from_ms = await self._connection.run(added_ms(self._keys, job_id, since_ms))
        waiter = JobEndWaiter(self, job_id, from_ms)
        self._waiters.setdefault(job_id, []).append(waiter)
        self._start()
        end = self._known.get(job_id) or self._known_past.get(job_id)
        if end is not None:
            waiter.tell(end)
        if waiter.end is None:
            self._look_back()
        try:
            yield waiter
        finally:
            waiters = self._waiters[job_id]
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[job_id]
            if not self._waiters and self._reading is not None:
                loop = asyncio.get_running_loop()
                self._lingering = loop.call_later(LINGER_S, self.stop)

    def forget(self, job_id: str, end: End) -> None:
        """The job was replayed after this end: let its waiters wait for another one."""
        for known in (self._known, self._known_past):
            if known.get(job_id) is end:
                del known[job_id]
        for waiter in self._waiters.get(job_id, ()):
            waiter.untell(end)

    def stop(self) -> None:
        """Stop reading. The next waiter starts it again."""
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
        """Stop reading and close the reader's connection."""
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
        """Read new events until cancelled."""
        connection = Connection(
            self._connection.endpoint,
            key=self._keys.events,
            client_name=CLIENT_NAME,
            credential_provider=self._credential_provider,
        )
        log, queue = events_from_now(self._keys), self._keys.queue
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
                    text, fields = "events of queue %s are not readable: %s", {"queue": queue}
                    logger.info(text, queue, error, extra=fields)
                    return
                except Exception as error:  # a credential provider may raise anything
                    self._log_failure(error)
                    await asyncio.sleep(AGAIN_S)
        finally:
            await connection.close()

    async def _read_past(self, past: Past) -> None:
        """Read earlier events while anybody waits, back to the oldest one."""
        try:
            while self._waiters and past.before is not None:
                await asyncio.sleep(past.wait_s)
                try:
                    entries = await self._connection.run(past.read())
                except AuthenticationError:
                    return
                except Exception as error:
                    self._log_failure(error)
                    await asyncio.sleep(AGAIN_S)
                else:
                    self._take_past(entries)
                    if not self._has_forgotten:
                        self._unknown_to = past.before
        finally:
            if self._looking_back is asyncio.current_task():
                self._looking_back = None
                if self._is_wanted_again and self._waiters:
                    self._look_back()

    def _log_failure(self, error: Exception) -> None:
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
        for waiter in self._waiters.get(event.job_id, ()):
            waiter.tell(end)

    def _take_past(self, entries: list[Any]) -> None:
        for entry in entries:
            if not may_be_end(entry):
                continue
            event = parse_event(*entry)
            end, job_id = end_in(event), event.job_id
            if end is None or job_id is None or job_id in self._known:
                continue
            end = self._known_past.setdefault(job_id, end)
            for waiter in self._waiters.get(job_id, ()):
                if waiter.end is None:
                    waiter.tell(end)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._known) + len(self._known_past) > KNOWN_MAX:
            if self._known_past:
                _, end = self._known_past.popitem()
            else:
                end = self._known.pop(next(iter(self._known)))
            self._has_forgotten = True
            if self._unknown_to is None or _ms_of(self._unknown_to) <= end.at_ms:
                self._unknown_to = str(end.at_ms)  # and all of that millisecond


class JobEndWaiter:
    """Waits for the end of one job."""

    __slots__ = ("_from_ms", "_job_id", "_told", "_watcher", "end")

    def __init__(self, watcher: JobEndWatcher, job_id: str, from_ms: int) -> None:
        self._watcher = watcher
        self._job_id = job_id
        #: An earlier end, by the server's clock, belongs to another job with the same id.
        self._from_ms = from_ms
        self.end: End | None = None
        self._told = asyncio.Event()

    async def wait(self, limit_s: float) -> None:
        """Return when the job has ended, or after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._told.wait()
        except TimeoutError:
            pass

    def forget(self, end: End) -> None:
        """Wait for another end: the job was replayed after this one."""
        self._watcher.forget(self._job_id, end)

    def tell(self, end: End) -> None:
        if end.at_ms >= self._from_ms:
            self.end = end
            self._told.set()

    def untell(self, end: End) -> None:
        if self.end is end:
            self.end = None
            self._told.clear()


def _ms_of(place: str) -> int:
    return int(place.lstrip("(").partition("-")[0])
