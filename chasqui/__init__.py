"""A job queue for Python on Redis Streams: a compiled core under an asyncio facade.

The names below are the public API; `chasqui.sync` has the same without `await`.
"""

from chasqui._version import VERSION
from chasqui.consumer import Health
from chasqui.dlq import DeadJob
from chasqui.errors import (
    AuthenticationError,
    BatchError,
    ChasquiError,
    ClosedError,
    EmbeddedServerError,
    JobFailedError,
    LeaseLostError,
    NotSupportedError,
    OutcomeUnknownError,
    PayloadError,
    PayloadTooLargeError,
    QueueFullError,
    Retry,
    ServerError,
    UnreachableError,
    UnrecoverableError,
)
from chasqui.model.job import BackoffSpec, Job, MissedFiresPolicy, RepeatableMeta, RepeatPattern
from chasqui.producer import Producer
from chasqui.promoter import Promoter
from chasqui.queue import Counts, Queue
from chasqui.events.stream import QueueEvent, QueueEvents
from chasqui.managing.retention import LogReader, Retention
from chasqui.timed.scheduler import Scheduler
from chasqui.worker import Consumer, Handler, Worker

__all__ = [
    "AuthenticationError",
    "BackoffSpec",
    "BatchError",
    "ChasquiError",
    "ClosedError",
    "Consumer",
    "Counts",
    "DeadJob",
    "EmbeddedServerError",
    "Handler",
    "Health",
    "Job",
    "JobFailedError",
    "LeaseLostError",
    "LogReader",
    "MissedFiresPolicy",
    "NotSupportedError",
    "OutcomeUnknownError",
    "PayloadError",
    "PayloadTooLargeError",
    "Producer",
    "Promoter",
    "Queue",
    "QueueEvent",
    "QueueEvents",
    "QueueFullError",
    "RepeatPattern",
    "RepeatableMeta",
    "Retention",
    "Retry",
    "Scheduler",
    "ServerError",
    "UnreachableError",
    "UnrecoverableError",
    "Worker",
    "version",
]


def version() -> str:
    """The installed version."""
    return VERSION
