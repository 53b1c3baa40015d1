"""The scheduler: fires due repeat specs, each fire time once, whichever process leads.

It sleeps until the next fire by Redis's clock. Once per tick it checks whether an earlier spec was
written, or that clock was set. The script that fires specs compares each one's score with the score
that its fires were computed from. So neither a leader that was paused in between nor a request that
is sent twice can fire the same time again.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final

from chasqui._core.ulid import UlidFactory
from chasqui.metrics import MetricsSink, SchedulerTick
from chasqui.model.config import MAX_MS, CredentialProvider, check_int
from chasqui.model.keys import FIRED, RETRY, SPEC, Keys, check_text
from chasqui.scripts import timing
from chasqui.scripts.timing import FireReply
from chasqui.timed.fire_calls import Owed, fire_calls, read_spec
from chasqui.timed.fire_plan import plan_fires
from chasqui.timed.leader import LeaderLock
from chasqui.timed.leader_loop import LeaderLoop, LeaderLoopConfig, LeaderLoopRunner
from chasqui.timed.repeatables import scored
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import time_us

logger = logging.getLogger(__name__)

#: A spec is late if it fires this long after it was due, or a whole interval after.
LATE_MS: Final = 1000
#: How often a scheduler that is behind logs that.
WARN_EVERY_S: Final = 60.0
#: The shortest time between two looks while there is no spec at all.
EMPTY_POLL_S: Final = 3.0
#: When to look again after another scheduler fired a spec, or the reply to a fire was lost.
_LOOK_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(LeaderLoopConfig):
    """How a scheduler works."""

    #: How often to look for new specs: the first fire of one that is due sooner may be late by as
    #: much, or by EMPTY_POLL_S if it is the queue's only spec.
    tick_interval_ms: int = 1000


@dataclass(frozen=True, slots=True)
class Fired:
    """What one look at the specs did and found."""

    #: Jobs added to the queue.
    count: int
    #: Specs that are due and cannot be read: logged and left alone.
    unreadable: int
    #: How long until the next fire, by the server's clock; None if there is none.
    next_due_s: float | None


@dataclass(slots=True)
class _Round:
    """What a look at the specs has done so far."""

    #: Specs due by then are fired, by Redis's clock.
    until_ms: int
    #: Redis's time, as last read.
    now_ms: int
    fires: int = 0
    #: Specs that fired late though this scheduler led when they were due, and by how much.
    late: int = 0
    late_ms: int = 0
    #: How long the first of all specs had been due.
    lag_ms: int = 0
    #: Another scheduler is at work, or a reply was lost.
    is_stale: bool = False
    #: Specs that cannot be read, and why.
    unreadable: dict[bytes, str] = field(default_factory=dict)


class SchedulerLoop(LeaderLoop):
    """One queue's scheduler. It sleeps on `wake_connection` only while another process leads."""

    name = "scheduler"

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        wake_connection: Connection,
        config: SchedulerConfig | None = None,
        *,
        holder_id: str | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        self._config = config or SchedulerConfig()
        lock = LeaderLock(keys.scheduler_lock, holder_id, self._config.lock_ttl_s)
        super().__init__(keys, connection, wake_connection, lock, metrics)
        self._ulids = UlidFactory()
        #: Specs that could not be read when last seen, and why: each is logged once.
        self._unreadable: dict[bytes, str] = {}
        #: The score of the next spec to fire, when last seen; None if there was none.
        self._next_ms: int | None = None
        self._next_at_s = self._tick_at_s = 0.0
        self._warn_at_s = 0.0
        self._is_empty = True

    async def run_once(self) -> Fired | None:
        """Fire all that is due; None if another scheduler leads."""
        if not await self.lock.hold(self.connection):
            return None
        return await self._fire_due()

    async def _turn(self) -> float:
        lock = self.lock
        is_freed = self._wake_list.take_wake()  # always: one left over would end every sleep
        if self._is_empty:
            # Nobody needs to lead while there is nothing to fire.
            count = await self.connection.execute("ZCARD", self._keys.repeat, effect=Effect.READ)
            if not count:
                return max(EMPTY_POLL_S, self._config.tick_interval_ms / 1000)
            self._is_empty = False
        was_leader = lock.is_held
        if not await lock.hold(self.connection, is_freed=is_freed):
            self._wake_list.listen(lock.freed, lock.free_in_s)
            return lock.next_step_s
        now_s = monotonic()
        if not was_leader or now_s >= self._next_at_s or await self._has_changed(now_s):
            await self._fire_due()
        if self._is_empty:
            return 0
        return min(min(self._next_at_s, self._tick_at_s) - monotonic(), lock.next_step_s)

    async def _has_changed(self, now_s: float) -> bool:
        """Once per tick: is there a spec before the known next one, or is that one due already?

        The latter happens if Redis's clock was set, or this machine slept and its timers with it.
        """
        if now_s < self._tick_at_s:
            return False
        next_ms = self._next_ms
        before = "+inf" if next_ms is None else f"({next_ms}"
        earlier, time = await self.connection.submit(
            commands(("ZCOUNT", self._keys.repeat, "-inf", before), ("TIME",), effect=Effect.READ)
        )
        self._set_tick()
        is_due = next_ms is not None and next_ms <= time_us(time) // 1000
        return is_due or bool(earlier != len(self._unreadable))

    def _set_tick(self) -> None:
        self._tick_at_s = monotonic() + self._config.tick_interval_ms / 1000

    # ── Firing ──────────────────────────────────────────────────────────────────────────────────

    async def _fire_due(self) -> Fired:
        """Fire what is due, oldest first, while this process leads."""
        key, batch = self._keys.repeat, self._config.batch
        now_ms = time_us(await self.connection.execute("TIME", effect=Effect.READ)) // 1000
        current = _Round(until_ms=now_ms, now_ms=now_ms)
        while not current.is_stale and await self.lock.hold(self.connection):
            # Specs that cannot be read keep their place before all others: step over them.
            reply = await self.connection.execute(
                *("ZRANGEBYSCORE", key, "-inf", current.until_ms),
                *("WITHSCORES", "LIMIT", len(current.unreadable), batch),
                effect=Effect.READ,
            )
            due = list(scored(reply))
            if due:
                await self._fire_page(due, current)
            if len(due) < batch:
                break
        self._unreadable = current.unreadable
        next_due_s = await self._find_next(current)
        self._report(current)
        return Fired(current.fires, len(current.unreadable), next_due_s)

    async def _find_next(self, current: _Round) -> float | None:
        """Note the next spec that is not due in this round; returns in how many seconds it is."""
        after = f"({current.until_ms}"
        time, upcoming = await self.connection.submit(
            commands(
                ("TIME",),
                ("ZRANGEBYSCORE", self._keys.repeat, after, "+inf", "WITHSCORES", "LIMIT", 0, 1),
                effect=Effect.READ,
            )
        )
        self._next_ms = next((score for _, score in scored(upcoming)), None)
        self._is_empty = self._next_ms is None and not current.unreadable
        next_due_s = None
        if self._next_ms is not None:
            next_due_s = max(0.0, (self._next_ms * 1000 - time_us(time)) / 1e6)
        self._next_at_s = math.inf if next_due_s is None else monotonic() + next_due_s
        self._set_tick()
        if current.is_stale:
            self._tick_at_s = monotonic() + _LOOK_AGAIN_S
        return next_due_s

    async def _fire_page(self, due: list[tuple[bytes, int]], current: _Round) -> None:
        """Fire some due specs, in as few script calls as their size allows."""
        names = [self._keys.repeat_spec(member.decode(errors="replace")) for member, _ in due]
        reads = (("HMGET", name, SPEC, FIRED, RETRY) for name in names)
        hashes = await self.connection.submit(commands(*reads, effect=Effect.READ, raises=False))
        owed = self._owed(due, hashes if len(due) > 1 else [hashes], current)
        for specs in fire_calls(owed, current.now_ms, self._ulids):
            request = timing.fire(self._keys, specs, self._config.max_stream_len)
            reply = FireReply(*await self.connection.submit(request))
            # The clock may have been put back: what was due when the round began still is.
            current.now_ms = max(current.until_ms, reply.now_ms)
            current.fires += reply.fires
            current.is_stale = current.is_stale or reply.stale > 0
            if not await self.lock.hold(self.connection):
                break

    def _owed(
        self, due: list[tuple[bytes, int]], hashes: list[Any], current: _Round
    ) -> Iterator[Owed]:
        """What each of these specs owes; those that cannot be read are logged."""
        now_ms = current.now_ms
        led_since_ms = now_ms - int(self.lock.held_s * 1000)
        for (member, due_ms), content in zip(due, hashes, strict=True):
            try:
                spec, fired = read_spec(content, due_ms)
                plan = plan_fires(spec, due_ms, now_ms, fired, led_since_ms=led_since_ms)
            except ValueError as error:
                self._log_unreadable(member, str(error), current)
                continue
            lag_ms = now_ms - due_ms
            current.lag_ms = max(current.lag_ms, lag_ms)
            # A spec that has not fired before may have been seen late.
            is_late = lag_ms >= min(LATE_MS, spec.pattern.interval_ms or LATE_MS)
            if is_late and fired and due_ms > led_since_ms:
                current.late += 1
                current.late_ms = max(current.late_ms, lag_ms)
            yield Owed(member, due_ms, spec, plan)

    def _log_unreadable(self, member: bytes, error: str, current: _Round) -> None:
        current.unreadable[member] = error
        if self._unreadable.get(member) != error:
            logger.error(
                "queue %s: repeat spec %r cannot be read and does not fire: %s",
                self._keys.queue,
                member.decode(errors="replace"),
                error,
                extra={"queue": self._keys.queue},
            )

    def _report(self, current: _Round) -> None:
        """Count what a round did; log if it came late."""
        if self._metrics is not None:
            tick = SchedulerTick(current.fires, current.late, current.lag_ms)
            self._metrics.scheduler_tick(tick)
        if current.late and monotonic() >= self._warn_at_s:
            self._warn_at_s = monotonic() + WARN_EVERY_S
            logger.warning(
                "queue %s: the scheduler is behind: %d specs fired up to %.1f s late; for specs "
                "whose next fire was due by then, their policy for missed fires applies",
                self._keys.queue,
                current.late,
                current.late_ms / 1000,
                extra={
                    "queue": self._keys.queue,
                    "specs": current.late,
                    "late_ms": current.late_ms,
                },
            )


