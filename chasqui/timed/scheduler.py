"""The scheduler: fires repeat specs when they are due, each slot once, whoever leads.

It sleeps until the next fire by Redis's clock, and looks once per tick whether a spec was written
that fires earlier, or that clock was set. Which fires a spec owes, repeat.py knows. The script
that fires a page of specs compares each one's score with the one that its fires were computed from,
so that a leader that was paused in between, or a request sent twice, cannot fire a slot again.
"""

import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, TypeAlias

from chasqui import scripts
from chasqui._core.envelope import encode_envelope
from chasqui._core.reply import ReplyError
from chasqui._core.ulid import UlidFactory
from chasqui.model.config import MAX_MS, CredentialProvider, check_int
from chasqui.transport.connection import Connection
from chasqui.timed.leader_loop import Duty, Standalone
from chasqui.model.keys import FIRED, RETRY, SPEC, Keys, check_text
from chasqui.leader import LEASE_TTL_S, Bell, Lease
from chasqui.metrics import MetricsSink, SchedulerTick, guard
from chasqui.timed.spec import FirePlan, RepeatSpec, plan_fires
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect, Request, commands
from chasqui.transport.server import exception_for

logger = logging.getLogger(__name__)

#: Jobs that one script call fires, at most so many and so large: the server serves nobody else
#: meanwhile.
FIRES_PER_CALL: Final = 256
_BYTES_PER_CALL: Final = 4 << 20
#: A spec is late if it fires this long after it was due, or a whole interval after.
LATE_MS: Final = 1000
#: How often a scheduler that is behind says so.
WARN_EVERY_S: Final = 60.0
#: The shortest time between two looks while there is no spec at all.
EMPTY_POLL_S: Final = 3.0
#: When to look again after another scheduler was seen at work, or a fire's answer was lost.
_LOOK_AGAIN_S: Final = 0.05
#: What is no such count of fires, the script could not count on from.
_FIRED: Final = re.compile(rb"0|[1-9][0-9]{0,14}")

