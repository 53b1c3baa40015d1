"""The scheduler: fires repeat specs when they are due, each slot once, whoever leads.

It sleeps until the next fire by Redis's clock, and looks once per tick whether a spec was written
that fires earlier, or that clock was set. Which fires a spec owes, repeat.py knows. The script
that fires compares the spec's score with the one that the fires were computed from, so that a
leader that was paused in between, or a request sent twice, cannot fire a slot again.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from chasqui import scripts
from chasqui._core.envelope import encode_envelope
from chasqui._core.reply import ReplyError
from chasqui._core.ulid import UlidFactory
from chasqui.config import MAX_MS, CredentialProvider, check_int
from chasqui.connection import Connection
from chasqui.duty import Duty, Standalone
from chasqui.keys import FIRED, RETRY, SPEC, Keys, check_text
from chasqui.leader import LEASE_TTL_S, Bell, Lease
from chasqui.repeat import FirePlan, RepeatSpec, plan_fires
from chasqui.repeatables import scored
from chasqui.request import Effect, Request, commands
from chasqui.server import exception_for

logger = logging.getLogger(__name__)

#: Jobs that one script call fires, at most so many and so large: the server serves nobody else
#: meanwhile.
FIRES_PER_CALL: Final = 250
_BYTES_PER_CALL: Final = 4 << 20
#: The shortest time between two looks while there is no spec at all.
EMPTY_POLL_S: Final = 3.0
#: When to look again after another scheduler was seen at work, or a fire's answer was lost.
_LOOK_AGAIN_S: Final = 0.05
#: What is no such count of fires, the script could not count on from.
_FIRED: Final = re.compile(rb"0|[1-9][0-9]{0,14}")


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
    ) -> None:
        self._config = config or SchedulerConfig()
        super().__init__(connection, Lease(keys.scheduler_lock, holder_id, self._config.lock_ttl_s))
        self._keys = keys
        self._bell = Bell(bell, self._awake.set)
        self._ulids = UlidFactory()
        #: Specs that could not be read when last seen, and why: each told once.
        self._unreadable: dict[bytes, str] = {}
        #: The score of the next spec to fire, when last seen; None if there was none.
        self._next_ms: int | None = None
        self._next_at_s = self._tick_at_s = 0.0
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
        key, batch = self._keys.repeat, self._config.batch
        now_ms = _ms(await self.connection.execute("TIME", effect=Effect.READ))
        fires = 0
        is_stale = False
        unreadable: dict[bytes, str] = {}
        while not is_stale:
            # What cannot be read stays where it is, before all others: step over it.
            reply = await self.connection.execute(
                *("ZRANGEBYSCORE", key, "-inf", now_ms),
                *("WITHSCORES", "LIMIT", len(unreadable), batch),
                effect=Effect.READ,
            )
            due = list(scored(reply))
            if due:
                count, is_stale = await self._fire_page(due, now_ms, unreadable)
                fires += count
            if len(due) < batch:
                break
        self._unreadable = unreadable
        time, upcoming = await self.connection.submit(
            commands(
                ("TIME",),
                ("ZRANGEBYSCORE", key, f"({now_ms}", "+inf", "WITHSCORES", "LIMIT", 0, 1),
                effect=Effect.READ,
            )
        )
        self._next_ms = next((score for _, score in scored(upcoming)), None)
        self._is_empty = self._next_ms is None and not unreadable
        next_due_s = None
        if self._next_ms is not None:
            next_due_s = max(0.0, (self._next_ms * 1000 - _us(time)) / 1e6)
        self._next_at_s = math.inf if next_due_s is None else monotonic() + next_due_s
        self._set_tick()
        if is_stale:
            self._tick_at_s = monotonic() + _LOOK_AGAIN_S
        return Fired(fires, len(unreadable), next_due_s)

    async def _fire_page(
        self, due: list[tuple[bytes, int]], now_ms: int, unreadable: dict[bytes, str]
    ) -> tuple[int, bool]:
        """Fire some due specs; how many jobs that made, and whether one was not due any more."""
        hashes = await self.connection.submit(
            commands(
                *(("HMGET", self._spec_key(member), SPEC, FIRED, RETRY) for member, _ in due),
                effect=Effect.READ,
                raises=False,
            )
        )
        fires, is_stale = 0, False
        for (member, due_ms), content in zip(
            due, hashes if len(due) > 1 else [hashes], strict=True
        ):
            try:
                spec, plan = _read(content, due_ms, now_ms)
            except ValueError as error:
                unreadable[member] = str(error)
                if self._unreadable.get(member) != unreadable[member]:
                    logger.error(
                        "repeat spec %r of queue %s cannot be read, and does not fire: %s",
                        member.decode(errors="replace"),
                        self._keys.queue,
                        error,
                        extra={"queue": self._keys.queue},
                    )
                continue
            for request in self._requests(member, spec, plan, due_ms, now_ms):
                count = await self.connection.submit(request)
                if count < 0:
                    is_stale = True
                    break
                fires += count
        return fires, is_stale

    def _requests(
        self, member: bytes, spec: RepeatSpec, plan: FirePlan, due_ms: int, now_ms: int
    ) -> Iterator[Request]:
        """The script calls that carry a plan out; each starts from where the last one leaves."""
        keys, keep = self._keys, self._config.max_stream_len
        most = max(1, min(FIRES_PER_CALL, _BYTES_PER_CALL // (len(spec.payload) + 1)))
        for step in plan.steps(most):
            arguments: list[Any] = [member, due_ms]
            arguments.append("" if step.next_ms is None else step.next_ms)
            arguments.append("" if keep is None else keep)
            arguments.append(spec.job_name)
            for moment_ms in step.fire_times_ms:
                job_id = self._ulids.next(now_ms)
                envelope = encode_envelope(job_id, spec.payload, now_ms, 0, spec.retry)
                arguments += (moment_ms, envelope)
            yield scripts.call(
                scripts.FIRE,
                [keys.stream, keys.delayed, keys.repeat, self._spec_key(member), keys.wake],
                arguments,
                Effect.IDEMPOTENT,
            )
            due_ms = step.next_ms or 0

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

    def _duty(self, connection: Connection) -> SchedulerDuty:
        return SchedulerDuty(
            self._keys, connection, self._connect(), self._config, holder_id=self._holder_id
        )


def _read(
    content: list[bytes | None] | ReplyError, due_ms: int, now_ms: int
) -> tuple[RepeatSpec, FirePlan]:
    """A spec and what it owes; ValueError if that cannot be said."""
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
    spec = RepeatSpec.decode(encoded, retry)
    return spec, plan_fires(spec, due_ms, now_ms, int(fired or 0))


def _us(time: list[bytes]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])


def _ms(time: list[bytes]) -> int:
    return _us(time) // 1000