class Scheduler(LeaderLoopRunner):
    """Fires the repeat specs of one queue, alone in its process or beside anything else."""

    def __init__(
        self,
        redis_url: str | None,
        queue_name: str,
        *,
        tick_interval_ms: int | None = None,
        batch: int | None = None,
        max_stream_len: int | None = None,
        lock_ttl_secs: int | None = None,
        holder_id: str | None = None,
        credential_provider: CredentialProvider | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        # 0 means the default, as None does.
        check_int("tick_interval_ms", tick_interval_ms, 0, MAX_MS)
        check_int("batch", batch, 0)
        check_int("max_stream_len", max_stream_len, 0)
        check_int("lock_ttl_secs", lock_ttl_secs, 0, MAX_MS // 1000)
        if holder_id is not None:
            check_text(holder_id, "holder_id")
        default = SchedulerConfig()
        config = SchedulerConfig(
            tick_interval_ms=tick_interval_ms or default.tick_interval_ms,
            batch=batch or default.batch,
            max_stream_len=max_stream_len,
            lock_ttl_s=lock_ttl_secs or default.lock_ttl_s,
        )
        make = partial(SchedulerLoop, config=config, holder_id=holder_id, metrics=metrics)
        super().__init__("scheduler", make, redis_url, queue_name, credential_provider)
