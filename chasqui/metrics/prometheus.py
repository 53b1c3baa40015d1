"""Metrics for Prometheus: counts what workers do. Needs the extra `prometheus`.

Names that start with `chasquimq_` are those of chasquimq, so that dashboards made for it keep
working; names that start with `chasqui_` are ours.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from chasqui.metrics.collectors import (
    QueueCollector,
    QueueReading,
    ReaderReading,
    Watched,
    WorkerCollector,
)
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

__all__ = ["PrometheusSink", "QueueCollector", "QueueReading", "ReaderReading"]

#: From handlers that only look something up to handlers that render a film.
DURATION_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
BACKOFF_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
BATCH_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0)


#: Each metric with its kind, its help text, and its labels besides the queue.
METRICS: Final[dict[str, tuple[Any, ...]]] = {
    "chasquimq_jobs_completed": (Counter, "Runs whose handler returned.", "name"),
    "chasquimq_jobs_failed": (Counter, "Runs whose handler raised.", "name", "kind"),
    "chasquimq_handler_duration_seconds": (Histogram, "How long handlers ran.", "name"),
    "chasquimq_retries_scheduled": (Counter, "Failed jobs that will run again.", "name"),
    "chasquimq_retry_backoff_seconds": (Histogram, "How long failed jobs wait to run again."),
    "chasquimq_dlq_routed": (Counter, "Jobs that went to the dead-letter queue.", "reason", "name"),
    "chasquimq_consumer_batch_size": (Histogram, "Jobs per read."),
    "chasquimq_consumer_reclaimed": (Counter, "Jobs taken over from other consumers."),
    "chasquimq_promoter_promoted": (Counter, "Delayed jobs moved to the stream."),
    "chasquimq_delayed_zset_depth": (Gauge, "Delayed jobs, as the promoter last saw them."),
    "chasquimq_promoter_oldest_pending_lag_ms": (
        Gauge,
        "How long the first delayed job was overdue when the promoter last looked.",
    ),
    "chasquimq_promoter_lock_acquired": (Counter, "Times that this promoter began to lead."),
    "chasquimq_promoter_lock_lost": (Counter, "Times that this promoter ceased to lead."),
    "chasqui_scheduler_fired": (Counter, "Jobs that repeat specs added to the queue."),
    "chasqui_scheduler_late": (
        Counter,
        "Times that a repeat spec fired a second or a whole interval late.",
    ),
    "chasqui_scheduler_lag_seconds": (
        Gauge,
        "How long the first repeat spec had been due when the scheduler last fired.",
    ),
}


class Families:
    """The metrics of one registry, made once for all sinks that count in them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Sequence[str],
        duration_buckets_s: Sequence[float],
    ) -> None:
        self.labels = tuple(labels)
        #: Reads the watched workers, once there are any.
        self.workers: WorkerCollector | None = None
        self.names = Names()
        buckets: dict[str, dict[str, Sequence[float]]] = {
            "chasquimq_handler_duration_seconds": {"buckets": duration_buckets_s},
            "chasquimq_retry_backoff_seconds": {"buckets": BACKOFF_BUCKETS_S},
            "chasquimq_consumer_batch_size": {"buckets": BATCH_BUCKETS},
        }
        self.metrics: dict[str, Any] = {
            name: kind(name, text, (*own, *labels), registry=registry, **buckets.get(name, {}))
            for name, (kind, text, *own) in METRICS.items()
        }


_families: WeakKeyDictionary[CollectorRegistry, Families] = WeakKeyDictionary()
#: Held while the metrics of a registry are made.
_lock = threading.Lock()


class PrometheusSink(MetricsSink):
    """Counts what workers do, in a registry of prometheus_client.

    Several workers may share one sink, or one registry. With `queue`, every metric has that label.
    `duration_buckets_s` only counts for the first sink of a registry.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
        queue: str | None = None,
        duration_buckets_s: Sequence[float] = DURATION_BUCKETS_S,
    ) -> None:
        labels = () if queue is None else ("queue",)
        with _lock:
            families = _families.get(registry)
            if families is None:
                families = _families[registry] = Families(registry, labels, duration_buckets_s)
        if families.labels != labels:
            raise ValueError(
                "either all sinks of a registry have a queue, or none: "
                "give this one a CollectorRegistry of its own"
            )
        self._families = families
        self._registry = registry
        self._queue = {} if queue is None else {"queue": queue}

    def watch(self, worker: Watched) -> None:
        """When scraped, also show how a worker is doing, from its `run` until it is closed. Several
        workers with the same labels show as one: the sums, and the longest of their times."""
        families = self._families
        with _lock:
            if families.workers is None:
                families.workers = WorkerCollector(families.labels)
                self._registry.register(families.workers)
        families.workers.add(worker, self._queue.values())

    # ── What a sink gets ────────────────────────────────────────────────────────────────────────

    def promoter_tick(self, tick: PromoterTick, /) -> None:
        self._of("chasquimq_promoter_promoted").inc(tick.promoted)
        self._of("chasquimq_delayed_zset_depth").set(tick.depth)
        self._of("chasquimq_promoter_oldest_pending_lag_ms").set(tick.oldest_pending_lag_ms)

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None:
        if outcome is LockOutcome.ACQUIRED:
            self._of("chasquimq_promoter_lock_acquired").inc()
        elif outcome is LockOutcome.LOST:
            self._of("chasquimq_promoter_lock_lost").inc()

    def reader_batch(self, batch: ReaderBatch, /) -> None:
        self._of("chasquimq_consumer_batch_size").observe(batch.size)
        if batch.reclaimed:
            self._of("chasquimq_consumer_reclaimed").inc(batch.reclaimed)

    def job_outcome(self, outcome: JobOutcome, /) -> None:
        name = self._families.names.counted(outcome.name)
        if outcome.kind is OutcomeKind.OK:
            self._of("chasquimq_jobs_completed", name=name).inc()
        else:
            self._of("chasquimq_jobs_failed", name=name, kind=outcome.kind.value).inc()
        duration_s = outcome.handler_duration_us / 1e6
        self._of("chasquimq_handler_duration_seconds", name=name).observe(duration_s)

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        name = self._families.names.counted(retry.name)
        self._of("chasquimq_retries_scheduled", name=name).inc()
        self._of("chasquimq_retry_backoff_seconds").observe(retry.backoff_ms / 1000)

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        name = self._families.names.counted(routed.name)
        self._of("chasquimq_dlq_routed", reason=routed.reason, name=name).inc()

    def scheduler_tick(self, tick: SchedulerTick, /) -> None:
        self._of("chasqui_scheduler_fired").inc(tick.fired)
        self._of("chasqui_scheduler_late").inc(tick.late)
        self._of("chasqui_scheduler_lag_seconds").set(tick.lag_ms / 1000)

    def _of(self, metric: str, /, **labels: str) -> Any:
        family = self._families.metrics[metric]
        labels |= self._queue
        return family.labels(**labels) if labels else family
