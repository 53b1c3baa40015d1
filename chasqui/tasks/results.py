"""What tasks return, read back as what it was."""

from typing import Any, Protocol, TypeVar

from chasqui.converting import Converter
from chasqui.model.job import Job
from chasqui.tasks.signature import Signature

J = TypeVar("J", bound=Job[Any])


class Returning(Protocol):
    """A task, as far as its results go."""

    signature: Signature


def typed(job: J, task: Returning) -> J:
    """The same job, whose result is converted as the task's annotation says."""
    returns = task.signature.returns
    if not returns.is_native:
        from chasqui import sync

        kind = _BlockingResults if isinstance(job, sync.Job) else _Results
        job._queue = kind(job._queue, returns)
    return job


class _Results:
    """Where you wait for a job of a task, instead of its queue."""

    def __init__(self, queue: Any, returns: Converter) -> None:
        self._queue = queue
        self._returns = returns

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._queue.name  # type: ignore[no-any-return]

    async def wait_for_result(self, job_id: str, **options: Any) -> Any:
        return self._decoded(await self._queue.wait_for_result(job_id, **options))

    async def wait_for_end(self, job_id: str, **options: Any) -> Any:
        return self._decoded(await self._queue.wait_for_end(job_id, **options))

    def _decoded(self, stored: Any) -> Any:
        return None if stored is None else self._returns.decode(stored, "result")


class _BlockingResults(_Results):
    """The same for jobs of a queue without an event loop."""

    def wait_for_result(self, job_id: str, **options: Any) -> Any:
        return self._decoded(self._queue.wait_for_result(job_id, **options))

    def wait_for_end(self, job_id: str, **options: Any) -> Any:
        return self._decoded(self._queue.wait_for_end(job_id, **options))
