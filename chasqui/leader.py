"""The lease that makes one process the leader of a duty, and the bell that wakes a sleeper.

The lock is chasquimq's: a key that holds the leader's id and ends by itself. A leader that lost it
without noticing (a paused process) does no harm, since all that duties do are scripts that are
right whoever runs them; the lease only keeps others from doing the same work in vain.
"""

import asyncio
import uuid
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from chasqui import scripts
from chasqui.transport.connection import Connection
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, commands

#: How long a lease lasts that is not renewed.
LEASE_TTL_S: Final = 5
#: How often those who do not lead look whether the lease is free before its time.
FOLLOW_S: Final = 1.0
#: How long to wait after an error.
RETRY_S: Final = 1.0
# A renewal at three fifths leaves time for one that is lost. It is made a little sooner if there is
# a turn anyway.
_RENEW_SHARE = 0.6
_SOON_S = 0.1


class Lease:
    """One process's claim to one lock.

    Whether it holds is judged by the monotonic clock, from the moment that the last successful
    request was sent: a process that was stopped knows that its lease is over.
    """

    def __init__(self, key: bytes, holder: str | None = None, ttl_s: int = LEASE_TTL_S) -> None:
        if ttl_s < 1:
            raise ValueError(f"lock_ttl_secs must be at least 1, got {ttl_s}")
        self.key = key
        #: The list that followers sleep on; an element means that the leader went.
        self.freed = Keys.freed(key)
        self.holder = holder or str(uuid.uuid4())
        self.ttl_s = ttl_s
        #: While it is ours.
        self._since_s = self._renew_at_s = self._ends_at_s = 0.0
        #: While it is somebody else's: when to look at it again, and when it may be free.
        self._look_at_s = self._free_at_s = 0.0

    @property
    def is_held(self) -> bool:
        return monotonic() < self._ends_at_s

    @property
    def held_s(self) -> float:
        """How long it has been ours without a break."""
        now_s = monotonic()
        return now_s - self._since_s if now_s < self._ends_at_s else 0.0

    @property
    def must_renew(self) -> bool:
        """True while it is ours and `hold` would renew it."""
        now_s = monotonic()
        return self._renew_at_s - _SOON_S <= now_s < self._ends_at_s

    @property
    def free_in_s(self) -> float:
        """How long until it may be free, while it is somebody else's."""
        return max(0.0, self._free_at_s - monotonic())

    @property
    def next_step_s(self) -> float:
        """How long `hold` has nothing to do."""
        now_s = monotonic()
        at_s = self._renew_at_s if now_s < self._ends_at_s else self._look_at_s
        return max(0.0, at_s - now_s)

    async def hold(self, connection: Connection, *, is_freed: bool = False) -> bool:
        """Take the lease or renew it, if that is due; True while it is ours.

        `is_freed` says that the leader went, so that there is no need to wait. Raises what the
        connection raises: an error never counts as success.
        """
        now_s = monotonic()
        if self.is_held and not self.must_renew:
            return True
        if now_s < self._ends_at_s:
            # Surely still ours, so one command can renew it; it tells if that was wrong.
            reply = await self._execute(connection, "GETEX", self.key, "EX", self.ttl_s)
            if reply is not None and reply.decode(errors="replace") == self.holder:
                self._extend(now_s)
                return True
            self._ends_at_s = 0.0
        elif self._look_at_s and not is_freed:
            if now_s < self._look_at_s:
                return False
            # Somebody else's: as long as it is there, one command shows for how long.
            left_ms = await self._execute(connection, "PTTL", self.key)
            if left_ms > 0:
                self._follow(left_ms)
                return False
        left_ms = await connection.submit(
            scripts.call(
                scripts.LEASE_TAKE,
                [self.key],
                [self.holder, self.ttl_s],
                Effect.IDEMPOTENT,
                timeout_s=self.ttl_s,
            )
        )
        if left_ms == -1:
            self._since_s = now_s
            self._extend(now_s)
        else:
            self._follow(left_ms)
        return self.is_held

    async def release(self, connection: Connection) -> None:
        """Give the lease up, if it is ours, and wake one who waits for it."""
        if self.is_held:
            self._ends_at_s = 0.0
            await connection.submit(
                scripts.call(
                    scripts.LEASE_RELEASE,
                    [self.key, self.freed],
                    [self.holder],
                    Effect.IDEMPOTENT,
                )
            )

    def _extend(self, sent_s: float) -> None:
        self._renew_at_s = sent_s + self.ttl_s * _RENEW_SHARE
        self._ends_at_s = sent_s + self.ttl_s
        self._look_at_s = self._free_at_s = 0.0

    def _follow(self, left_ms: int) -> None:
        now_s = monotonic()
        self._free_at_s = now_s + left_ms / 1000
        self._look_at_s = min(self._free_at_s, now_s + FOLLOW_S)

    async def _execute(self, connection: Connection, *arguments: Any) -> Any:
        # Later than this, the answer would be about another lease.
        return await connection.execute(*arguments, effect=Effect.IDEMPOTENT, timeout_s=self.ttl_s)


class Bell:
    """A list in Redis that others push onto to wake this process up.

    BLPOP on a connection of its own: one command is both the wait and the wake-up; it works on
    every server, in a cluster (the list is in the queue's slot) and through failovers, and needs no
    server setting. A ring that is lost with its link costs no more than the next poll would.
    Its timeout is no clock: servers look at timeouts some ten times a second. So the sleeper
    keeps its own time, and the timeout only ends a wait that nobody is behind any more.
    """

    #: By how much a wait may outlast its timeout on a server that is well.
    LATE_S: Final = 0.25

    def __init__(self, connection: Connection, on_end: Callable[[], None]) -> None:
        """`on_end` is called whenever a wait is over, rung or not."""
        self._connection = connection
        self._on_end = on_end
        self._waiting: asyncio.Future[Any] | None = None
        self._key = b""
        self._quiet_until_s = 0.0

    def is_waiting_for(self, key: bytes) -> bool:
        """True while it listens to that list and has not rung."""
        return self._waiting is not None and self._key == key and not self._waiting.done()

    def listen(self, key: bytes, most_s: float) -> None:
        """Begin to wait for a ring, for at most that long, unless a wait is under way."""
        if self._waiting is None and most_s > 0 and monotonic() >= self._quiet_until_s:
            self._key = key
            wait = ("BLPOP", key, round(most_s, 3) or 0.001)
            self._waiting = self._connection.submit(
                commands(wait, effect=Effect.ONCE, timeout_s=most_s + RETRY_S)
            )
            self._waiting.add_done_callback(lambda _: self._on_end())

    def take_ring(self) -> bool:
        """True if it rang since the last call. Not to know counts as a ring."""
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
            self.take_ring()
        await self._connection.close()
