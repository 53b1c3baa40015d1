"""Many calls as few bulks: one for each queue, and for each time that ids stay unique."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chasqui._core.payload import pack_calls
from chasqui.producing import job_options
from chasqui.producing.new_jobs import NewJobs
from chasqui.tasks.results import typed
from chasqui.tasks.task import Call, Task


@dataclass(slots=True)
class Part:
    """The calls that one bulk takes."""

    queue: str
    new: NewJobs
    unique_for: float | None = None
    #: Where they stand among all calls.
    places: list[int] = field(default_factory=list)
    #: Once they are added.
    jobs: list[Any] = field(default_factory=list)


class Bulk:
    """Calls to add, and the jobs that come of them. All are checked before one is added."""

    def __init__(self, calls: Iterable[Call[Any]]) -> None:
        """Raises TypeError, naming its index, for what is no call."""
        self._calls = listed = list(calls)
        #: The task of all calls, if they have the same one.
        self._task: Task[Any, Any] | None = None
        part = _packed(listed)
        if part is not None:
            self._task = listed[0].task
        self.parts = _parts(listed) if part is None else [part]

    def jobs(self) -> list[Any]:
        """The jobs of all parts, in the order of the calls."""
        if len(self.parts) == 1:
            jobs = self.parts[0].jobs
        else:
            placed = (zip(part.places, part.jobs, strict=True) for part in self.parts)
            jobs = [job for _, job in sorted(pair for pairs in placed for pair in pairs)]
        if self._task is not None and self._task.signature.returns.is_native:
            return jobs
        return [typed(job, call.task) for job, call in zip(jobs, self._calls, strict=True)]


def _packed(calls: list[Call[Any]]) -> Part | None:
    """Calls of one task whose jobs have no options, packed without a dict for each; None if there
    are others."""
    if not calls or type(calls[0]) is not Call or not calls[0].task.is_plain:
        return None
    task = calls[0].task
    payloads: list[bytes] = []
    data: list[Any] = []
    if pack_calls(calls, Call, task, job_options.MAX_BYTES, payloads, data) < len(calls):
        return None
    return Part(task.queue, NewJobs(payloads, task.name, data=data))


def _parts(calls: list[Call[Any]]) -> list[Part]:
    rows: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    places: dict[tuple[str, float | None], list[int]] = {}
    for i, call in enumerate(calls):
        if type(call) is not Call:
            kind = type(call).__name__
            raise TypeError(f"calls[{i}] must be a call, made by task.bind(…): got {kind}")
        task = call.task
        options = task.job_options(call.data)
        key = task.queue, options.pop("unique_for", None)
        rows.setdefault(key, []).append({"name": task.name, "data": call.data, **options})
        places.setdefault(key, []).append(i)
    return [
        Part(
            queue,
            job_options.many(rows[queue, unique_for], unique_for=unique_for),
            unique_for,
            places[queue, unique_for],
        )
        for queue, unique_for in rows
    ]
