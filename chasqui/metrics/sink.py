"""The sink that gets metrics, and the records that it gets.

A sink is called on the event loop, between jobs, so it must return at once. Attempts count from 1.
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
    """The promoter became the leader, or found that another one leads. Reported on change only.

    A promoter that led and finds another leader reports LOST first: a sink that several promoters
    share cannot know whose HELD it gets.
    """

    ACQUIRED = "acquired"
    HELD = "held"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ReaderBatch:
    """A read returned jobs."""

    size: int
    #: How many of them were taken over from other consumers.
    reclaimed: int


class OutcomeKind(enum.StrEnum):
    """How a run ended; the values are metric labels."""

    OK = "ok"
    ERR = "err"
    #: The exception was not an `Exception`; it counts as a failed run.
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
    """A failed job is back in the delayed set: the server has confirmed it."""

    #: The number of the run to come.
    attempt: int
    backoff_ms: int
    name: str


@dataclass(frozen=True, slots=True)
class DlqRouted:
    """An entry is in the DLQ: the server has confirmed it."""

    reason: str
    #: 0 if the entry could not be read.
    attempt: int
    name: str


@dataclass(frozen=True, slots=True)
class SchedulerTick:
    """The leading scheduler fired what was due."""

    fired: int
    #: Repeat specs that fired at least a second or a whole interval late. A scheduler that keeps up
    #: has none.
    late: int
    #: How long the first of them had been due when it fired; 0 if none fired.
    lag_ms: int


class MetricsSink:
    """Gets a record of each event; override the methods that you need."""

    def promoter_tick(self, tick: PromoterTick, /) -> None: ...

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None: ...

    def reader_batch(self, batch: ReaderBatch, /) -> None: ...

    def job_outcome(self, outcome: JobOutcome, /) -> None: ...

    def retry_scheduled(self, retry: RetryScheduled, /) -> None: ...

    def dlq_routed(self, routed: DlqRouted, /) -> None: ...

    def scheduler_tick(self, tick: SchedulerTick, /) -> None: ...


#: Producers may invent any number of names, and a series stays for good once it is counted. Names
#: beyond the first 1000 are counted as one.
NAMES_MAX: Final = 1000
OTHER_NAMES: Final = "(other)"


class Names:
    """The names that jobs are counted under: the first NAMES_MAX that come."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def counted(self, name: str) -> str:
        """The name that a job of this name is counted under."""
        if name not in self._known:
            if len(self._known) >= NAMES_MAX:
                return OTHER_NAMES
            self._known.add(name)
        return name


class NoopSink(MetricsSink):
    """Counts nothing; records for it are not even made."""


class SafeSink(MetricsSink):
    """Wraps a sink: its exceptions are logged, once per kind of record, and go no further."""

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
                    "the metrics sink failed on %s; further failures are not logged",
                    record,
                    extra={"record": kind},
                )


def guard(sink: MetricsSink | None) -> SafeSink | None:
    """The sink, made safe to call; None if nothing counts, so that no records need be made."""
    if sink is None or type(sink) is NoopSink:
        return None
    return sink if isinstance(sink, SafeSink) else SafeSink(sink)
