"""Metrics for Prometheus: what a worker does, counted; what queues hold, read when scraped.

Needs the extra `prometheus`. The names that start with `chasquimq_` are those of chasquimq, so
dashboards made for it go on working; `chasqui_` are ours.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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

#: From a handler that only looks something up to one that renders a film.
DURATION_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
BACKOFF_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
BATCH_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0)
#: A loop that answers later than this is told to be this late.
LOOP_LAG_MAX_S: Final = 1.0


class Families:
    """The metrics of one registry: made once, whoever counts on them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Sequence[str],
        duration_buckets_s: Sequence[float],
    ) -> None:
        def make(kind: type[Any], name: str, text: str, *own: str, **options: Any) -> Any:
            return kind(name, text, (*own, *labels), registry=registry, **options)

        self.labels = tuple(labels)
        #: Reads those that are watched, once there are any.
        self.workers: WorkerCollector | None = None
        self.names = Names()
        self.completed = make(
            Counter, "chasquimq_jobs_completed", "Runs whose handler returned.", "name"
        )
        self.failed = make(
            Counter, "chasquimq_jobs_failed", "Runs whose handler raised.", "name", "kind"
        )
        self.duration = make(
            Histogram,
            "chasquimq_handler_duration_seconds",
            "How long handlers ran.",
            "name",
            buckets=duration_buckets_s,
        )
        self.retries = make(
            Counter, "chasquimq_retries_scheduled", "Failed jobs that will run again.", "name"
        )
        self.backoff = make(
            Histogram,
            "chasquimq_retry_backoff_seconds",
            "How long failed jobs wait before they run again.",
            buckets=BACKOFF_BUCKETS_S,
        )
        self.dlq = make(
            Counter,
            "chasquimq_dlq_routed",
            "Jobs that went to the dead-letter queue.",
            "reason",
            "name",
        )
        self.batch_size = make(
            Histogram, "chasquimq_consumer_batch_size", "Jobs per read.", buckets=BATCH_BUCKETS
        )
        self.reclaimed = make(
            Counter, "chasquimq_consumer_reclaimed", "Jobs taken over from other consumers."
        )
        self.promoted = make(
            Counter, "chasquimq_promoter_promoted", "Delayed jobs moved to the stream."
        )
        self.delayed_depth = make(
            Gauge, "chasquimq_delayed_zset_depth", "Delayed jobs, as the promoter last saw them."
        )
        self.delayed_lag_ms = make(
            Gauge,
            "chasquimq_promoter_oldest_pending_lag_ms",
            "How long the first delayed job was overdue when the promoter last looked.",
        )
        self.lock_acquired = make(
            Counter, "chasquimq_promoter_lock_acquired", "Times that this promoter began to lead."
        )
        self.lock_lost = make(
            Counter, "chasquimq_promoter_lock_lost", "Times that this promoter ceased to lead."
        )
        self.fired = make(
            Counter, "chasqui_scheduler_fired", "Jobs that repeat specs put into the queue."
        )
        self.fired_late = make(
            Counter,
            "chasqui_scheduler_late",
            "Times that a repeat spec fired a second or a whole interval late.",
        )
        self.fire_lag = make(
            Gauge,
            "chasqui_scheduler_lag_seconds",
            "How long the first repeat spec had been due when the scheduler last fired.",
        )


_families: WeakKeyDictionary[CollectorRegistry, Families] = WeakKeyDictionary()
#: Held while a registry's are made.
_lock = threading.Lock()


