"""Every error that chasqui raises on purpose, as one shallow tree.

A wrong argument is a plain `ValueError` or `TypeError`, raised before anything is sent. Everything
later is a `ChasquiError`. That is a `RuntimeError`, because chasquimq raises `RuntimeError` for all
of it: the `except` clauses of a program that moves over keep working.

All of them can be pickled: handlers may run in another process.
"""

from collections.abc import Mapping
from typing import Any

from chasqui._core.backoff import MAX_DELAY_MS

__all__ = [
    "AuthenticationError",
    "BatchError",
    "ChasquiError",
    "ClosedError",
    "ContextError",
    "ConversionError",
    "EmbeddedServerError",
    "JobFailedError",
    "LeaseLostError",
    "NotSupportedError",
    "OutcomeUnknownError",
    "PayloadError",
    "PayloadTooLargeError",
    "QueueFullError",
    "ResultError",
    "Retry",
    "ServerError",
    "TaskDataError",
    "UnknownArgumentsError",
    "UnreachableError",
    "UnreadableError",
    "UnrecoverableError",
]


class ChasquiError(RuntimeError):
    """The base of all errors below."""


# The server and the way to it


class UnreachableError(ChasquiError, ConnectionError):
    """No connection within the deadline. Nothing of the call was sent."""


class AuthenticationError(ChasquiError):
    """The server refused the credentials, or the user may not run a command we need."""


class ServerError(ChasquiError):
    """The server replied to a command with an error; the message is the server's own."""

    def __init__(self, message: str, code: str = "ERR") -> None:
        super().__init__(message, code)
        #: The error's first word: `OOM`, `WRONGTYPE`, `MISCONF`.
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class OutcomeUnknownError(ChasquiError):
    """The command was sent and no reply came: it may or may not have been applied."""


class NotSupportedError(ChasquiError):
    """This server, or this kind of queue, cannot do what was asked."""


class EmbeddedServerError(ChasquiError):
    """The private server behind an `embedded://` URL could not be found, started or joined."""


# Queues and payloads


class ClosedError(ChasquiError):
    """A method was called on a queue, producer or worker after its `close()`."""


class QueueFullError(ChasquiError):
    """The queue held `depth` waiting jobs, and the caller's `max_backlog` is `limit`."""

    def __init__(self, queue: str, depth: int, limit: int) -> None:
        super().__init__(queue, depth, limit)
        self.queue = queue
        self.depth = depth
        self.limit = limit

    def __str__(self) -> str:
        return f"queue {self.queue!r} is full: {self.depth} jobs wait, max_backlog is {self.limit}"


class PayloadError(ChasquiError, ValueError):
    """A value that cannot be encoded, or bytes that are not an encoded value."""


class PayloadTooLargeError(PayloadError):
    """An encoded value of `size` bytes, where `limit` is the most that is allowed."""

    def __init__(self, size: int, limit: int, what: str = "the payload") -> None:
        super().__init__(size, limit, what)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.args[2]} takes {self.size} bytes, and {self.limit} is the limit"


class ConversionError(ChasquiError, TypeError):
    """The value at `path` is not what its annotation says: it must be `expected` and is `got`.

    The path is written as Python writes it, `order.lines[3].price`. Neither field shows the value,
    which may be secret.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(path, expected, got)
        self.path = path
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"{self.path or 'the value'} must be {self.expected}, got {self.got}"

    def within(self, outer: str) -> "ConversionError":
        """This error, its path now inside `outer`: called on the way up, level by level."""
        self.path = outer + self.path
        self.args = (self.path, self.expected, self.got)
        return self


# Jobs and their handlers


class JobFailedError(ChasquiError):
    """The job you waited for went to the dead-letter queue, for `reason`."""

    def __init__(self, job_id: str, reason: str, detail: str | None = None) -> None:
        super().__init__(job_id, reason, detail)
        self.job_id = job_id
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"job {self.job_id} went to the dead-letter queue ({self.reason}){detail}"


class UnreadableError(PayloadError):
    """The envelope is good and its payload is not: no run will ever read it."""


class TaskDataError(UnreadableError):
    """The data of a job does not fit its task: the job goes to the dead-letter queue."""


class UnknownArgumentsError(ChasquiError):
    """The data of a job has arguments that its task does not know, as another version of the task
    may: the job is retried."""


class ResultError(ConversionError):
    """A task has returned something else than its annotation says. It ran to its end, so the job
    goes to the dead-letter queue and is not run again."""


class ContextError(ChasquiError):
    """`App.context` was used where there is none."""


class LeaseLostError(ChasquiError):
    """Another worker may own the job by now; the outcome of this run will not count."""


class UnrecoverableError(ChasquiError):
    """Raised by a handler: no retry helps, so the job goes to the dead-letter queue now."""


class Retry(ChasquiError):
    """Raised by a handler: run the job again in `delay_ms`, or after its own backoff if None.

    It counts as a failed run.
    """

    def __init__(self, reason: str = "retry asked for", *, delay_ms: int | None = None) -> None:
        if delay_ms is not None:
            if isinstance(delay_ms, bool) or not isinstance(delay_ms, int):
                raise TypeError(f"delay_ms must be an int or None, got {type(delay_ms).__name__}")
            if not 0 <= delay_ms <= MAX_DELAY_MS:
                raise ValueError(f"delay_ms must be from 0 to {MAX_DELAY_MS}")
        super().__init__(reason)
        self.delay_ms = delay_ms


class BatchError(ChasquiError):
    """Raised by a batch handler: the jobs in `failures` failed, each for its exception.

    The other jobs of the batch are done; `results` has what to store for them. Both are keyed by
    job id.
    """

    def __init__(
        self, failures: Mapping[str, Exception], *, results: Mapping[str, Any] | None = None
    ) -> None:
        _check_failures(failures)
        given: object = results
        if given is not None and not isinstance(given, Mapping):
            kind = type(given).__name__
            raise TypeError(f"results must be a mapping of job ids to values, got {kind}")
        super().__init__(failures)
        self.failures = failures
        self.results = {} if results is None else results

    def __str__(self) -> str:
        shown = ", ".join(f"{job_id}: {error!r}" for job_id, error in self.failures.items())
        return f"{len(self.failures)} of the batch failed ({shown})"


def _check_failures(failures: object) -> None:
    """Raises TypeError for a mistake here: such a job would count as done."""
    if not isinstance(failures, Mapping):
        kind = type(failures).__name__
        raise TypeError(f"failures must be a mapping of job ids to exceptions, got {kind}")
    for job_id, error in failures.items():
        if not isinstance(job_id, str):
            kind = type(job_id).__name__
            raise TypeError(f"failures must have ids of jobs as its keys, got {kind}")
        if not isinstance(error, BaseException):
            kind = type(error).__name__
            raise TypeError(f"failures[{job_id!r}] must be an exception, got {kind}")
