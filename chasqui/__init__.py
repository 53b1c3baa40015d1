"""A job queue for Python on Redis Streams: a compiled core under an asyncio facade.

The names below are the public API; `chasqui.sync` has the same without `await`.
"""

from typing import TYPE_CHECKING, Any, Final

from chasqui._version import VERSION
from chasqui.consuming.around import Around
from chasqui.consuming.config import Handler, WorkerConfig
from chasqui.consuming.current import current_job
from chasqui.consuming.engine import Health
from chasqui.consuming.shared_slots import SharedSlots
from chasqui.errors import (
    AuthenticationError,
    BatchError,
    ChasquiError,
    ClosedError,
    ContextError,
    ConversionError,
    EmbeddedServerError,
    JobFailedError,
    LeaseLostError,
    NotSupportedError,
    OutcomeUnknownError,
    PayloadError,
    PayloadTooLargeError,
    QueueFullError,
    ResultError,
    Retry,
    ServerError,
    TaskDataError,
    UnknownArgumentsError,
    UnreachableError,
    UnrecoverableError,
)
from chasqui.events.stream import QueueEvent, QueueEvents
from chasqui.managing.dead_jobs import DeadJob
from chasqui.managing.retention import LogReader, Retention
from chasqui.model.job import (
    BackoffSpec,
    Job,
    MissedFiresPolicy,
    RepeatableMeta,
    RepeatPattern,
)
from chasqui.model.steps import Failed
from chasqui.producer import Producer
from chasqui.queue import Counts, Queue
from chasqui.timed.promoter import Promoter
from chasqui.timed.scheduler import Scheduler
from chasqui.worker import Consumer, Worker

if TYPE_CHECKING:
    from chasqui.tasks.app import App
    from chasqui.tasks.serving import WorkerOptions
    from chasqui.tasks.task import Call, Chain, Group, Task, gather
    from chasqui.worker_group import WorkerGroup

__all__ = [
    "App",
    "Around",
    "AuthenticationError",
    "BackoffSpec",
    "BatchError",
    "Call",
    "Chain",
    "ChasquiError",
    "ClosedError",
    "Consumer",
    "ContextError",
    "ConversionError",
    "Counts",
    "DeadJob",
    "EmbeddedServerError",
    "Failed",
    "Group",
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
    "ResultError",
    "Retention",
    "Retry",
    "Scheduler",
    "ServerError",
    "SharedSlots",
    "Task",
    "TaskDataError",
    "UnknownArgumentsError",
    "UnreachableError",
    "UnrecoverableError",
    "Worker",
    "WorkerConfig",
    "WorkerGroup",
    "WorkerOptions",
    "current_job",
    "gather",
    "version",
]


def version() -> str:
    """The installed version."""
    return VERSION


#: Where the names are that are loaded when they are first used: programs without tasks do not wait
#: for them.
_LATER: Final = {
    "App": "chasqui.tasks.app",
    "Call": "chasqui.tasks.task",
    "Chain": "chasqui.tasks.task",
    "Group": "chasqui.tasks.task",
    "Task": "chasqui.tasks.task",
    "WorkerGroup": "chasqui.worker_group",
    "WorkerOptions": "chasqui.tasks.serving",
    "gather": "chasqui.tasks.task",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found
