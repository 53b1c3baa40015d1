"""The lock that makes one process the leader of a queue's promotion or scheduling.

The lock is chasquimq's: a key that holds the leader's id and expires. A leader that lost it without
noticing (a paused process) does no harm: every script that a leader runs is correct from any
process. The lock only keeps others from doing the same work in vain.
"""

import uuid
from time import monotonic
from typing import Any, Final

from chasqui.model.keys import Keys
from chasqui.scripts import timing
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect

#: How long the lock lasts without a renewal.
LOCK_TTL_S: Final = 5
#: How often a process that does not lead checks whether the lock was freed early.
FOLLOW_S: Final = 1.0
# Renewing at three fifths leaves time for one renewal that is lost. A turn that comes slightly
# before that renews as well.
_RENEW_SHARE = 0.6
_SOON_S = 0.1


class LeaderLock:
    """One process's view of one lock.

    Whether it is held is judged by the monotonic clock, from the moment the last successful request
    was sent: a process that was stopped knows that its lock has expired.
    """

    def __init__(self, key: bytes, holder: str | None = None, ttl_s: int = LOCK_TTL_S) -> None:
        if ttl_s < 1:
            raise ValueError(f"lock_ttl_secs must be at least 1, got {ttl_s}")
        self.key = key
        #: The list that followers sleep on; an element means that the leader left.
        self.freed = Keys.freed(key)
        self.holder = holder or str(uuid.uuid4())
        self.ttl_s = ttl_s
        #: While the lock is ours.
        self._since_s = self._renew_at_s = self._ends_at_s = 0.0
        #: While another process holds it: when to check it again, and when it may be free.
        self._look_at_s = self._free_at_s = 0.0

    @property
    def is_held(self) -> bool:
        return monotonic() < self._ends_at_s

    @property
    def held_s(self) -> float:
        """How long the lock has been ours without a break."""
        now_s = monotonic()
        return now_s - self._since_s if now_s < self._ends_at_s else 0.0

    @property
    def must_renew(self) -> bool:
        """True while the lock is ours and `hold` would renew it."""
        now_s = monotonic()
        return self._renew_at_s - _SOON_S <= now_s < self._ends_at_s

    @property
    def free_in_s(self) -> float:
        """How long until the lock may be free, while another process holds it."""
        return max(0.0, self._free_at_s - monotonic())

    @property
    def next_step_s(self) -> float:
        """How long `hold` has nothing to do."""
        now_s = monotonic()
        at_s = self._renew_at_s if now_s < self._ends_at_s else self._look_at_s
        return max(0.0, at_s - now_s)

    async def hold(self, connection: Connection, *, is_freed: bool = False) -> bool:
        """Take or renew the lock if that is due; True while it is ours.

        `is_freed` says that the leader left, so there is no reason to wait. Raises what the
        connection raises: an error never counts as success.
        """
        now_s = monotonic()
        if self.is_held and not self.must_renew:
            return True
        if now_s < self._ends_at_s:
            # Almost certainly still ours, so one command renews it; its reply shows if not.
            reply = await self._execute(connection, "GETEX", self.key, "EX", self.ttl_s)
            if reply is not None and reply.decode(errors="replace") == self.holder:
                self._extend(now_s)
                return True
            self._ends_at_s = 0.0
        elif self._look_at_s and not is_freed:
            if now_s < self._look_at_s:
                return False
            # Another process holds it: one command shows for how much longer.
            left_ms = await self._execute(connection, "PTTL", self.key)
            if left_ms > 0:
                self._follow(left_ms)
                return False
        left_ms = await connection.submit(
            timing.take_lock(self.key, self.holder, self.ttl_s, timeout_s=self.ttl_s)
        )
        if left_ms == -1:
            self._since_s = now_s
            self._extend(now_s)
        else:
            self._follow(left_ms)
        return self.is_held

    async def release(self, connection: Connection) -> None:
        """Give up the lock if it is ours, and wake one follower."""
        if self.is_held:
            self._ends_at_s = 0.0
            await connection.submit(timing.release_lock(self.key, self.freed, self.holder))

    def _extend(self, sent_s: float) -> None:
        self._renew_at_s = sent_s + self.ttl_s * _RENEW_SHARE
        self._ends_at_s = sent_s + self.ttl_s
        self._look_at_s = self._free_at_s = 0.0

    def _follow(self, left_ms: int) -> None:
        now_s = monotonic()
        self._free_at_s = now_s + left_ms / 1000
        self._look_at_s = min(self._free_at_s, now_s + FOLLOW_S)

    async def _execute(self, connection: Connection, *arguments: Any) -> Any:
        # A later reply would be about another holder's lock.
        return await connection.execute(*arguments, effect=Effect.IDEMPOTENT, timeout_s=self.ttl_s)
