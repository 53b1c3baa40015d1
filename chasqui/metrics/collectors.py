"""Collectors for Prometheus: they read the state of workers and of queues when scraped."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: The longest lag that is measured: a loop that takes longer shows this.
LOOP_LAG_MAX_S: Final = 1.0


class HealthLike(Protocol):
    """What is shown of a worker."""

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


#: Each gauge of a worker: its name, its reading, its help text, and what combines several.
WORKER_GAUGES: Final[tuple[tuple[str, str, str, Callable[[Iterable[float]], float]], ...]] = (
    ("running", "running", "Handlers that run now.", sum),
    ("prefetched", "prefetched", "Jobs in hand, not begun.", sum),
    ("last_read_age_seconds", "last_read_age_s", "Time since the last read returned.", max),
    ("oldest_run_seconds", "oldest_running_s", "How long the longest run has been going.", max),
)


class WorkerCollector(Collector):
    """Reads the health of workers when scraped. Workers with the same labels show as one; closed
    workers do not show."""

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
        found: dict[tuple[str, ...], list[HealthLike]] = {}
        lags_s: dict[tuple[str, ...], float] = {}
        asked: dict[asyncio.AbstractEventLoop | None, float] = {None: 0.0}
        for worker, labels in workers:
            if (health := worker.health()) is None:
                continue
            found.setdefault(labels, []).append(health)
            lost[labels] = lost.get(labels, 0) + health.lost
            loop = worker.loop
            if loop not in asked:
                asked[loop] = _lag_s(loop)
            lags_s[labels] = max(lags_s.get(labels, 0.0), asked[loop])
        for name, reading, text, together in WORKER_GAUGES:
            values = {
                labels: together(getattr(health, reading) for health in every)
                for labels, every in found.items()
            }
            yield from self._family(GaugeMetricFamily, name, text, values)
        text = "Jobs that other workers took over while these had them."
        yield from self._family(CounterMetricFamily, "lease_losses", text, lost)
        text = "How late the event loop is."
        yield from self._family(GaugeMetricFamily, "loop_lag_seconds", text, lags_s)

    def _open(self) -> tuple[list[tuple[Watched, tuple[str, ...]]], dict[tuple[str, ...], int]]:
        """The workers that are not closed, and the leases that closed ones lost. A worker whose run
        ended without a close still shows: you should see that it does not read."""
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
    """How late a loop runs a callback; 0 if this is its own thread, where it cannot be late."""
    if loop is None or asyncio._get_running_loop() is loop:
        return 0.0
    ran = threading.Event()
    started_s = time.perf_counter()
    try:
        loop.call_soon_threadsafe(ran.set)
    except RuntimeError:  # it is closed
        return 0.0
    ran.wait(LOOP_LAG_MAX_S)
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class ReaderReading:
    """How far one reader of a queue's events has come."""

    name: str
    #: None if the server does not count events.
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


#: Each gauge: its name, its reading, its help text.
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
    """Reads queues when scraped. `read` returns the readings; if it raises, `chasqui_up` is 0."""

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