class PrometheusSink(MetricsSink):
    """Counts what workers do, in a registry of prometheus_client.

    Several workers may share one sink, or one registry. With `queue` every metric carries that as
    a label. `duration_buckets_s` is for the first sink of a registry to say.
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
                "the sinks of one registry must all have a queue, or none of them: "
                "give this one a CollectorRegistry of its own"
            )
        self._families = families
        self._registry = registry
        self._queue = {} if queue is None else {"queue": queue}

    def watch(self, worker: "Watched") -> None:
        """Also tell, when scraped, how a worker is doing, from its `run` on until it is closed.
        Several that have the same labels are told as one: their sums, and the longest of their
        times."""
        families = self._families
        with _lock:
            if families.workers is None:
                families.workers = WorkerCollector(families.labels)
                self._registry.register(families.workers)
        families.workers.add(worker, self._queue.values())

    # ── What a sink gets ────────────────────────────────────────────────────────────────────────

    def promoter_tick(self, tick: PromoterTick, /) -> None:
        families = self._families
        self._of(families.promoted).inc(tick.promoted)
        self._of(families.delayed_depth).set(tick.depth)
        self._of(families.delayed_lag_ms).set(tick.oldest_pending_lag_ms)

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> None:
        if outcome is LockOutcome.ACQUIRED:
            self._of(self._families.lock_acquired).inc()
        elif outcome is LockOutcome.LOST:
            self._of(self._families.lock_lost).inc()

    def reader_batch(self, batch: ReaderBatch, /) -> None:
        self._of(self._families.batch_size).observe(batch.size)
        if batch.reclaimed:
            self._of(self._families.reclaimed).inc(batch.reclaimed)

    def job_outcome(self, outcome: JobOutcome, /) -> None:
        families, name = self._families, self._families.names.counted(outcome.name)
        if outcome.kind is OutcomeKind.OK:
            self._of(families.completed, name=name).inc()
        else:
            self._of(families.failed, name=name, kind=outcome.kind.value).inc()
        self._of(families.duration, name=name).observe(outcome.handler_duration_us / 1e6)

    def retry_scheduled(self, retry: RetryScheduled, /) -> None:
        self._of(self._families.retries, name=self._families.names.counted(retry.name)).inc()
        self._of(self._families.backoff).observe(retry.backoff_ms / 1000)

    def dlq_routed(self, routed: DlqRouted, /) -> None:
        name = self._families.names.counted(routed.name)
        self._of(self._families.dlq, reason=routed.reason, name=name).inc()

    def scheduler_tick(self, tick: SchedulerTick, /) -> None:
        self._of(self._families.fired).inc(tick.fired)
        self._of(self._families.fired_late).inc(tick.late)
        self._of(self._families.fire_lag).set(tick.lag_ms / 1000)

    def _of(self, metric: Any, **labels: str) -> Any:
        labels |= self._queue
        return metric.labels(**labels) if labels else metric


class HealthLike(Protocol):
    """What is told of a worker."""

    @property
    def running(self) -> int: ...
    @property
    def prefetched(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def last_read_age_s(self) -> float: ...
    @property
    def oldest_running_s(self) -> float: ...


class Watched(Protocol):
    """A worker."""

    def health(self) -> HealthLike | None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...


#: Of each gauge of a worker: its name, the reading it shows, what it is, what several come to.
WORKER_GAUGES: Final[tuple[tuple[str, str, str, Callable[[Iterable[float]], float]], ...]] = (
    ("running", "running", "Handlers that run now.", sum),
    ("prefetched", "prefetched", "Jobs in hand, not begun.", sum),
    (
        "last_read_age_seconds",
        "last_read_age_s",
        "Since a read of the stream last came back.",
        max,
    ),
    (
        "oldest_run_seconds",
        "oldest_running_s",
        "How long the longest run has been going on.",
        max,
    ),
)


class WorkerCollector(Collector):
    """Reads the health of workers when scraped; those with the same labels are told as one, and
    those that were closed no longer."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._workers: list[tuple[Watched, tuple[str, ...]]] = []
        #: Leases that closed workers lost: a counter never falls.
        self._lost: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def add(self, worker: Watched, labels: Iterable[str]) -> None:
        with self._lock:
            if all(worker is not other for other, _ in self._workers):
                self._workers.append((worker, tuple(labels)))

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        workers, lost = self._open()
        told: dict[tuple[str, ...], list[HealthLike]] = {}
        lags_s: dict[tuple[str, ...], float] = {}
        asked: dict[asyncio.AbstractEventLoop | None, float] = {None: 0.0}
        for worker, labels in workers:
            if (health := worker.health()) is None:
                continue
            told.setdefault(labels, []).append(health)
            lost[labels] = lost.get(labels, 0) + health.lost
            loop = worker.loop
            if loop not in asked:
                asked[loop] = _lag_s(loop)
            lags_s[labels] = max(lags_s.get(labels, 0.0), asked[loop])
        for name, reading, text, together in WORKER_GAUGES:
            values = {
                labels: together(getattr(health, reading) for health in every)
                for labels, every in told.items()
            }
            yield from self._family(GaugeMetricFamily, name, text, values)
        text = "Jobs that other workers took over while these had them."
        yield from self._family(CounterMetricFamily, "lease_losses", text, lost)
        text = "How late the event loop is."
        yield from self._family(GaugeMetricFamily, "loop_lag_seconds", text, lags_s)

    def _open(self) -> tuple[list[tuple[Watched, tuple[str, ...]]], dict[tuple[str, ...], int]]:
        """Who is not closed, and what the others have lost. One that ended by itself is not closed:
        that it does not read is to be seen."""
        with self._lock:
            open_ones = []
            for worker, labels in self._workers:
                if not worker.is_closed or worker.is_running:
                    open_ones.append((worker, labels))
                elif (health := worker.health()) is not None:
                    self._lost[labels] = self._lost.get(labels, 0) + health.lost
            self._workers = open_ones
            return open_ones[:], dict(self._lost)

    def _family(
        self, kind: type[Any], name: str, text: str, values: Mapping[tuple[str, ...], float]
    ) -> Iterator[Metric]:
        if values:
            family: Any = kind(f"chasqui_worker_{name}", text, labels=self._names)
            for labels, value in values.items():
                family.add_metric(list(labels), value)
            yield family


