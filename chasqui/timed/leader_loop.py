"""What promoter and scheduler share: led by one, ended by no error, handed over at the end."""

import asyncio
import logging
from typing import Final

from chasqui.model.config import CredentialProvider, Endpoint, check_credential_provider
from chasqui.transport.connection import Connection
from chasqui.errors import ChasquiError, ClosedError, OutcomeUnknownError, UnreachableError
from chasqui.model.keys import Keys
from chasqui.leader import RETRY_S, Lease
from chasqui.transport.recovery import Search

logger = logging.getLogger(__name__)

#: How long the end of a duty may take.
END_S: Final = 1.0


class Duty:
    """A background loop that one leader does for all: subclasses say what a turn does."""

    #: For people.
    name: str

    def __init__(self, connection: Connection, lease: Lease, queue: str) -> None:
        self.connection = connection
        self.lease = lease
        self._fields = {"queue": queue, "duty": self.name}
        self._was_leader = False
        #: Ends the sleep between two turns.
        self._awake = asyncio.Event()
        self._failure = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, through every loss of the server; then hand the lease over."""
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
        """Do what is to be done now; how long there is nothing to do."""
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
        self._tell_leader()
        return wait_s

    def _complain(self, error: Exception) -> None:
        """Say once what is wrong; of a lost server the connection tells."""
        is_lost = isinstance(error, UnreachableError | OutcomeUnknownError)
        if not is_lost and self._failure != repr(error):
            self._failure = repr(error)
            logger.warning(
                "queue %s: the %s failed and goes on: %s",
                *self._fields.values(),
                error,
                exc_info=None if isinstance(error, ChasquiError) else error,
                extra=self._fields,
            )

    def _tell_leader(self) -> None:
        is_leader = self.lease.is_held
        if is_leader and not self._was_leader:
            text = "queue %s: this process is now its %s"
            logger.info(text, *self._fields.values(), extra=self._fields)
        self._was_leader = is_leader

    async def _end(self) -> None:
        """Let the next leader begin at once."""
        try:
            async with asyncio.timeout(END_S):
                await self.lease.release(self.connection)
        except Exception as error:
            logger.info(
                "queue %s: the next %s may begin %d s late: %s",
                *self._fields.values(),
                self.lease.ttl_s,
                "the server did not answer" if isinstance(error, TimeoutError) else error,
                extra=self._fields,
            )


class Standalone:
    """Runs one duty of one queue, on connections of its own. Subclasses make the duty."""

    def __init__(
        self,
        redis_url: str | None,
        queue_name: str,
        role: str,
        credential_provider: CredentialProvider | None,
    ) -> None:
        check_credential_provider(credential_provider)
        self._keys = Keys(queue_name)
        self._endpoint = Endpoint.parse(redis_url)
        self._role = role
        self._credential_provider = credential_provider
        self._search = Search()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_shut_down = False

    async def run(self) -> None:
        """Work until `shutdown()` is called.

        Raises UnreachableError if there is no server to begin with; one that is lost later is
        waited for.
        """
        if self._stop is not None:
            raise RuntimeError(f"this {self._role} was run already")
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._is_shut_down:
            return
        connection = self._connect()
        try:
            await connection.connect()
            await self._duty(connection).run(self._stop)
        finally:
            await connection.close()

    def shutdown(self) -> None:
        """Let `run()` come to its end. From any thread; a second call does nothing."""
        self._is_shut_down = True
        if self._stop is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def _connect(self) -> Connection:
        return Connection(
            self._endpoint,
            key=self._keys.delayed,
            client_name=f"chasqui-{self._role}",
            credential_provider=self._credential_provider,
            search=self._search,
        )

    def _duty(self, connection: Connection) -> Duty:
        raise NotImplementedError
