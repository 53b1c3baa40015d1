"""The promoter: moves due jobs from the delayed set to the stream, within a millisecond or two.

One leads. It sleeps until the next job is due, which the script answers by Redis's clock; workers'
clocks decide nothing. Our producers ring a bell when they put a job before all others. Those
of chasquimq do not, so the set is also looked at from time to time: how often, `PromoterConfig`
says. A job that was seen before it is due is never late for that reason, whoever put it. The same
look notices that Redis's clock was set, or that this machine slept and its timers with it.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xadd_event
from chasqui.model.config import MAX_MS, CredentialProvider, check_int
from chasqui.transport.connection import Connection
from chasqui.managing.consumers import Sweeper
from chasqui.timed.leader_loop import Duty, Standalone
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.events.writer import DLQ, WAITING
from chasqui.model.keys import EVENT_ATTEMPT, EVENT_CREATED, REASON, Keys, check_text
from chasqui.leader import LEASE_TTL_S, Bell, Lease
from chasqui.metrics import DlqRouted, LockOutcome, MetricsSink, PromoterTick, guard
from chasqui.transport.request import Effect, Request, commands
from chasqui.managing.retention import Log, Trimmer

logger = logging.getLogger(__name__)

#: How long after the last job that nobody rang for such jobs are still expected.
FOREIGN_MEMORY_S: Final = 3600.0
#: The longest time between two looks at the set while none are expected. As a rule they come with
#: the renewals of the lease, every 3 s.
IDLE_POLL_S: Final = 3.5


@dataclass(frozen=True, slots=True)
class PromoterConfig:
    """How a promoter works."""

    #: How often to look for jobs that nobody rings for, while there are such: a job that
    #: chasquimq put with a shorter delay may be late by that much. The first one after an hour
    #: without any may be late by IDLE_POLL_S.
    poll_interval_ms: int = 100
    #: Jobs moved by one script call.
    batch: int = 256
    #: What the stream is trimmed to, about; None for no trimming.
    max_stream_len: int | None = None
    lock_ttl_s: int = LEASE_TTL_S
    #: Write a `waiting` event for each promoted job.
    has_events: bool = True

    def __post_init__(self) -> None:
        for name in ("poll_interval_ms", "batch", "max_stream_len", "lock_ttl_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class Promoted:
    """What one look at the delayed set did and found."""

    count: int
    #: Members that could not be read; they are in the dead-letter queue now.
    malformed: int
    #: Jobs that are still delayed.
    depth: int
    #: How long the first of them has been due.
    lag_ms: int
    #: How long until it is due, by the server's clock; None if there is none.
    next_due_s: float | None


class PromoterDuty(Duty):
    """One queue's promoter, on a command connection that it may share with others.

    `bell` is a connection of its own, to be slept on, and closed at the end of `run`.
    """

    name = "promoter"

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        bell: Connection,
        config: PromoterConfig | None = None,
        *,
        holder_id: str | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        self._config = config or PromoterConfig()
        lease = Lease(keys.promoter_lock, holder_id, self._config.lock_ttl_s)
        super().__init__(connection, lease, keys.queue)
        self._keys = keys
        self._bell = Bell(bell, self._awake.set)
        self._sweeper = Sweeper(keys, connection)
        self._metrics = guard(metrics)
        self._outcome: LockOutcome | None = None
        #: The score of the first job when last seen; None if there was none.
        self._first: bytes | None = None
        self._has_rung = False
        self._due_at_s = self._poll_at_s = 0.0
        self._foreign_until_s = 0.0
        self._trimmer = Trimmer(Log.events(keys))
        self._flushing: asyncio.Future[Any] | None = None
        self._flush_failure = ""

    async def run_once(self) -> Promoted | None:
        """Promote one batch of what is due; None if another promoter leads."""
        is_leader = await self.lease.hold(self.connection)
        self._tell_outcome(LockOutcome.ACQUIRED if is_leader else LockOutcome.HELD)
        return await self._promote() if is_leader else None

    async def _turn(self) -> float:
        lease, bell = self.lease, self._bell
        self._has_rung = bell.take_ring() or self._has_rung
        was_leader = lease.is_held
        must_look = lease.must_renew or monotonic() >= self._poll_at_s
        # In one write with the renewal.
        look = self._look() if was_leader and must_look else None
        if not await lease.hold(self.connection, is_freed=self._has_rung):
            self._has_rung = False
            self._tell_outcome(LockOutcome.HELD)
            bell.listen(lease.freed, lease.free_in_s)
            return lease.next_step_s
        self._tell_outcome(LockOutcome.ACQUIRED)
        # Never beyond the lease: it would take the next leader's rings.
        bell.listen(self._keys.wake, lease.next_step_s)
        if self._has_rung or not was_leader or monotonic() >= self._due_at_s:
            await self._promote()
        elif look is not None:
            await self._heed(await look)
        self._sweeper.turn()
        now_s = monotonic()
        wait_s = lease.next_step_s
        if bell.is_waiting_for(self._keys.wake):
            wait_s += Bell.LATE_S  # the end of its wait brings the renewal, in the same turn
        else:
            # It still waits for the lease, or lost its link: nobody can ring.
            poll_s = self._config.poll_interval_ms / 1000
            self._poll_at_s = min(self._poll_at_s, now_s + poll_s)
        return min(min(self._due_at_s, self._poll_at_s) - now_s, wait_s)

    async def _promote(self) -> Promoted:
        config, keys = self._config, self._keys
        reply = await self.connection.submit(
            scripts.call(
                scripts.PROMOTE,
                [keys.delayed, keys.stream, keys.dlq, keys.traces, keys.didx("")],
                [config.batch, "" if config.max_stream_len is None else config.max_stream_len],
                # A repeat moves what is due then; nothing is moved twice.
                Effect.IDEMPOTENT,
            )
        )
        now_ms, depth, lag_ms, wait_us, first, malformed, own = reply[:7]
        ids, names = reply[7::2], reply[8::2]
        now_s = monotonic()
        self._has_rung = False
        self._first = first or None
        self._due_at_s = math.inf if wait_us < 0 else now_s + wait_us / 1e6
        self._schedule_poll(now_s)
        if malformed:
            logger.error(
                "queue %s: %d delayed members were no jobs: they are in the dead-letter queue",
                keys.queue,
                malformed,
                extra={"queue": keys.queue, "members": malformed},
            )
        if config.has_events and (ids or malformed):
            created = dict(zip(own[::2], own[1::2], strict=True))
            await self._flush(ids, names, created, malformed, now_ms)
        if self._metrics is not None:
            self._metrics.promoter_tick(PromoterTick(len(ids), depth, lag_ms))
            for _ in range(malformed):
                self._metrics.dlq_routed(DlqRouted("malformed", 0, ""))
        next_due_s = None if wait_us < 0 else wait_us / 1e6
        return Promoted(len(ids), malformed, depth, lag_ms, next_due_s)

    def _look(self) -> asyncio.Future[Any]:
        """Ask whether there is a new first job that nobody rang for, and what time it is."""
        before = b"+inf" if self._first is None else b"(" + self._first
        count = ("ZCOUNT", self._keys.delayed, "-inf", before)
        asked = (count,) if self._first is None else (count, ("TIME",))
        look = self.connection.submit(commands(*asked, effect=Effect.READ))
        look.add_done_callback(_seen)
        return look

    async def _heed(self, reply: Any) -> None:
        """Promote if the look showed something to promote, or the first job is due by now."""
        earlier, is_due = reply, False
        if self._first is not None:
            earlier, (seconds, micros) = reply
            is_due = float(self._first) <= int(seconds) * 1000 + int(micros) // 1000
        if earlier or is_due or self._metrics is not None:  # who counts wants to know the depth
            await self._promote()
        # Asked only now: a ring may come in behind the count that it was for.
        if earlier and self._bell.is_waiting_for(self._keys.wake):
            self._foreign_until_s = monotonic() + FOREIGN_MEMORY_S
        self._schedule_poll(monotonic())

    def _schedule_poll(self, now_s: float) -> None:
        is_foreign = now_s < self._foreign_until_s
        poll_s = self._config.poll_interval_ms / 1000
        self._poll_at_s = now_s + (poll_s if is_foreign else max(poll_s, IDLE_POLL_S))

    async def _flush(
        self,
        ids: list[bytes],
        names: list[bytes],
        created: dict[int, bytes],
        malformed: int,
        now_ms: int,
    ) -> None:
        """Write the events of promoted jobs: one pipeline that nobody waits for, one at a time.
        `created` has by number when those were whose id does not tell."""
        keys = self._keys
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        buffer = CommandBuffer()
        for _ in range(malformed):
            fields = (EVENT_ATTEMPT, 0, REASON, b"malformed")
            xadd_event(buffer, keys.events, DLQ, "", now_ms, "", fields)
        for i, (one, name) in enumerate(zip(ids, names, strict=True)):
            job_id, text = one.decode(errors="replace"), name.decode(errors="replace")
            own = [EVENT_CREATED, created[i]] if i in created else None
            xadd_event(buffer, keys.events, WAITING, job_id, now_ms, text, own)
        request = Request(bytes(buffer), Effect.ONCE, count=buffer.commands)
        self._flushing = self.connection.submit(request)
        self._flushing.add_done_callback(self._on_flushed)
        if (trim := self._trimmer.wrote(buffer.commands)) is not None:
            self.connection.submit(trim).add_done_callback(_seen)  # what fails it fails them too

    def _on_flushed(self, flushed: asyncio.Future[Any]) -> None:
        """Events are best effort: say once what is wrong, and go on."""
        error = None if flushed.cancelled() else flushed.exception()
        if isinstance(error, UnreachableError | OutcomeUnknownError):
            return  # of a lost server the connection tells
        if error is not None and repr(error) != self._flush_failure:
            queue = self._keys.queue
            fields = {"queue": queue}
            text = "queue %s: events of promoted jobs may be lost: %s"
            logger.warning(text, queue, error, extra=fields)
        self._flush_failure = repr(error)

    async def _end(self) -> None:
        await self._bell.close()
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=1)
        await super()._end()

    def _tell_outcome(self, outcome: LockOutcome) -> None:
        if outcome is not self._outcome:
            was_leader = self._outcome is LockOutcome.ACQUIRED
            self._outcome = outcome
            if self._metrics is not None:
                if was_leader:
                    self._metrics.promoter_lock_outcome(LockOutcome.LOST)
                self._metrics.promoter_lock_outcome(outcome)


class Promoter(Standalone):
    """Promotes the delayed jobs of one queue, alone in its process or beside anything else."""

    def __init__(
        self,
        redis_url: str | None,
        queue_name: str,
        *,
        poll_interval_ms: int | None = None,
        promote_batch: int | None = None,
        max_stream_len: int | None = None,
        lock_ttl_secs: int | None = None,
        holder_id: str | None = None,
        credential_provider: CredentialProvider | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        super().__init__(redis_url, queue_name, "promoter", credential_provider)
        # 0 stands for the default, as None does.
        check_int("poll_interval_ms", poll_interval_ms, 0, MAX_MS)
        check_int("promote_batch", promote_batch, 0)
        check_int("max_stream_len", max_stream_len, 0)
        check_int("lock_ttl_secs", lock_ttl_secs, 0, MAX_MS // 1000)
        if holder_id is not None:
            check_text(holder_id, "holder_id")
        default = PromoterConfig()
        self._config = PromoterConfig(
            poll_interval_ms=poll_interval_ms or default.poll_interval_ms,
            batch=promote_batch or default.batch,
            max_stream_len=max_stream_len,
            lock_ttl_s=lock_ttl_secs or default.lock_ttl_s,
        )
        self._holder_id = holder_id
        self._metrics = metrics

    def _duty(self, connection: Connection) -> PromoterDuty:
        return PromoterDuty(
            self._keys,
            connection,
            self._connect(),
            self._config,
            holder_id=self._holder_id,
            metrics=self._metrics,
        )


def _seen(look: asyncio.Future[Any]) -> None:
    """Nobody may wait for it any more: an error is then nobody's concern."""
    if not look.cancelled():
        look.exception()
