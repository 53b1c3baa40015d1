"""What a drain has done: the runs, how they ended, and which jobs are dead."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from chasqui import Around, DeadJob, Job, Retry, TaskDataError, UnknownArgumentsError
from chasqui.testing.apps import task_of


class DrainError(Exception):
    """A drain cannot go on: a queue is paused, or no task takes a job."""


@dataclass(slots=True)
class Run:
    """One run of a job."""

    name: str
    queue: str
    id: str
    #: The arguments by name; what else the job's data are if no task takes them.
    args: Any
    #: Counted from 1.
    attempt: int
    #: What it raised; None if it returned.
    error: BaseException | None = None
    #: The handler asked to be run again, and may: no failure.
    is_asked_again: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """A job that went to the dead-letter queue."""

    name: str
    queue: str
    id: str
    args: Any
    #: The error of its last run, as text; without a run, why it had none.
    error: str
    reason: str

    @classmethod
    def of(cls, queue: str, job: DeadJob) -> "Dead":
        try:
            args = arguments(queue, job.name, job.data)
        except Exception:  # it may be dead because nobody can read it
            args = None
        error = job.error or job.detail or job.reason
        return cls(job.name, queue, job.job_id, args, error, job.reason)


@dataclass(slots=True)
class Drained:
    """What a drain has done."""

    #: Jobs that ran to their end.
    completed: int = 0
    #: Runs that raised, but for those that asked for another run by `Retry`.
    failed: int = 0
    #: Runs that were followed by another one.
    retried: int = 0
    #: Jobs that went to the dead-letter queue.
    dead: list[Dead] = field(default_factory=list)
    #: All runs, in the order in which they began.
    jobs: list[Run] = field(default_factory=list)
    #: How far the clock was moved.
    moved: timedelta = timedelta()

    def count(self, dead: list[Dead]) -> None:
        """Fill in the numbers, once the drain is over."""
        self.dead = dead
        errors = [run for run in self.jobs if run.error is not None]
        ended_well = {run.id for run in self.jobs if run.error is None}
        self.failed = sum(not run.is_asked_again for run in errors)
        # A job whose result cannot be stored has run to its end, and is dead.
        unstorable = sum(one.id in ended_well for one in dead)
        self.completed = len(self.jobs) - len(errors) - unstorable
        failing = {run.id for run in errors} - ended_well
        self.retried = len(errors) - sum(one.id in failing for one in dead)


class Observer:
    """The hook around all other hooks: it knows which runs go on, and how each ended."""

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises
        self.drained = Drained()
        self.running = 0
        #: The first failure, if the drain is to end with it.
        self.failure: BaseException | None = None
        self.is_over = False
        self.changed = asyncio.Event()

    def hook(self, queue: str) -> Around:
        """The hook for the worker of one queue."""

        async def observe(job: Job, run: Callable[[], Awaitable[Any]]) -> Any:
            args = arguments(queue, job.name, job.data)
            seen = Run(job.name, queue, job.id, args, job.attempt + 1)
            self.drained.jobs.append(seen)
            self.running += 1
            self.changed.set()
            try:
                return await run()
            except BaseException as error:
                self._failed(job, seen, error)
                raise
            finally:
                self.running -= 1
                self.changed.set()

        return observe

    def _failed(self, job: Job, seen: Run, error: BaseException) -> None:
        seen.error = error
        if self.is_over and not isinstance(error, Exception):
            return  # the end of the drain has cut it short
        seen.is_asked_again = isinstance(error, Retry) and not job.is_last_attempt
        if self._raises and self.failure is None and not seen.is_asked_again:
            self.failure = error
            if not isinstance(error, Exception):  # it would end the event loop, or the test
                self.failure = DrainError(f"a handler raised {error!r}")
                self.failure.__cause__ = error
            self.failure.add_note(
                f"raised in attempt {seen.attempt} of {job.max_attempts} of job {job.id}, "
                f"task {job.name!r} of queue {seen.queue!r}"
            )


def arguments(queue: str, name: str, data: Any) -> Any:
    """The arguments of a job by name, of the types that its task has; `data` as they are if no
    task can take them."""
    task = task_of(queue, name)
    if task is None:
        return data
    try:
        return task.signature.decode(data)
    except (TaskDataError, UnknownArgumentsError):
        return data
