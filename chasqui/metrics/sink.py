"""The sink that metrics go to, and the records it gets.

A sink is called on the event loop, between jobs: it must return at once. Attempts count from 1.
"""

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PromoterTick:
    """The leading promoter looked at the delayed set."""

    promoted: int
    #: Jobs that are still delayed.
    depth: int
    #: How long the oldest job that is still there has been due; 0 if none is.
    oldest_pending_lag_ms: int


class LockOutcome(enum.Enum):
    """The promoter became the leader, or found that another one is. Told on change only.

    One that led and finds another one tells LOST first. Only it knows: a sink that several share
    cannot tell whose HELD it gets.
    """

    ACQUIRED = "acquired"
    HELD = "held"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ReaderBatch:
    """A read brought jobs."""

    size: int
    #: How many of them were taken over from other consumers.
    reclaimed: int


class OutcomeKind(enum.StrEnum):
    """How a run ended; the values are metric labels."""

    OK = "ok"
    ERR = "err"
    #: With an exception that is no `Exception`; it counts as a failed run.
    PANIC = "panic"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """A handler's run ended."""

    kind: OutcomeKind
    attempt: int
    handler_duration_us: int
    name: str


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A failed job is really in the delayed set again."""

    #: Of the run to come.
    attempt: int
    backoff_ms: int
    name: str


@dataclass(frozen=True, slots=True)
class DlqRouted:
    """An entry really is in the dead-letter queue."""

    reason: str
    #: 0 where it was refused unread.
    attempt: int
    name: str


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    """The leading scheduler fired what was due."""

    fired: int
    #: Repeat specs that fired a second or a whole interval late, or later. A scheduler that keeps
    #: up has none.
    late: int
    #: How long the first of all had been due when it fired; 0 if none was.
    lag_ms: int


class MetricsSink:
    """Gets a record of what happens; override what you count."""

    def promoter_tick(self, tick: PromoterTick, /) -> None: ...

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None: ...

    def reader_batch(self, batch: ReaderBatch, /) -> None: ...

    def job_outcome(self, outcome: JobOutcome, /) -> None: ...

    def retry_scheduled(self, retry: RetryScheduled, /) -> None: ...

    def dlq_routed(self, routed: DlqRouted, /) -> None: ...

    def scheduler_tick(self, tick: SchedulerTick, /) -> None: ...


#: Names come from producers, who may make up any number of them, and a series is for good where it
#: is counted. Those that come later than so many are counted as one.
NAMES_MAX: Final = 1000
OTHER_NAMES: Final = "(other)"


class Names:
    """The names under which jobs are counted: the first that come."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def counted(self, name: str) -> str:
        """What a job of this name is counted as."""
        if name not in self._known:
            if len(self._known) >= NAMES_MAX:
                return OTHER_NAMES
            self._known.add(name)
        return name


class NoopSink(MetricsSink):
    """Counts nothing. Given this one, nobody even makes records."""


class SafeSink(MetricsSink):
    """Another sink whose exceptions are logged, once per kind of record, and go no further."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink
        self._has_logged: set[str] = set()

    def promoter_tick(self, tick: PromoterTick, /) -> None:
        self._tell(self._sink.promoter_tick, tick)

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None:
        self._tell(self._sink.promoter_lock_outcome, outcome)

    def reader_batch(self, batch: ReaderBatch, /) -> None:
        self._tell(self._sink.reader_batch, batch)

    def job_outcome(self, outcome: JobOutcome, /) -> None:
        self._tell(self._sink.job_outcome, outcome)

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        self._tell(self._sink.retry_scheduled, retry)

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        self._tell(self._sink.dlq_routed, routed)

    def scheduler_tick(self, tick: SchedulerTick, /) -> None:
        # A sink that does not derive from ours may be older than this method.
        method = getattr(self._sink, "scheduler_tick", None)
        if method is not None:
            self._tell(method, tick)

    def _tell(self, method: Callable[[R], None], record: R) -> None:
        try:
            method(record)
        except Exception:
            kind = type(record).__name__
            if kind not in self._has_logged:
                self._has_logged.add(kind)
                logger.exception(
                    "the metrics sink failed on %s; told once", record, extra={"record": kind}
                )


def guard(sink: MetricsSink | None) -> SafeSink | None:
    """The sink, made safe to call; None where nobody listens, so that no record need be made."""
    if sink is None or type(sink) is NoopSink:
        return None
    return sink if isinstance(sink, SafeSink) else SafeSink(sink)
