"""What happens in this process, told to whoever wants to count it."""

from chasqui.metrics.sink import (
    DlqRouted,
    JobOutcome,
    LockOutcome,
    MetricsSink,
    NoopSink,
    OutcomeKind,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
    SafeSink,
    SchedulerTick,
    guard,
)

__all__ = [
    "DlqRouted",
    "JobOutcome",
    "LockOutcome",
    "MetricsSink",
    "NoopSink",
    "OutcomeKind",
    "PromoterTick",
    "ReaderBatch",
    "RetryScheduled",
    "SafeSink",
    "SchedulerTick",
    "guard",
]
