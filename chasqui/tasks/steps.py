"""The steps of flows: what tasks and calls come to in a flow's plan."""

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, Protocol

from chasqui._core.arguments import BoundCall
from chasqui.consuming.current import Place, find_job, running_slot
from chasqui.model.job import Job, is_drawn
from chasqui.producing.flows import Flow, Step
from chasqui.tasks.options import CallOptions, TaskOptions
from chasqui.tasks.signature import Signature

#: What a flow cannot say about a step: its jobs have ids of their own and begin when it is their
#: turn.
_NOT_FOR_STEPS: Final = ("delay", "at", "job_id", "unique_for")
#: Runs that are over and whose flows are still counted: what they started may go on. See
#: `new_flow_id`.
_KEPT: Final = 100


class StepTask(Protocol):
    """The part of a task that a step is made of."""

    app: Any
    options: TaskOptions
    signature: Signature
    call_options: CallOptions

    @property
    def name(self) -> str:
        """The name of its jobs."""

    @property
    def queue(self) -> str:
        """The queue that its jobs go to."""


def first_step(call: BoundCall) -> Step:
    """The step that a call is, at the begin of a chain."""
    return Step(call.task.name, call.data, None, *_retry(call.task))


def following_step(task: StepTask, args: Any, kwargs: Any) -> Step:
    """The step of a task that gets a result as its first argument."""
    if not hasattr(task, "signature"):
        raise TypeError(f"then takes a task and its other arguments, got {type(task).__name__}")
    names = task.signature.names
    if not names:
        raise TypeError(f"task {task.name!r} has no parameter for the result of what comes before")
    if task.signature.whole is not None:
        task.signature.check_none(args, kwargs)
        return Step(task.name, None, None, *_retry(task))
    data = task.signature.encode(args, kwargs, given=names[0])
    return Step(task.name, data, names[0], *_retry(task))


def with_result(step: Step, result: Any) -> Step:
    """The step with the result that it would have got from the step before it."""
    data = result if step.result_as is None else {step.result_as: result, **step.data}
    return replace(step, data=data, result_as=None)


def _retry(task: StepTask) -> tuple[Any, Any]:
    options = task.call_options
    for name in _NOT_FOR_STEPS:
        if getattr(options, name) is not None:
            raise ValueError(f"task {task.name!r} has {name}, which a step of a flow cannot have")
    if task.options.unique_for is not None:
        raise ValueError(f"task {task.name!r} is unique, which a step of a flow cannot be")
    return options.attempts, options.backoff


def home_of(tasks: Iterable[StepTask]) -> tuple[Any, str]:
    """The app and the queue of a flow: one for all of its tasks."""
    first, *others = tasks
    for task in others:
        if task.queue != first.queue:
            raise ValueError(
                f"a flow stays on one queue: task {first.name!r} is on {first.queue!r}, "
                f"task {task.name!r} on {task.queue!r}"
            )
    return first.app, first.queue


def last_job(flow: Flow) -> Job[Any]:
    assert flow.last is not None  # of a chain, or behind a join
    return flow.last


#: By the identity of a job: that job, its slot, and how many flows its run has begun.
_counted: dict[int, tuple[Job, Place | None, int]] = {}
_counting: Final = threading.Lock()


def new_flow_id() -> str | None:
    """The id of a flow that a job begins: made of the job's own, so that its retry goes on with the
    same flow and begins no second one. None outside of a job."""
    job = find_job()
    if job is None:
        return None
    number = _count(job)
    if is_drawn(job.id):
        return f"{job.id}-{number}"
    # Other ids come again, as those of unique calls do, and then it is another job. And they may be
    # long: that of a step would grow with each flow that a flow begins.
    made_of = f"{job.created_at_ms} {job.id}".encode(errors="surrogatepass")
    return f"{hashlib.blake2b(made_of, digest_size=16).hexdigest()}-{number}"


def _count(job: Job) -> int:
    """How many flows the run of this job has begun before. Jobs may be large, so only a few are
    kept beyond their runs."""
    with _counting:
        place: Place | None = running_slot.get()
        _, place, number = _counted.pop(id(job), (job, place, 0))
        _counted[id(job)] = job, place, number + 1
        if len(_counted) > _KEPT:
            over = [
                key for key, (one, at, _) in _counted.items() if at is None or at.job is not one
            ]
            for key in over[:-_KEPT]:
                del _counted[key]
    return number
