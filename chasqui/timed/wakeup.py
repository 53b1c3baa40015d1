"""The list in Redis that wakes a sleeping leader, or a process that waits to lead."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands

#: How long to wait after an error.
RETRY_S: Final = 1.0


class WakeList:
    """A list in Redis that others push onto to wake this process.

    It waits with BLPOP on its own connection: one command is both the wait and the wake-up. BLPOP
    works on every server, in a cluster (the list is in the queue's hash slot) and through
    failovers, and needs no server setting. A wake that is lost with its link costs no more than
    waiting for the next poll. BLPOP's timeout is not precise: servers check timeouts about ten
    times a second. So callers keep their own time, and the timeout only ends an abandoned wait.
    """

    #: How far a healthy server may overrun a wait's timeout.
    LATE_S: Final = 0.25

    def __init__(self, connection: Connection, on_end: Callable[[], None]) -> None:
        """`on_end` is called after each wait, whether it was woken or timed out."""
        self._connection = connection
        self._on_end = on_end
        self._waiting: asyncio.Future[Any] | None = None
        self._key = b""
        self._quiet_until_s = 0.0

    def is_waiting_for(self, key: bytes) -> bool:
        """True while it waits on that list and was not woken."""
        return self._waiting is not None and self._key == key and not self._waiting.done()

    def listen(self, key: bytes, most_s: float) -> None:
        """Begin to wait for a wake, for at most that long, unless a wait is under way."""
        if self._waiting is None and most_s > 0 and monotonic() >= self._quiet_until_s:
            self._key = key
            wait = ("BLPOP", key, round(most_s, 3) or 0.001)
            self._waiting = self._connection.submit(
                commands(wait, effect=Effect.ONCE, timeout_s=most_s + RETRY_S)
            )
            self._waiting.add_done_callback(lambda _: self._on_end())

    def take_wake(self) -> bool:
        """True if it was woken since the last call. An unknown outcome counts as a wake."""
        if self._waiting is None or not self._waiting.done():
            return False
        waiting, self._waiting = self._waiting, None
        if waiting.cancelled() or waiting.exception() is not None:
            self._quiet_until_s = monotonic() + RETRY_S
            return True
        return waiting.result() is not None

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self.take_wake()
        await self._connection.close()
