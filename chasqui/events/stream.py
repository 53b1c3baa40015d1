"""QueueEvents: what happens to a queue's jobs, told as it happens, to any process."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from chasqui.blocking import BlockingConnection
from chasqui.model.config import AnyCredentialProvider, CredentialProvider, Endpoint
from chasqui.transport.connection import Connection
from chasqui.errors import ClosedError, UnreachableError
from chasqui.events.log import BLOCK_MS, GAP, EventLog, id_of
from chasqui.events.log import QueueEvent as QueueEvent
from chasqui.model.keys import Keys

logger = logging.getLogger(__name__)

CLIENT_NAME: Final = "chasqui-events"
#: After the server could not be reached.
AGAIN_S: Final = 0.5


class _Reading:
    """What both readers do alike: one's place, what one wants, and what was read and not given."""

    def __init__(self, queue_name: str, log: EventLog, **wanted: Iterable[str] | None) -> None:
        for name, values in wanted.items():
            if isinstance(values, str):
                raise TypeError(f"{name} must be a list, got a single str")
            if values is not None and not isinstance(values, Iterable):
                raise TypeError(f"{name} must be a list or None, got {type(values).__name__}")
        self.name = queue_name
        self._log = log
        self._wanted = {
            name: frozenset(values) for name, values in wanted.items() if values is not None
        }
        self._ready: deque[QueueEvent] = deque()
        self._last_event_id = "$" if log.cursor is None else id_of(log.cursor)

    @property
    def last_event_id(self) -> str:
        """The id of the last event given, for a reader that is to go on behind it."""
        return self._last_event_id

    def _take(self) -> QueueEvent | None:
        """The next event that is wanted, of those that were read."""
        while self._ready:
            event = self._ready.popleft()
            self._last_event_id = event.id or self._last_event_id
            if self._is_wanted(event):
                return event
        return None

    def _is_wanted(self, event: QueueEvent) -> bool:
        """A gap may hide what is wanted, so it is always told."""
        facts = {"events": event.name, "names": event.job_name, "job_ids": event.job_id}
        return event.name == GAP or all(
            facts[name] in values for name, values in self._wanted.items()
        )

    def _failed(self, error: UnreachableError) -> None:
        """The server is gone: that will pass, unless it was never there."""
        if not self._log.has_read:
            raise error
        fields = {"queue": self.name}
        logger.warning("events of queue %s cannot be read: %s", self.name, error, extra=fields)


class QueueEvents(_Reading):
    """A queue's events, as an async iterator that ends with `close()`.

    It starts behind `last_event_id`: `0` for all that the server still has, the id of an event, or
    `$` for what happens from the first read on, or from the start of its `async with` block. Only
    the `events` and jobs asked for are given; None asks for all.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        redis_url: str | None = None,
        tls: bool = False,
        last_event_id: str = "$",
        block_ms: int = BLOCK_MS,
        count: int = 100,
        credential_provider: CredentialProvider | None = None,
        events: Iterable[str] | None = None,
        names: Iterable[str] | None = None,
        job_ids: Iterable[str] | None = None,
    ) -> None:
        keys = Keys(queue_name)
        log = EventLog(keys, last_event_id, block_ms=block_ms, count=count)
        super().__init__(queue_name, log, events=events, names=names, job_ids=job_ids)
        self._connection = Connection(
            Endpoint.parse(redis_url, tls=tls),
            key=keys.events,
            client_name=CLIENT_NAME,
            credential_provider=credential_provider,
        )
        self._reading: asyncio.Task[list[QueueEvent]] | None = None

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueEvent:
        while (event := self._take()) is None:
            reading = self._read_on()
            await asyncio.wait({reading})
            if reading is not self._reading:
                continue  # another task, which waited for the same read, has taken it
            self._reading = None
            try:
                self._ready += reading.result()
            except ClosedError:
                raise StopAsyncIteration from None
            except UnreachableError as error:
                self._failed(error)
                await asyncio.sleep(AGAIN_S)
        return event

    def _read_on(self) -> "asyncio.Task[list[QueueEvent]]":
        """The read that is under way, or a new one. It outlives who waits for it: the next read
        would be answered only after it, and a few of them too late."""
        reading = self._reading
        if reading is None or reading.get_loop() is not asyncio.get_running_loop():
            self._reading = reading = asyncio.ensure_future(self._connection.run(self._log.read()))
            reading.add_done_callback(_look_at)
        return reading

    async def close(self) -> None:
        """End the iteration and close the connection. A second call does nothing."""
        self._ready.clear()
        reading, self._reading = self._reading, None
        await self._connection.close()
        if reading is not None and reading.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({reading})

    async def __aenter__(self) -> Self:
        try:
            await self._connection.run(self._log.pin())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"QueueEvents({self.name!r}, {self._connection.endpoint})"


def _look_at(reading: "asyncio.Task[list[QueueEvent]]") -> None:
    """Whatever came of a read that nobody waits for any more, it is not complained about."""
    if not reading.cancelled():
        reading.exception()


class BlockingQueueEvents(_Reading):
    """The same as a plain iterator, without an event loop: `chasqui.sync.QueueEvents`.

    `close()` from another thread ends the iteration.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        redis_url: str | None = None,
        tls: bool = False,
        last_event_id: str = "$",
        block_ms: int = BLOCK_MS,
        count: int = 100,
        credential_provider: AnyCredentialProvider | None = None,
        events: Iterable[str] | None = None,
        names: Iterable[str] | None = None,
        job_ids: Iterable[str] | None = None,
    ) -> None:
        keys = Keys(queue_name)
        log = EventLog(keys, last_event_id, block_ms=block_ms, count=count)
        super().__init__(queue_name, log, events=events, names=names, job_ids=job_ids)
        self._connection = BlockingConnection(
            Endpoint.parse(redis_url, tls=tls),
            key=keys.events,
            client_name=CLIENT_NAME,
            credential_provider=credential_provider,
            request_timeout_s=log.timeout_s,
        )

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> QueueEvent:
        while (event := self._take()) is None:
            try:
                self._ready += self._connection.run(self._log.read())
            except ClosedError:
                raise StopIteration from None
            except UnreachableError as error:
                if self._connection.is_closed:
                    raise StopIteration from None
                self._failed(error)
                time.sleep(AGAIN_S)
        return event

    def close(self) -> None:
        """End the iteration and close the connection. A second call does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        try:
            self._connection.run(self._log.pin())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"QueueEvents({self.name!r}, {self._connection.endpoint})"
