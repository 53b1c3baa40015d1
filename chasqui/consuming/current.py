"""The job whose run executes this code: `current_job`.

A slot notes its job, and the context variables of its task name the slot: setting a variable for
each run would cost a tenth of a short run. What code finds that way is kept in its own context, so
that what it starts afterwards keeps the job, even beyond the end of its run.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, Final, Protocol

from chasqui.model.job import Job


class Place(Protocol):
    """The slot that runs a job."""

    job: Job | None
    task: asyncio.Task[Any] | None
    #: Whether this code has set CURRENT in the context of the slot's own task.
    has_set_current: bool


#: The slot that runs this code. Set once for each slot, so that no run pays for it.
running_slot: Final[ContextVar[Any]] = ContextVar("running_slot", default=None)
#: The job, where it was asked for; in a process of `processes=`, always.
CURRENT: Final[ContextVar[Job | None]] = ContextVar("current_job", default=None)


def current_job() -> Job[Any]:
    """The job that runs this code: in handlers, tasks and hooks of a worker, and in the child tasks
    and threads that they start.

    Raises RuntimeError where no job runs, and in batch handlers, which run many at once.
    """
    job = find_job()
    if job is None:
        raise RuntimeError(
            "current_job() was called where no job runs: it works in handlers, tasks and hooks of "
            "a worker, but not in batch handlers"
        )
    return job


def find_job() -> Job | None:
    """The same, or None."""
    job = CURRENT.get()
    if job is not None:
        return job
    place: Place | None = running_slot.get()
    if place is None or place.job is None:
        return None
    job = place.job
    CURRENT.set(job)
    if place.task is _current_task():
        place.has_set_current = True  # the dispatcher takes it back behind the run
    return job


def job_fields() -> dict[str, Any]:
    """What log records say of the job that runs this code; empty where no job runs."""
    job = find_job()
    if job is None:
        return {}
    return {
        "job_id": job.id,
        "job_name": job.name,
        "attempt": job.attempt + 1,
        "queue": job.queue,
    }


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None
