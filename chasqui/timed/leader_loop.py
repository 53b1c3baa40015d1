"""What promoter and scheduler share: one leader, a loop that survives errors, an early handover."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from chasqui.errors import ChasquiError, ClosedError, OutcomeUnknownError, UnreachableError
from chasqui.metrics import MetricsSink, guard
from chasqui.model.config import CredentialProvider, Endpoint, check_credential_provider
from chasqui.model.keys import Keys
from chasqui.timed.leader import LOCK_TTL_S, LeaderLock
from chasqui.timed.wakeup import RETRY_S, WakeList
from chasqui.transport.connection import Connection
from chasqui.transport.recovery import SharedDialPacing

logger = logging.getLogger(__name__)

#: How long a loop may take to end.
END_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLoopConfig:
    """The settings that both loops have."""

    #: Jobs promoted by one script call; specs read at a time.
    batch: int = 256
    #: The approximate length that the stream is trimmed to; None: it is not trimmed.
    max_stream_len: int | None = None
    lock_ttl_s: int = LOCK_TTL_S

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not isinstance(value, bool | None) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class LeaderLoop:
    """A background loop that one process runs for all; subclasses define a turn.

    It shares `connection` with others. It sleeps on `wake_connection`, and closes that when `run`
    ends.
    """

    #: For logs.
    name: str

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        wake_connection: Connection,
        lock: LeaderLock,
        metrics: MetricsSink | None,
    ) -> None:
        self.connection = connection
        self.lock = lock
        self._keys = keys
        self._metrics = guard(metrics)
        self._fields = {"queue": keys.queue, "duty": self.name}
        self._was_leader = False
        #: Ends the sleep between two turns.
        self._awake = asyncio.Event()
        self._wake_list = WakeList(wake_connection, self._awake.set)
        self._failure = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, through every loss of the server; then release the lock."""
        stopped = asyncio.ensure_future(stop.wait())
        turning = asyncio.ensure_future(self._take_turns(stop))
        try:
            await asyncio.wait({turning, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self._awake.set()
            await asyncio.wait({turning}, timeout=END_S)
            if turning.done():
                turning.result()
        finally:
            stopped.cancel()
            turning.cancel()
            await self._end()

    async def _take_turns(self, stop: asyncio.Event) -> None:
        loop, awake = asyncio.get_running_loop(), self._awake
        while not stop.is_set():
            wait_s = await self._turn_safely()
            if wait_s > 0 and not stop.is_set():
                timer = loop.call_later(wait_s, awake.set)
                await awake.wait()
                timer.cancel()
            awake.clear()

    async def _turn(self) -> float:
        """Do what is due; returns how long there is nothing to do."""
        raise NotImplementedError

    async def _turn_safely(self) -> float:
        try:
            wait_s = await self._turn()
        except ClosedError:
            raise
        except Exception as error:
            # Whatever it was, due jobs must not wait for a restart.
            self._complain(error)
            return RETRY_S
        self._failure = ""
        self._log_leadership()
        return wait_s

    def _complain(self, error: Exception) -> None:
        """Log each failure once; the connection itself logs a lost server."""
        is_lost = isinstance(error, UnreachableError | OutcomeUnknownError)
        if not is_lost and self._failure != repr(error):
            self._failure = repr(error)
            logger.warning(
                "queue %s: the %s failed and will try again: %s",
                *self._fields.values(),
                error,
                exc_info=None if isinstance(error, ChasquiError) else error,
                extra=self._fields,
            )

    def _log_leadership(self) -> None:
        is_leader = self.lock.is_held
        if is_leader and not self._was_leader:
            text = "queue %s: this process is now its %s"
            logger.info(text, *self._fields.values(), extra=self._fields)
        self._was_leader = is_leader

    async def _end(self) -> None:
        """Let the next leader begin at once."""
        await self._wake_list.close()
        try:
            async with asyncio.timeout(END_S):
                await self.lock.release(self.connection)
        except Exception as error:
            logger.info(
                "queue %s: the next %s may begin %d s late: %s",
                *self._fields.values(),
                self.lock.ttl_s,
                "the server did not answer" if isinstance(error, TimeoutError) else error,
                extra=self._fields,
            )


class LeaderLoopRunner:
    """Runs one loop of one queue, on its own connections. `make` makes the loop from the keys, the
    connection to work on and the one to sleep on."""

    def __init__(
        self,
        role: str,
        make: Callable[[Keys, Connection, Connection], LeaderLoop],
        redis_url: str | None,
        queue_name: str,
        credential_provider: CredentialProvider | None,
    ) -> None:
        check_credential_provider(credential_provider)
        self._role = role
        self._make = make
        self._keys = Keys(queue_name)
        self._endpoint = Endpoint.parse(redis_url)
        self._credential_provider = credential_provider
        self._dial_pacing = SharedDialPacing()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_shut_down = False

    async def run(self) -> None:
        """Work until `shutdown()` is called.

        Raises UnreachableError if there is no server at the start; if the server is lost later,
        waits for it.
        """
        if self._stop is not None:
            raise RuntimeError(f"this {self._role} was run already")
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._is_shut_down:
            return
        connection = self._connect()
        try:
            await connection.connect()
            await self._make(self._keys, connection, self._connect()).run(self._stop)
        finally:
            await connection.close()

    def shutdown(self) -> None:
        """Let `run()` end. You may call it from any thread; a second call does nothing."""
        self._is_shut_down = True
        if self._stop is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def _connect(self) -> Connection:
        return Connection(
            self._endpoint,
            key=self._keys.delayed,
            client_name=f"chasqui-{self._role}",
            credential_provider=self._credential_provider,
            dial_pacing=self._dial_pacing,
        )
