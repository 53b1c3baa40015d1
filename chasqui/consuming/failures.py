"""Jobs that failed: retried or buried, with records in metrics, events and the log."""

import random
from typing import Any, Final

from chasqui._core.entry import Entry
from chasqui.consuming.fate import (
    DECODE_FAILED,
    UNRECOVERABLE,
    Bury,
    Failure,
    Limits,
    RunAgain,
    on_failure,
)
from chasqui.consuming.moves import Move
from chasqui.consuming.relocator import Relocator
from chasqui.consuming.runs import described, in_short, text_of, traceback_of
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import ResultError, Retry, UnreadableError, UnrecoverableError
from chasqui.events.writer import EventWriter
from chasqui.metrics import DlqRouted, JobOutcome, MetricsSink, OutcomeKind, RetryScheduled

_PLAIN: Final = Failure()
#: The handler has done its work: it must not run again only because its result cannot be stored.
UNSTORABLE: Final = Failure(
    is_final=True, detail="the handler ran to its end; its result could not be stored"
)


def failure_of(error: BaseException) -> Failure:
    """What an exception says about the run that raised it."""
    if isinstance(error, UnrecoverableError):
        return Failure(is_final=True, reason=UNRECOVERABLE)
    if isinstance(error, Retry):
        return Failure(delay_ms=error.delay_ms)
    if isinstance(error, ResultError):
        return UNSTORABLE
    return _PLAIN


class Failures:
    """Decides between a retry and the DLQ, and has the relocator move the entry there."""

    def __init__(
        self,
        limits: Limits,
        relocator: Relocator,
        events: EventWriter | None,
        metrics: MetricsSink | None,
        log: ThrottledLog,
    ) -> None:
        self._limits = limits
        self._relocator = relocator
        self._events = events
        self._metrics = metrics
        self._log = log

    def report(self, entry: Entry, error: BaseException, duration_us: int) -> None:
        """Count a failed run, and write its event."""
        if self._metrics is not None:
            kind = OutcomeKind.ERR if isinstance(error, Exception) else OutcomeKind.PANIC
            outcome = JobOutcome(kind, entry.attempt + 1, duration_us, entry.name)
            self._metrics.job_outcome(outcome)
        if self._events is not None:
            self._events.failed(entry, type(error).__name__, text_of(error), duration_us)

    def settle(
        self, entry: Entry, error: BaseException, duration_us: int, failure: Failure | None = None
    ) -> None:
        """Retry or bury a job whose run raised `error`. `failure` is what that means, where the
        exception does not say."""
        failure = failure or failure_of(error)
        verdict = on_failure(entry, failure, self._limits, random.random())
        if isinstance(verdict, RunAgain):
            self._retry(entry, verdict, error)
        else:
            attempt = entry.attempt + 1
            self.bury(entry, verdict, attempt=attempt, error=error, duration_us=duration_us)

    def _retry(self, entry: Entry, verdict: RunAgain, error: BaseException) -> None:
        def moved() -> None:
            if self._metrics is not None:
                self._metrics.retry_scheduled(
                    RetryScheduled(verdict.attempt + 1, verdict.delay_ms, entry.name)
                )
            if self._events is not None:
                self._events.retry_scheduled(entry, verdict.attempt + 1, verdict.delay_ms)
            if isinstance(error, Retry):  # no failure: the handler asked for it
                text = "queue %s: job %s (%s) asked in run %d of %d to run again, in %d ms: %s"
                self._log.info(text, about=about)
            else:
                text = "queue %s: job %s (%s) failed, run %d of %d, and runs again in %d ms: %s"
                kind = type(error)
                if not self._log.leaves_out(text, kind, about):
                    self._log.warning(text, about=about, kind=kind, raised=error)

        def about() -> tuple[tuple[Any, ...], dict[str, Any]]:
            most = self._limits.attempts_of(entry)
            run = self._log.queue, entry.job_id, entry.name, verdict.attempt, most
            fields = self.fields(entry) | {"backoff_ms": verdict.delay_ms}
            return (*run, verdict.delay_ms, in_short(error)), fields

        self._relocator.move(
            Move(entry, verdict.attempt, delay_ms=verdict.delay_ms, on_moved=moved)
        )

    def bury_unreadable(self, entry: Entry, error: UnreadableError) -> None:
        """Bury an entry whose payload cannot be read: it never ran."""
        self.bury(entry, Bury(DECODE_FAILED, str(error)), attempt=0)

    def bury(
        self,
        entry: Entry,
        verdict: Bury,
        *,
        attempt: int,
        error: BaseException | None = None,
        duration_us: int | None = None,
    ) -> None:
        """Move a job to the DLQ. `attempt` is the number of its last run, 0 if it had none."""

        def moved() -> None:
            if self._metrics is not None:
                self._metrics.dlq_routed(DlqRouted(verdict.reason, attempt, entry.name))
            text = "queue %s: job %s (%s) went to the dead-letter queue, %s: %s"
            kind = verdict.reason if error is None else type(error)
            if not self._log.leaves_out(text, kind, about):
                self._log.error(text, about=about, kind=kind, raised=error)

        def about() -> tuple[tuple[Any, ...], dict[str, Any]]:
            reason, why = verdict.reason, verdict.detail or "it never ran"
            if error is not None:
                reason += f" in run {attempt} of {self._limits.attempts_of(entry)}"
                detail = f"{verdict.detail}: " if verdict.detail else ""
                why = detail + in_short(error)
            facts = self._log.queue, entry.job_id, entry.name, reason, why
            return facts, self.fields(entry) | {"reason": verdict.reason}

        self._relocator.move(
            Move(
                entry,
                entry.attempt + (error is not None),
                attempt=attempt,
                reason=verdict.reason,
                detail=verdict.detail,
                error=None if error is None else described(error),
                traceback=None if error is None else traceback_of(error),
                duration_us=duration_us,
                on_moved=moved,
            )
        )

    def fields(self, entry: Entry) -> dict[str, Any]:
        """The fields of a log record about an entry's run."""
        return {
            "queue": self._log.queue,
            "job_id": entry.job_id,
            "job_name": entry.name,
            "attempt": entry.attempt + 1,
        }
