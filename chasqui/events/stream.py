"""QueueEvents: the events of a queue as an iterator, on asyncio or in a thread."""

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Generic, Self, TypeVar

from chasqui.errors import ClosedError, UnreachableError
from chasqui.events.log import BLOCK_MS, CLIENT_NAME, GAP, EventLog, id_of
from chasqui.events.log import QueueEvent as QueueEvent
from chasqui.model.config import AnyCredentialProvider, CredentialProvider, Endpoint
from chasqui.model.keys import Keys
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection

logger = logging.getLogger(__name__)

#: The pause after the server could not be reached.
AGAIN_S: Final = 0.5

AnyConnection = TypeVar("AnyConnection", Connection, BlockingConnection)
Provider = TypeVar("Provider")


class _EventReader(Generic[AnyConnection, Provider]):
    """What both iterators share: their place in the log, their filter, and events that were read
    and not yet given."""

    def __init__(
        self,
        queue_name: str,
        *,
        redis_url: str | None = None,
        tls: bool = False,
        last_event_id: str = "$",
        block_ms: int = BLOCK_MS,
        count: int = 100,
        credential_provider: Provider | None = None,
        events: Iterable[str] | None = None,
        names: Iterable[str] | None = None,
        job_ids: Iterable[str] | None = None,
    ) -> None:
        keys = Keys(queue_name)
        self.name = queue_name
        self._log = log = EventLog(keys, last_event_id, block_ms=block_ms, count=count)
        self._wanted: dict[str, frozenset[str]] = {}
        for name, values in (("events", events), ("names", names), ("job_ids", job_ids)):
            if isinstance(values, str):
                raise TypeError(f"{name} must be a list, got a single str")
            if values is not None and not isinstance(values, Iterable):
                raise TypeError(f"{name} must be a list or None, got {type(values).__name__}")
            if values is not None:
                self._wanted[name] = frozenset(values)
        self._ready: deque[QueueEvent] = deque()
        self._last_event_id = "$" if log.cursor is None else id_of(log.cursor)
        self._connection: AnyConnection = self._connect(
            Endpoint.parse(redis_url, tls=tls),
            key=keys.events,
            client_name=CLIENT_NAME,
            credential_provider=credential_provider,
        )

    @abstractmethod
    def _connect(self, endpoint: Endpoint, **options: Any) -> AnyConnection: ...

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    @property
    def last_event_id(self) -> str:
        """The id of the last event given, for another reader to go on behind it."""
        return self._last_event_id

    def _take(self) -> QueueEvent | None:
        """The next wanted event, of those that were read."""
        while self._ready:
            event = self._ready.popleft()
            self._last_event_id = event.id or self._last_event_id
            if self._is_wanted(event):
                return event
        return None

    def _is_wanted(self, event: QueueEvent) -> bool:
        """A gap may hide wanted events, so it is always given."""
        facts = {"events": event.name, "names": event.job_name, "job_ids": event.job_id}
        return event.name == GAP or all(
            facts[name] in values for name, values in self._wanted.items()
        )

    def _failed(self, error: UnreachableError) -> None:
        """The server is gone: read on when it is back, but raise if it was never there."""
        if not self._log.has_read:
            raise error
        fields = {"queue": self.name}
        logger.warning("events of queue %s cannot be read: %s", self.name, error, extra=fields)

    def __repr__(self) -> str:
        return f"QueueEvents({self.name!r}, {self._connection.endpoint})"


class QueueEvents(_EventReader[Connection, CredentialProvider]):
    """A queue's events, as an async iterator that ends with `close()`.

    It starts behind `last_event_id`: `0` for all that the server still has, the id of an event, or
    `$` for what happens from the first read on, or from the start of its `async with` block. It
    gives only the `events`, and those of the jobs, that you ask for; None asks for all.
    """

    _reading: "asyncio.Task[list[QueueEvent]] | None" = None

    def _connect(self, endpoint: Endpoint, **options: Any) -> Connection:
        return Connection(endpoint, **options)

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
        """The read under way, or a new one. A read outlives its waiter: the server would answer a
        new one only after it, and after a few of them too late."""
        reading = self._reading
        if reading is None or reading.get_loop() is not asyncio.get_running_loop():
            self._reading = reading = asyncio.ensure_future(self._connection.run(self._log.read()))
            reading.add_done_callback(_retrieve)
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

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _retrieve(reading: "asyncio.Task[list[QueueEvent]]") -> None:
    """Look at the exception of a read that nobody waits for, so that asyncio does not log it."""
    if not reading.cancelled():
        reading.exception()


class BlockingQueueEvents(_EventReader[BlockingConnection, AnyCredentialProvider]):
    """The same as a plain iterator, without an event loop: `chasqui.sync.QueueEvents`.

    `close()` from another thread ends the iteration.
    """

    def _connect(self, endpoint: Endpoint, **options: Any) -> BlockingConnection:
        return BlockingConnection(endpoint, request_timeout_s=self._log.timeout_s, **options)

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

    def __exit__(self, *error: object) -> None:
        self.close()
