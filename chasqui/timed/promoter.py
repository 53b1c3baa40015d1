"""The promoter: moves due jobs from the delayed set to the stream, within a millisecond or two.

One process leads. It sleeps until the next job is due; the script computes that by Redis's clock,
so workers' clocks do not matter. Our producers wake the leader when they add a job that is due
before all others. chasquimq's producers do not, so the leader also polls the set:
`PromoterConfig.poll_interval_ms` says how often. A job that a poll saw before it was due is not
late. The same poll notices that Redis's clock was set, or that this machine slept and its timers
with it.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from chasqui.events.writer import EventWriter
from chasqui.managing.consumers import Sweeper
from chasqui.metrics import DlqRouted, LockOutcome, MetricsSink, PromoterTick
from chasqui.model.config import MAX_MS, CredentialProvider, check_int
from chasqui.model.keys import Keys, check_text
from chasqui.scripts import timing
from chasqui.scripts.timing import Promoted
from chasqui.timed.leader import LeaderLock
from chasqui.timed.leader_loop import LeaderLoop, LeaderLoopConfig, LeaderLoopRunner
from chasqui.timed.wakeup import WakeList
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import time_us

logger = logging.getLogger(__name__)

#: For how long after a job that came without a wake more such jobs are expected.
FOREIGN_MEMORY_S: Final = 3600.0
#: The longest time between two polls while none are expected. Usually a poll comes with each
#: renewal of the lock, every 3 s.
IDLE_POLL_S: Final = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoterConfig(LeaderLoopConfig):
    """How a promoter works."""

    #: How often to look for jobs that came without a wake, while such jobs come: a job that
    #: chasquimq added with a shorter delay may be late by that much. The first one after an hour
    #: without any may be late by IDLE_POLL_S.
    poll_interval_ms: int = 100
    #: Write a `waiting` event for each promoted job.
    has_events: bool = True


class PromoterLoop(LeaderLoop):
    """One queue's promoter."""

    name = "promoter"

    def __init__(
        self,
        keys: Keys,
        connection: Connection,
        wake_connection: Connection,
        config: PromoterConfig | None = None,
        *,
        holder_id: str | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        self._config = config or PromoterConfig()
        lock = LeaderLock(keys.promoter_lock, holder_id, self._config.lock_ttl_s)
        super().__init__(keys, connection, wake_connection, lock, metrics)
        self._sweeper = Sweeper(keys, connection)
        self._events = EventWriter(connection, keys) if self._config.has_events else None
        self._outcome: LockOutcome | None = None
        #: The score of the first job when last seen; None if there was none.
        self._first: bytes | None = None
        self._is_woken = False
        self._due_at_s = self._poll_at_s = 0.0
        self._foreign_until_s = 0.0

    async def run_once(self) -> Promoted | None:
        """Promote what is due, at most one `batch`; None if another promoter leads."""
        is_leader = await self.lock.hold(self.connection)
        self._report_outcome(LockOutcome.ACQUIRED if is_leader else LockOutcome.HELD)
        return await self._promote() if is_leader else None

    async def _turn(self) -> float:
        lock, wake_list = self.lock, self._wake_list
        self._is_woken = wake_list.take_wake() or self._is_woken
        was_leader = lock.is_held
        must_look = lock.must_renew or monotonic() >= self._poll_at_s
        # Submitted here, the poll leaves in one write with the renewal.
        look = self._look() if was_leader and must_look else None
        if not await lock.hold(self.connection, is_freed=self._is_woken):
            self._is_woken = False
            self._report_outcome(LockOutcome.HELD)
            wake_list.listen(lock.freed, lock.free_in_s)
            return lock.next_step_s
        self._report_outcome(LockOutcome.ACQUIRED)
        # Never beyond the lock: it would take the next leader's wakes.
        wake_list.listen(self._keys.wake, lock.next_step_s)
        if self._is_woken or not was_leader or monotonic() >= self._due_at_s:
            await self._promote()
        elif look is not None:
            await self._heed(await look)
        self._sweeper.turn()
        now_s = monotonic()
        wait_s = lock.next_step_s
        if wake_list.is_waiting_for(self._keys.wake):
            wait_s += WakeList.LATE_S  # the end of its wait brings the renewal, in the same turn
        else:
            # It still waits for the lock, or lost its link: nobody can wake it.
            poll_s = self._config.poll_interval_ms / 1000
            self._poll_at_s = min(self._poll_at_s, now_s + poll_s)
        return min(min(self._due_at_s, self._poll_at_s) - now_s, wait_s)

    async def _promote(self) -> Promoted:
        keys, config = self._keys, self._config
        promoted = Promoted.parse(
            await self.connection.submit(timing.promote(keys, config.batch, config.max_stream_len))
        )
        now_s, next_due_s = monotonic(), promoted.next_due_s
        self._is_woken = False
        self._first = promoted.first
        self._due_at_s = math.inf if next_due_s is None else now_s + next_due_s
        self._schedule_poll(now_s)
        if promoted.malformed:
            logger.error(
                "queue %s: moved %d delayed members that are not jobs to the DLQ",
                keys.queue,
                promoted.malformed,
                extra={"queue": keys.queue, "members": promoted.malformed},
            )
        if self._events is not None:
            self._events.promoted(promoted.jobs, promoted.malformed, promoted.now_ms)
        if self._metrics is not None:
            tick = PromoterTick(promoted.count, promoted.depth, promoted.lag_ms)
            self._metrics.promoter_tick(tick)
            for _ in range(promoted.malformed):
                self._metrics.dlq_routed(DlqRouted("malformed", 0, ""))
        return promoted

    def _look(self) -> asyncio.Future[Any]:
        """Ask whether there is a new first job that came without a wake, and for Redis's time."""
        before = b"+inf" if self._first is None else b"(" + self._first
        count = ("ZCOUNT", self._keys.delayed, "-inf", before)
        asked = (count,) if self._first is None else (count, ("TIME",))
        look = self.connection.submit(commands(*asked, effect=Effect.READ))
        # A turn that fails does not await it: then its error must not be reported as lost.
        look.add_done_callback(lambda look: look.cancelled() or look.exception())
        return look

    async def _heed(self, reply: Any) -> None:
        """Promote if the look found a new first job, or the known one is due."""
        earlier, is_due = reply, False
        if self._first is not None:
            earlier, time = reply
            is_due = float(self._first) <= time_us(time) // 1000
        if earlier or is_due or self._metrics is not None:  # metrics report the depth
            await self._promote()
        # Asked only now: a wake may come in behind the count that it was for.
        if earlier and self._wake_list.is_waiting_for(self._keys.wake):
            self._foreign_until_s = monotonic() + FOREIGN_MEMORY_S
        self._schedule_poll(monotonic())

    def _schedule_poll(self, now_s: float) -> None:
        is_foreign = now_s < self._foreign_until_s
        poll_s = self._config.poll_interval_ms / 1000
        self._poll_at_s = now_s + (poll_s if is_foreign else max(poll_s, IDLE_POLL_S))

    def _report_outcome(self, outcome: LockOutcome) -> None:
        if outcome is not self._outcome:
            was_leader = self._outcome is LockOutcome.ACQUIRED
            self._outcome = outcome
            if self._metrics is not None:
                if was_leader:
                    self._metrics.promoter_lock_outcome(LockOutcome.LOST)
                self._metrics.promoter_lock_outcome(outcome)


class Promoter(LeaderLoopRunner):
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
        # 0 means the default, as None does.
        check_int("poll_interval_ms", poll_interval_ms, 0, MAX_MS)
        check_int("promote_batch", promote_batch, 0)
        check_int("max_stream_len", max_stream_len, 0)
        check_int("lock_ttl_secs", lock_ttl_secs, 0, MAX_MS // 1000)
        if holder_id is not None:
            check_text(holder_id, "holder_id")
        default = PromoterConfig()
        config = PromoterConfig(
            poll_interval_ms=poll_interval_ms or default.poll_interval_ms,
            batch=promote_batch or default.batch,
            max_stream_len=max_stream_len,
            lock_ttl_s=lock_ttl_secs or default.lock_ttl_s,
        )
        make = partial(PromoterLoop, config=config, holder_id=holder_id, metrics=metrics)
        super().__init__("promoter", make, redis_url, queue_name, credential_provider)
