"""The job of a blocking queue: `chasqui.sync.Job`."""

from typing import Final

from chasqui._core.instances import InstanceFactory
from chasqui.model import job
from chasqui.model.job import R_co


class Job(job.Job[R_co]):
    """A `chasqui.Job` whose `result` and `wait_for_result` block: what `sync.Queue` returns for an
    add."""

    __slots__ = ()
    # Equal to any other job with the same values, whichever queue returned that; so, as those, it
    # has no hash.
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, job.Job):
            return NotImplemented
        return _compared(self) == _compared(other)

    def wait_for_result(  # type: ignore[override]  # the value, and no coroutine
        self, *, timeout: float = 30.0, poll_interval: float = 0.1
    ) -> R_co:
        """The handler's return value, once stored: workers store it with `store_results=True`, and
        never store None.

        Raises TimeoutError after `timeout` seconds, and JobFailedError as soon as the job is in the
        dead-letter queue.
        """
        queue = self._source("wait_for_result")
        value: R_co = queue.wait_for_result(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )
        return value

    def result(  # type: ignore[override]
        self, *, timeout: float | None = 30.0, poll_interval: float = 0.1
    ) -> R_co:
        """The stored return value as soon as the job is done, or None if nothing was stored.

        Raises JobFailedError as soon as the job is in the dead-letter queue, TimeoutError after
        `timeout` seconds. Its worker's events tell that a job is done without a result: if they
        are off and nothing is stored, this waits until the timeout.
        """
        queue = self._source("result")
        value: R_co = queue.wait_for_end(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )
        return value


#: As the one of `chasqui.model.job`.
job_factory: "Final[InstanceFactory[Job]]" = InstanceFactory(Job)


def _compared(one: job.Job) -> tuple[object, ...]:
    return one.id, one.name, one.data, one.attempt, one.created_at_ms
