"""Metrics and traces for OpenTelemetry. Needs the extra `otel`, and an SDK to export them.

Spans follow the semantic conventions for messaging: `send <queue>` where jobs are added and
`process <queue>` around each run. All runs of a job belong to the trace in which it was added;
a retry links to the run before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from chasqui.metrics.sink import (
    DlqRouted,
    JobOutcome,
    LockOutcome,
    MetricsSink,
    Names,
    OutcomeKind,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
    SchedulerTick,
)

SCOPE: Final = "chasqui"
SYSTEM: Final = "chasqui"
TRACEPARENT: Final = "traceparent"

_propagator = TraceContextTextMapPropagator()


class OtelSink(MetricsSink):
    """Counts what workers do, with instruments of a meter; `queue` becomes an attribute."""

    def __init__(
        self, *, meter_provider: metrics.MeterProvider | None = None, queue: str | None = None
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._own: dict[str, Any] = {"messaging.system": SYSTEM}
        if queue is not None:
            self._own["messaging.destination.name"] = queue
        self._names = Names()
        self._completed = meter.create_counter("chasqui.jobs.completed", "{run}")
        self._failed = meter.create_counter("chasqui.jobs.failed", "{run}")
        self._duration = meter.create_histogram("messaging.process.duration", "s")
        self._retries = meter.create_counter("chasqui.retries.scheduled", "{job}")
        self._backoff = meter.create_histogram("chasqui.retry.backoff", "s")
        self._dlq = meter.create_counter("chasqui.dlq.routed", "{job}")
        self._batch_size = meter.create_histogram("chasqui.consumer.batch_size", "{job}")
        self._reclaimed = meter.create_counter("chasqui.consumer.reclaimed", "{job}")
        self._promoted = meter.create_counter("chasqui.promoter.promoted", "{job}")
        self._delayed = meter.create_gauge("chasqui.delayed.depth", "{job}")
        self._lag = meter.create_gauge("chasqui.promoter.lag", "s")
        self._lock = meter.create_counter("chasqui.promoter.lock", "{change}")
        self._fired = meter.create_counter("chasqui.scheduler.fired", "{job}")
        self._late = meter.create_counter("chasqui.scheduler.late", "{fire}")
        self._fire_lag = meter.create_gauge("chasqui.scheduler.lag", "s")

    def promoter_tick(self, tick: PromoterTick, /) -> None:
        self._promoted.add(tick.promoted, self._own)
        self._delayed.set(tick.depth, self._own)
        self._lag.set(tick.oldest_pending_lag_ms / 1000, self._own)

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None:
        self._lock.add(1, self._with({"chasqui.lock.outcome": outcome.value}))

    def reader_batch(self, batch: ReaderBatch, /) -> None:
        self._batch_size.record(batch.size, self._own)
        self._reclaimed.add(batch.reclaimed, self._own)

    def job_outcome(self, outcome: JobOutcome, /) -> None:
        attributes = self._with({"chasqui.job.name": self._names.counted(outcome.name)})
        if outcome.kind is OutcomeKind.OK:
            self._completed.add(1, attributes)
        else:
            self._failed.add(1, attributes | {"error.type": outcome.kind.value})
        self._duration.record(outcome.handler_duration_us / 1e6, attributes)

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        self._retries.add(1, self._with({"chasqui.job.name": self._names.counted(retry.name)}))
        self._backoff.record(retry.backoff_ms / 1000, self._own)

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        name = self._names.counted(routed.name)
        facts = {"chasqui.job.name": name, "chasqui.dlq.reason": routed.reason}
        self._dlq.add(1, self._with(facts))

    def scheduler_tick(self, tick: SchedulerTick, /) -> None:
        self._fired.add(tick.fired, self._own)
        self._late.add(tick.late, self._own)
        self._fire_lag.set(tick.lag_ms / 1000, self._own)

    def _with(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return self._own | dict(attributes)


class OtelTracing:
    """Spans for `Queue(tracing=…)` and `Worker(tracing=…)`."""

    def __init__(self, *, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)

    @contextmanager
    def sending(self, queue: str, job_ids: Sequence[str]) -> Iterator[str | None]:
        """The span of an add; yields what to send with its jobs, or None if it is not recorded."""
        attributes = _attributes(queue, "send", "add", job_ids)
        span = self._tracer.start_span(
            f"send {queue}", kind=SpanKind.PRODUCER, attributes=attributes
        )
        try:  # not the current span: any code may drive an add
            yield _carried(span)
        except Exception as error:
            span.record_exception(error)
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            span.end()

    @contextmanager
    def processing(
        self, queue: str, group: str, jobs: Sequence[Any], carried: Sequence[Sequence[str]]
    ) -> Iterator[str | None]:
        """The span of a run, current while it lasts; yields what the next run links to.

        `carried` holds for each job what `sending` yielded, followed by what its last run yielded.
        """
        attributes = _attributes(queue, "process", "process", [job.id for job in jobs])
        attributes["messaging.consumer.group.name"] = group
        parent: Context | None = None
        linked = [one for contexts in carried for one in contexts]
        if len(jobs) == 1:
            attributes["chasqui.job.name"] = jobs[0].name
            attributes["chasqui.job.attempt"] = jobs[0].attempt + 1
            if linked:
                parent = _context(linked.pop(0))
        with self._tracer.start_as_current_span(
            f"process {queue}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(_span_context(one)) for one in linked],
        ) as span:
            yield _carried(span)


def _attributes(queue: str, kind: str, name: str, job_ids: Sequence[str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.type": kind,
        "messaging.operation.name": name,
    }
    if len(job_ids) == 1:
        attributes["messaging.message.id"] = job_ids[0]
    else:
        attributes["messaging.batch.message_count"] = len(job_ids)
    return attributes


def _carried(span: Span) -> str | None:
    """A span as W3C's `traceparent`; None if it is not recorded."""
    if not span.get_span_context().trace_flags.sampled:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT)


def _context(traceparent: str) -> Context:
    return _propagator.extract({TRACEPARENT: traceparent}, Context())


def _span_context(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_context(traceparent)).get_span_context()
