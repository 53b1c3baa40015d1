"""Sentry: a hook that reports the errors of jobs, and how long their runs take."""

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from chasqui.consuming.failures import failure_of
from chasqui.errors import LeaseLostError, Retry, UnreadableError
from chasqui.model.job import Job

if TYPE_CHECKING:
    from sentry_sdk.types import Event, Hint

try:
    import sentry_sdk
    from sentry_sdk.scope import add_global_event_processor
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "chasqui.integrations.sentry needs Sentry's SDK 2 or newer: pip install 'chasqui[sentry]'"
    ) from error

_ORIGIN: Final = "auto.queue.chasqui"
#: Set on an exception that was reported, so that our own log record of it is not another event.
_REPORTED: Final = "__chasqui_reported__"


class SentryHook:
    """A hook for `around`: each run has an isolation scope with the job's tags, and is a
    transaction if tracing is on.

    An error is reported when it ends its job: in the last attempt, or at once if no retry helps.
    With `every_attempt` those before are reported too, but not a `Retry` that the handler asked
    for. With `send_data` events have the job's data and the local variables of tracebacks, which
    hold it; without it they have neither.
    """

    def __init__(self, *, every_attempt: bool = False, send_data: bool = False) -> None:
        self._every_attempt = every_attempt
        self._send_data = send_data
        _drop_repeated_reports()

    async def __call__(self, job: Job, run: Callable[[], Awaitable[Any]]) -> Any:
        """Run the job and report its error, which is raised again."""
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_transaction_name(job.name, source="task")
            scope.set_tags(
                {"job_id": job.id, "job_name": job.name, "queue": job.queue or "unknown"}
            )
            scope.set_context("job", self._facts(job))
            if not self._send_data:
                scope.add_event_processor(_without_variables)
            with _transaction(job) as transaction:
                try:
                    result = await run()
                except Exception as error:
                    if self._is_reported(job, error):
                        sentry_sdk.capture_exception(error)
                        setattr(error, _REPORTED, True)
                    raise
                transaction.set_status("ok")
                return result

    def _facts(self, job: Job) -> dict[str, Any]:
        facts = {
            "id": job.id,
            "name": job.name,
            "queue": job.queue,
            "attempt": job.attempt + 1,
            "max_attempts": job.max_attempts,
            "created_at_ms": job.created_at_ms,
        }
        return facts | {"data": job.data} if self._send_data else facts

    def _is_reported(self, job: Job, error: Exception) -> bool:
        if isinstance(error, LeaseLostError) or job.lost:
            return False  # another worker has the job: this run does not count
        # The dispatcher buries what cannot be read before it asks what the failure means.
        is_final = isinstance(error, UnreadableError) or failure_of(error).is_final
        if job.is_last_attempt or is_final:
            return True
        return self._every_attempt and not isinstance(error, Retry)


def _transaction(job: Job) -> Any:
    """What times the run, with the fields that Sentry's view of queues shows."""
    transaction = sentry_sdk.start_transaction(
        op="queue.process", name=job.name, source="task", origin=_ORIGIN
    )
    transaction.set_data("messaging.system", "chasqui")
    transaction.set_data("messaging.message.id", job.id)
    transaction.set_data("messaging.destination.name", job.queue)
    transaction.set_data("messaging.message.retry.count", job.attempt)
    if job.created_at_ms:
        waited_ms = max(0, int(time.time() * 1000) - job.created_at_ms)
        transaction.set_data("messaging.message.receive.latency", waited_ms)
    return transaction


def _without_variables(event: "Event", hint: "Hint") -> "Event":
    """The event without the local variables of its tracebacks, which hold the job's data."""
    parts: list[Any] = []
    for kind in ("exception", "threads"):
        found: Any = event.get(kind) or {}
        parts += found.get("values") or ()
    for part in parts:
        for frame in (part.get("stacktrace") or {}).get("frames") or ():
            frame.pop("vars", None)
    return event


@functools.cache
def _drop_repeated_reports() -> None:
    """A worker logs a job that goes to the dead-letter queue as an error, with its exception; and
    Sentry's SDK makes an event of such a record. Drop that event if the hook has reported it; if
    not, leave out the variables of its frames, for it is logged outside of the job's scope."""

    def drop(event: "Event", hint: "Hint") -> "Event | None":
        record = hint.get("log_record")
        if record is None or not record.name.startswith("chasqui."):
            return event
        error = (hint.get("exc_info") or (None, None))[1]
        return None if getattr(error, _REPORTED, False) else _without_variables(event, hint)

    add_global_event_processor(drop)