def _lag_s(loop: asyncio.AbstractEventLoop | None) -> float:
    """How long a loop takes to answer. Asked from its own thread, it cannot be late."""
    if loop is None or asyncio._get_running_loop() is loop:
        return 0.0
    answered = threading.Event()
    started_s = time.perf_counter()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # it is closed
        return 0.0
    answered.wait(LOOP_LAG_MAX_S)
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class ReaderReading:
    """How far one reader of a queue's events is."""

    name: str
    #: None where the server does not count events.
    lag: int | None
    lag_s: float
    is_alive: bool


@dataclass(frozen=True, slots=True)
class QueueReading:
    """What one queue holds."""

    queue: str
    waiting: int
    pending: int
    delayed: int
    dlq: int
    repeatables: int
    is_paused: bool
    oldest_wait_s: float
    delayed_lag_s: float
    events: int = 0
    events_max_len: int = 0
    readers: tuple[ReaderReading, ...] = ()


#: Of each gauge: its name, the reading it shows, and what that is.
QUEUE_GAUGES: Final = (
    ("chasqui_queue_waiting", "waiting", "Jobs in the stream that no worker has."),
    ("chasqui_queue_pending", "pending", "Jobs that workers have and that are not done."),
    ("chasqui_queue_delayed", "delayed", "Jobs that are not due yet, retries included."),
    ("chasqui_queue_dlq", "dlq", "Jobs in the dead-letter queue."),
    ("chasqui_queue_repeatables", "repeatables", "Repeatable jobs."),
    ("chasqui_queue_paused", "is_paused", "1 while workers read nothing new."),
    (
        "chasqui_queue_oldest_wait_seconds",
        "oldest_wait_s",
        "How long the oldest job has been in the stream, waiting or running.",
    ),
    (
        "chasqui_queue_delayed_lag_seconds",
        "delayed_lag_s",
        "How long the first delayed job has been overdue.",
    ),
    ("chasqui_queue_events", "events", "Events in the stream of events."),
    ("chasqui_queue_events_max_len", "events_max_len", "Events that are kept for everybody."),
)
READER_GAUGES: Final = (
    ("chasqui_events_reader_lag", "lag", "Events that a reader has not read."),
    (
        "chasqui_events_reader_lag_seconds",
        "lag_s",
        "How much older the last event that a reader has read is than the last one written.",
    ),
    ("chasqui_events_reader_alive", "is_alive", "1 while events are held back for a reader."),
)


class QueueCollector(Collector):
    """Reads queues when scraped. `read` gives the readings, or raises where it cannot."""

    def __init__(self, read: Callable[[], Iterable[QueueReading]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            readings = list(self._read())
        except Exception:
            readings = []
            is_up = 0
        else:
            is_up = 1
        yield GaugeMetricFamily("chasqui_up", "1 if the server could be read.", is_up)
        for name, reading, text in QUEUE_GAUGES:
            family = GaugeMetricFamily(name, text, labels=["queue"])
            for one in readings:
                family.add_metric([one.queue], float(getattr(one, reading)))
            yield family
        for name, reading, text in READER_GAUGES:
            family = GaugeMetricFamily(name, text, labels=["queue", "reader"])
            for one in readings:
                for reader in one.readers:
                    if (value := getattr(reader, reading)) is not None:
                        family.add_metric([one.queue, reader.name], float(value))
            yield family