#: A due spec: its key and its score, what it is, and what it does now.
Owed: TypeAlias = tuple[bytes, int, RepeatSpec, FirePlan]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How a scheduler works."""

    #: How often to look for specs that others wrote: the first fire of one that is due sooner than
    #: that may be late by as much, or by EMPTY_POLL_S if it is the queue's only spec.
    tick_interval_ms: int = 1000
    #: Specs read at a time.
    batch: int = 256
    #: What the stream is trimmed to, about; None for no trimming.
    max_stream_len: int | None = None
    lock_ttl_s: int = LEASE_TTL_S

    def __post_init__(self) -> None:
        for name in ("tick_interval_ms", "batch", "max_stream_len", "lock_ttl_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class Fired:
    """What one look at the specs did and found."""

    #: Jobs put into the queue.
    count: int
    #: Specs that are due and cannot be read: reported and left alone.
    unreadable: int
    #: How long until the next fire, by the server's clock; None if there is none.
    next_due_s: float | None


@dataclass(slots=True)
class _Round:
    """What a look at the specs has done so far."""

    #: What was due by then is fired, by Redis's clock.
    until_ms: int
    #: What that clock showed last.
    now_ms: int
    fires: int = 0
    #: Specs that fired late, though this scheduler led when they were due, and by how much at most.
    late: int = 0
    late_ms: int = 0
    #: The longest time that any spec had been due.
    lag_ms: int = 0
    #: Another scheduler is at work, or an answer was lost.
    is_stale: bool = False
    #: Specs that cannot be read, and why.
    unreadable: dict[bytes, str] = field(default_factory=dict)


class SchedulerDuty(Duty):
    """One queue's scheduler, on a command connection that it may share with others.

    `bell` is a connection of its own, to be slept on, and closed at the end of `run`. Only those
    who wait for the lease use it.
    """

    name = "scheduler"

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        bell: Connection,
        config: SchedulerConfig | None = None,
        *,
        holder_id: str | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        self._config = config or SchedulerConfig()
        lease = Lease(keys.scheduler_lock, holder_id, self._config.lock_ttl_s)
        super().__init__(connection, lease, keys.queue)
        self._keys = keys
        self._bell = Bell(bell, self._awake.set)
        self._metrics = guard(metrics)
        self._ulids = UlidFactory()
        #: Specs that could not be read when last seen, and why: each told once.
        self._unreadable: dict[bytes, str] = {}
        #: The score of the next spec to fire, when last seen; None if there was none.
        self._next_ms: int | None = None
        self._next_at_s = self._tick_at_s = 0.0
        self._warn_at_s = 0.0
        self._is_empty = True

    async def run_once(self) -> Fired | None:
        """Fire all that is due; None if another scheduler leads."""
        if not await self.lease.hold(self.connection):
            return None
        return await self._fire_due()

    async def _turn(self) -> float:
        keys, lease = self._keys, self.lease
        is_freed = self._bell.take_ring()  # always: a ring that nobody takes ends every sleep
        if self._is_empty:
            # Where there is nothing to fire nobody needs to lead.
            count = await self.connection.execute("ZCARD", keys.repeat, effect=Effect.READ)
            if not count:
                return max(EMPTY_POLL_S, self._config.tick_interval_ms / 1000)
            self._is_empty = False
        was_leader = lease.is_held
        if not await lease.hold(self.connection, is_freed=is_freed):
            self._bell.listen(lease.freed, lease.free_in_s)
            return lease.next_step_s
        now_s = monotonic()
        if not was_leader or now_s >= self._next_at_s or await self._has_changed(now_s):
            await self._fire_due()
        if self._is_empty:
            return 0
        return min(min(self._next_at_s, self._tick_at_s) - monotonic(), lease.next_step_s)

    async def _end(self) -> None:
        await self._bell.close()
        await super()._end()

    async def _has_changed(self, now_s: float) -> bool:
        """Once per tick: is there a spec before the one that is waited for, or is that due by now?

        It is if the server's clock was set, or this machine slept and its timers with it.
        """
        if now_s < self._tick_at_s:
            return False
        next_ms = self._next_ms
        before = "+inf" if next_ms is None else f"({next_ms}"
        earlier, time = await self.connection.submit(
            commands(
                ("ZCOUNT", self._keys.repeat, "-inf", before),
                ("TIME",),
                effect=Effect.READ,
            )
        )
        self._set_tick()
        is_due = next_ms is not None and next_ms <= _ms(time)
        return is_due or bool(earlier != len(self._unreadable))

    def _set_tick(self) -> None:
        self._tick_at_s = monotonic() + self._config.tick_interval_ms / 1000

    # ── Firing ──────────────────────────────────────────────────────────────────────────────────

    async def _fire_due(self) -> Fired:
        """Fire what is due by now, the oldest first, for as long as it leads."""
        key, batch = self._keys.repeat, self._config.batch
        now_ms = _ms(await self.connection.execute("TIME", effect=Effect.READ))
        current = _Round(until_ms=now_ms, now_ms=now_ms)
        while not current.is_stale and await self.lease.hold(self.connection):
            # What cannot be read stays where it is, before all others: step over it.
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
        self._tell(current)
        return Fired(current.fires, len(current.unreadable), next_due_s)

    async def _find_next(self, current: _Round) -> float | None:
        """Note when the next spec is due, of those that this round did not fire; in how many
        seconds that is."""
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
            next_due_s = max(0.0, (self._next_ms * 1000 - _us(time)) / 1e6)
        self._next_at_s = math.inf if next_due_s is None else monotonic() + next_due_s
        self._set_tick()
        if current.is_stale:
            self._tick_at_s = monotonic() + _LOOK_AGAIN_S
        return next_due_s

    async def _fire_page(self, due: list[tuple[bytes, int]], current: _Round) -> None:
        """Fire some due specs, in as few script calls as their size allows."""
        hashes = await self.connection.submit(
            commands(
                *(("HMGET", self._spec_key(member), SPEC, FIRED, RETRY) for member, _ in due),
                effect=Effect.READ,
                raises=False,
            )
        )
        owed = self._owed(due, hashes if len(due) > 1 else [hashes], current)
        for request in self._requests(owed, current.now_ms):
            now_ms, fires, stale = await self.connection.submit(request)
            # The clock may have been put back: what was due when the round began still is.
            current.now_ms = max(current.until_ms, now_ms)
            current.fires += fires
            current.is_stale = current.is_stale or stale > 0
            if not await self.lease.hold(self.connection):
                break

    def _owed(
        self, due: list[tuple[bytes, int]], hashes: list[Any], current: _Round
    ) -> Iterator[Owed]:
        """What each of these specs owes; those that cannot be read are reported."""
        now_ms = current.now_ms
        led_since_ms = now_ms - int(self.lease.held_s * 1000)
        for (member, due_ms), content in zip(due, hashes, strict=True):
            try:
                spec, fired = _read(content, due_ms)
                plan = plan_fires(spec, due_ms, now_ms, fired, led_since_ms=led_since_ms)
            except ValueError as error:
                self._report(member, str(error), current)
                continue
            lag_ms = now_ms - due_ms
            current.lag_ms = max(current.lag_ms, lag_ms)
            # One that has not fired before may have been seen late.
            is_late = lag_ms >= min(LATE_MS, spec.pattern.interval_ms or LATE_MS)
            if is_late and fired and due_ms > led_since_ms:
                current.late += 1
                current.late_ms = max(current.late_ms, lag_ms)
            yield member, due_ms, spec, plan

    def _report(self, member: bytes, error: str, current: _Round) -> None:
        current.unreadable[member] = error
        if self._unreadable.get(member) != error:
            logger.error(
                "queue %s: repeat spec %r cannot be read, and does not fire: %s",
                self._keys.queue,
                member.decode(errors="replace"),
                error,
                extra={"queue": self._keys.queue},
            )

    def _tell(self, current: _Round) -> None:
        """Say what a round did, and that it came late."""
        if self._metrics is not None:
            tick = SchedulerTick(current.fires, current.late, current.lag_ms)
            self._metrics.scheduler_tick(tick)
        if current.late and monotonic() >= self._warn_at_s:
            self._warn_at_s = monotonic() + WARN_EVERY_S
            logger.warning(
                "queue %s: the scheduler is behind: %d specs fired up to %.1f s late; those "
                "whose next time had come by then go by their policy for missed fires",
                self._keys.queue,
                current.late,
                current.late_ms / 1000,
                extra={
                    "queue": self._keys.queue,
                    "specs": current.late,
                    "late_ms": current.late_ms,
                },
            )

    def _requests(self, owed: Iterable[Owed], now_ms: int) -> Iterator[Request]:
        """The script calls that carry plans out, in this order. A long plan takes several, each
        starting from where the last one leaves."""
        names: list[bytes] = []
        arguments: list[Any] = []
        fires = size = 0
        for member, due_ms, spec, plan in owed:
            each = len(spec.payload) + 1
            for step in plan.steps(max(1, min(FIRES_PER_CALL, _BYTES_PER_CALL // each))):
                times = step.fire_times_ms
                own = max(1, len(times))
                if names and (fires + own > FIRES_PER_CALL or size + own * each > _BYTES_PER_CALL):
                    yield self._request(names, arguments)
                    names, arguments, fires, size = [], [], 0, 0
                names.append(self._spec_key(member))
                next_ms = "" if step.next_ms is None else step.next_ms
                arguments += (member, due_ms, next_ms, spec.job_name, len(times))
                for moment_ms in times:
                    job_id = self._ulids.next(now_ms)
                    envelope = encode_envelope(job_id, spec.payload, now_ms, 0, spec.retry)
                    arguments += (moment_ms, envelope)
                fires, size = fires + own, size + own * each
                due_ms = step.next_ms or 0
        if names:
            yield self._request(names, arguments)

    def _request(self, names: list[bytes], arguments: list[Any]) -> Request:
        keys, keep = self._keys, self._config.max_stream_len
        return scripts.call(
            scripts.FIRE,
            [keys.stream, keys.delayed, keys.repeat, keys.wake, *names],
            ["" if keep is None else keep, *arguments],
            Effect.IDEMPOTENT,
        )

    def _spec_key(self, member: bytes) -> bytes:
        return self._keys.repeat_spec(member.decode(errors="replace"))


class Scheduler(Standalone):
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
        super().__init__(redis_url, queue_name, "scheduler", credential_provider)
        # 0 stands for the default, as None does.
        check_int("tick_interval_ms", tick_interval_ms, 0, MAX_MS)
        check_int("batch", batch, 0)
        check_int("max_stream_len", max_stream_len, 0)
        check_int("lock_ttl_secs", lock_ttl_secs, 0, MAX_MS // 1000)
        if holder_id is not None:
            check_text(holder_id, "holder_id")
        default = SchedulerConfig()
        self._config = SchedulerConfig(
            tick_interval_ms=tick_interval_ms or default.tick_interval_ms,
            batch=batch or default.batch,
            max_stream_len=max_stream_len,
            lock_ttl_s=lock_ttl_secs or default.lock_ttl_s,
        )
        self._holder_id = holder_id
        self._metrics = metrics

    def _duty(self, connection: Connection) -> SchedulerDuty:
        return SchedulerDuty(
            self._keys,
            connection,
            self._connect(),
            self._config,
            holder_id=self._holder_id,
            metrics=self._metrics,
        )


def _read(content: list[bytes | None] | ReplyError, due_ms: int) -> tuple[RepeatSpec, int]:
    """A spec and how often it has fired; ValueError if that cannot be said."""
    if isinstance(content, ReplyError):
        if content.code != "WRONGTYPE":  # about the server, not about this spec
            raise exception_for(content)
        raise ValueError("its key holds no hash")
    encoded, fired, retry = content
    if encoded is None:
        raise ValueError("its hash has no field `spec`")
    if fired is not None and not _FIRED.fullmatch(fired):
        raise ValueError(f"its count of fires is {fired!r}")
    if due_ms < 0:
        raise ValueError("its score is no time")
    return RepeatSpec.decode(encoded, retry), int(fired or 0)


def _us(time: list[bytes]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])


def _ms(time: list[bytes]) -> int:
    return _us(time) // 1000
