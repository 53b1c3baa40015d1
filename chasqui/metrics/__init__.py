"""Sinks that count what happens in this process, and the records that they get."""

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
