"""A sink for tests: it keeps every record, and a test can wait for the next one."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from chasqui.metrics.sink import (
    DlqRouted,
    JobOutcome,
    LockOutcome,
    MetricsSink,
    OutcomeKind,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
    SchedulerTick,
)

R = TypeVar(
    "R",
    PromoterTick,
    LockOutcome,
    ReaderBatch,
    JobOutcome,
    RetryScheduled,
    DlqRouted,
    SchedulerTick,
)


class InMemorySink(MetricsSink):
    """Keeps every record. Belongs to one event loop."""

    def __init__(self) -> None:
        self._records: defaultdict[type, list[Any]] = defaultdict(list)
        self._given: defaultdict[type, int] = defaultdict(int)
        self._waiters: list[asyncio.Future[None]] = []

    # ── Waiting ─────────────────────────────────────────────────────────────────────────────────

    async def next(self, kind: type[R]) -> R:
        """The first record of a kind that no call has returned yet, as soon as there is one.

        Records from before the call are not missed: the first call returns the first of all.
        """
        records = self._records[kind]
        while self._given[kind] == len(records):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._given[kind] += 1
        return cast(R, records[self._given[kind] - 1])

    # ── Counting ────────────────────────────────────────────────────────────────────────────────

    def all(self, kind: type[R]) -> list[R]:
        """Every record of a kind so far."""
        return list(self._records[kind])

    @property
    def jobs_completed(self) -> int:
        return sum(outcome.kind is OutcomeKind.OK for outcome in self._outcomes)

    @property
    def jobs_failed(self) -> int:
        """Runs that ended with an exception of any kind."""
        return sum(outcome.kind is not OutcomeKind.OK for outcome in self._outcomes)

    @property
    def jobs_panicked(self) -> int:
        return sum(outcome.kind is OutcomeKind.PANIC for outcome in self._outcomes)

    @property
    def last_handler_duration_us(self) -> int | None:
        return self._outcomes[-1].handler_duration_us if self._outcomes else None

    @property
    def total_retries(self) -> int:
        return len(self._records[RetryScheduled])

    @property
    def total_read(self) -> int:
        return sum(batch.size for batch in self._records[ReaderBatch])

    @property
    def total_reclaimed(self) -> int:
        return sum(batch.reclaimed for batch in self._records[ReaderBatch])

    @property
    def total_promoted(self) -> int:
        return sum(tick.promoted for tick in self._records[PromoterTick])

    @property
    def delayed_depth(self) -> int | None:
        """Delayed jobs, as the promoter last saw them."""
        ticks = self._records[PromoterTick]
        return ticks[-1].depth if ticks else None

    @property
    def is_leader(self) -> bool | None:
        """None until the promoter has tried to take the leader lock."""
        outcomes = self._records[LockOutcome]
        return outcomes[-1] is LockOutcome.ACQUIRED if outcomes else None

    def dlq_count(self, reason: str | None = None) -> int:
        """Entries that went to the DLQ, for one reason or for any."""
        routed: Iterable[DlqRouted] = self._records[DlqRouted]
        return sum(reason in (None, one.reason) for one in routed)

    @property
    def _outcomes(self) -> list[JobOutcome]:
        return self._records[JobOutcome]

    # ── What a sink gets ────────────────────────────────────────────────────────────────────────

    def promoter_tick(self, tick: PromoterTick, /) -> None:
        self._keep(tick)

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None:
        self._keep(outcome)

    def reader_batch(self, batch: ReaderBatch, /) -> None:
        self._keep(batch)

    def job_outcome(self, outcome: JobOutcome, /) -> None:
        self._keep(outcome)

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        self._keep(retry)

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        self._keep(routed)

    def scheduler_tick(self, tick: SchedulerTick, /) -> None:
        self._keep(tick)

    def _keep(self, record: object) -> None:
        self._records[type(record)].append(record)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
