"""Prometheus: what its own parser reads is what happened."""

import asyncio
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis as redis_py
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chasqui import Queue, Worker
from chasqui.exporter import Exporter
from chasqui.managing.retention import EVENTS_KEPT
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, PromoterTick, SchedulerTick
from chasqui.metrics.prometheus import PrometheusSink
from chasqui.metrics.testing import InMemorySink
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.timed.promoter import PromoterLoop
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.servers import Server

#: As they are documented.
CHASQUIMQ_SAMPLES = {
    "chasquimq_jobs_completed_total",
    "chasquimq_jobs_failed_total",
    "chasquimq_handler_duration_seconds_bucket",
    "chasquimq_retries_scheduled_total",
    "chasquimq_retry_backoff_seconds_bucket",
    "chasquimq_dlq_routed_total",
    "chasquimq_consumer_batch_size_bucket",
    "chasquimq_consumer_reclaimed_total",
    "chasquimq_promoter_promoted_total",
    "chasquimq_delayed_zset_depth",
    "chasquimq_promoter_oldest_pending_lag_ms",
    "chasquimq_promoter_lock_acquired_total",
    "chasquimq_promoter_lock_lost_total",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """Every sample by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(registry: CollectorRegistry) -> Samples:
    return parse(generate_latest(registry).decode())


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Both(InMemorySink):
    """Tells another sink as well."""

    def __init__(self, other: PrometheusSink) -> None:
        super().__init__()
        self.other = other

    def _keep(self, record: object) -> None:
        method = {
            "PromoterTick": "promoter_tick",
            "LockOutcome": "promoter_lock_outcome",
            "ReaderBatch": "reader_batch",
            "JobOutcome": "job_outcome",
            "RetryScheduled": "retry_scheduled",
            "DlqRouted": "dlq_routed",
            "SchedulerTick": "scheduler_tick",
        }[type(record).__name__]
        getattr(self.other, method)(record)
        super()._keep(record)


async def test_a_scrape_counts_what_happened(
    redis_86: Server, queue_name: str, registry: CollectorRegistry
) -> None:
    runs = 0

    async def handler(job: Any) -> None:
        nonlocal runs
        runs += 1
        if job.name == "bad" or (job.name == "once" and job.attempt == 0):
            raise ValueError("no")

    both = Both(PrometheusSink(registry=registry))
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        await queue.add_bulk([{"name": "good", "data": i} for i in range(50)])
        await queue.add_bulk(
            [{"name": "once", "data": i, "backoff": 1, "attempts": 3} for i in range(5)]
        )
        await queue.add_bulk([{"name": "bad", "data": i, "attempts": 1} for i in range(3)])
        worker = Worker(queue_name, handler, redis_url=redis_86.url, metrics=both)
        running = asyncio.create_task(worker.run())
        for _ in range(63):
            await both.next(JobOutcome)
        await worker.close()
        await running
        dead = (await queue.counts()).dlq
    seen = scrape(registry)

    def total(metric: str, **labels: str) -> float:
        return sum(
            value
            for (sample, at), value in seen.items()
            if sample == metric and labels.items() <= dict(at).items()
        )

    assert total("chasquimq_jobs_completed_total") == both.jobs_completed == 55
    assert total("chasquimq_jobs_completed_total", name="once") == 5
    assert total("chasquimq_jobs_failed_total") == both.jobs_failed == 8
    assert total("chasquimq_jobs_failed_total", name="bad", kind="err") == 3
    assert total("chasquimq_handler_duration_seconds_count") == runs == 63
    assert total("chasquimq_retries_scheduled_total") == both.total_retries == 5
    assert total("chasquimq_retry_backoff_seconds_count") == 5
    assert total("chasquimq_dlq_routed_total", reason="retries_exhausted") == dead == 3
    assert total("chasquimq_consumer_batch_size_sum") == both.total_read == 63
    assert total("chasquimq_promoter_promoted_total") == both.total_promoted == 5
    assert {name for name, _ in seen} >= CHASQUIMQ_SAMPLES


def test_a_queue_may_be_a_label(registry: CollectorRegistry) -> None:
    for queue, depth in (("a", 1), ("b", 2)):
        PrometheusSink(registry=registry, queue=queue).promoter_tick(PromoterTick(3, depth, 5))
    seen = scrape(registry)
    assert seen["chasquimq_delayed_zset_depth", (("queue", "a"),)] == 1
    assert seen["chasquimq_delayed_zset_depth", (("queue", "b"),)] == 2
    with pytest.raises(ValueError, match="queue"):
        PrometheusSink(registry=registry)


def test_names_without_end_are_counted_as_one(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chasqui.metrics.sink.NAMES_MAX", 2)
    sink = PrometheusSink(registry=registry)
    for name in ("a", "b", "c", "d", "a"):
        sink.job_outcome(JobOutcome(OutcomeKind.OK, 1, 10, name))
        sink.dlq_routed(DlqRouted("malformed", 0, name))
    seen = parse(generate_latest(registry).decode())
    for metric in ("chasquimq_jobs_completed_total", "chasquimq_dlq_routed_total"):
        counted = {
            dict(labels)["name"]: value for (name, labels), value in seen.items() if name == metric
        }
        assert counted == {"a": 2, "b": 1, "(other)": 2}


async def test_leadership_is_lost_only_by_who_had_it(
    redis_86: Server, queue_name: str, registry: CollectorRegistry
) -> None:
    """Two workers of a process share a sink: that the second finds the first is no loss."""
    sink, keys = PrometheusSink(registry=registry), Keys(queue_name)

    def changes() -> list[float]:
        seen, name = scrape(registry), "chasquimq_promoter_lock"
        return [seen[f"{name}_{what}_total", ()] for what in ("acquired", "lost")]

    connection = Connection(Endpoint.parse(redis_86.url), key=keys.stream)
    try:
        first, second = (PromoterLoop(keys, connection, connection, metrics=sink) for _ in "12")
        for loop in (first, second):
            await loop.run_once()
        assert changes() == [1, 0]
        stolen = ("SET", keys.promoter_lock, "other", "EX", 1000)
        await connection.execute(*stolen, effect=Effect.IDEMPOTENT)
        first.lock._renew_at_s = 0.0
        for loop in (first, second):
            await loop.run_once()
        assert changes() == [1, 1]
    finally:
        await connection.close()


def test_a_scheduler_that_is_late_is_told(registry: CollectorRegistry) -> None:
    sink = PrometheusSink(registry=registry)
    sink.scheduler_tick(SchedulerTick(5, 2, 1_500))
    sink.scheduler_tick(SchedulerTick(3, 1, 250))
    seen = scrape(registry)
    assert seen["chasqui_scheduler_fired_total", ()] == 8
    assert seen["chasqui_scheduler_late_total", ()] == 3
    assert seen["chasqui_scheduler_lag_seconds", ()] == 0.25


async def test_a_worker_is_read_when_scraped(
    redis_86: Server, queue_name: str, registry: CollectorRegistry
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(job: Any) -> None:
        started.set()
        await go_on.wait()

    sink = PrometheusSink(registry=registry, queue=queue_name)
    worker = Worker(queue_name, handler, redis_url=redis_86.url, metrics=sink)
    sink.watch(worker)
    assert not [name for name, _ in scrape(registry) if name.startswith("chasqui_worker")]
    running = asyncio.create_task(worker.run())
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        await queue.add("mail", 1)
    await started.wait()
    labels = (("queue", queue_name),)
    seen = await asyncio.to_thread(scrape, registry)
    assert seen["chasqui_worker_running", labels] == 1
    assert seen["chasqui_worker_prefetched", labels] == 0
    assert seen["chasqui_worker_lease_losses_total", labels] == 0
    assert seen["chasqui_worker_loop_lag_seconds", labels] > 0
    assert scrape(registry)["chasqui_worker_loop_lag_seconds", labels] == 0  # by the loop itself
    go_on.set()
    await worker.close()
    await running


class Watched:
    """A worker as the sink sees it."""

    loop = None
    is_running, is_closed = True, False

    def __init__(self, running: int, oldest_running_s: float) -> None:
        self._health = SimpleNamespace(
            running=running,
            prefetched=0,
            lost=1,
            last_read_age_s=0.5,
            oldest_running_s=oldest_running_s,
        )

    def health(self) -> Any:
        return self._health


def test_workers_of_one_queue_are_told_as_one(registry: CollectorRegistry) -> None:
    """Prometheus takes no series twice."""
    sink = PrometheusSink(registry=registry, queue="mail")
    first, second = Watched(2, 4.0), Watched(3, 1.0)
    for worker in (first, second, second):
        sink.watch(worker)
    PrometheusSink(registry=registry, queue="shop").watch(Watched(7, 9.0))
    text = generate_latest(registry).decode()
    assert text.count('chasqui_worker_running{queue="mail"}') == 1
    seen = parse(text)
    mail = (("queue", "mail"),)
    assert seen["chasqui_worker_running", mail] == 5
    assert seen["chasqui_worker_lease_losses_total", mail] == 2
    assert seen["chasqui_worker_oldest_run_seconds", mail] == 4.0
    assert seen["chasqui_worker_running", (("queue", "shop"),)] == 7
    first.is_running = False
    assert scrape(registry)["chasqui_worker_running", mail] == 5, "it ended by itself: to be seen"
    first.is_closed = True
    seen = scrape(registry)
    assert seen["chasqui_worker_running", mail] == 3
    assert seen["chasqui_worker_oldest_run_seconds", mail] == 1.0
    assert seen["chasqui_worker_lease_losses_total", mail] == 2, "a counter never falls"


def test_a_worker_is_watched_before_there_is_a_loop(
    redis_86: Server, queue_name: str, registry: CollectorRegistry
) -> None:
    """As in a module that `chasqui worker` loads."""
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(job: Any) -> None:
        started.set()
        await go_on.wait()

    sink = PrometheusSink(registry=registry)
    worker = Worker(queue_name, handler, redis_url=redis_86.url, metrics=sink)
    sink.watch(worker)

    async def work() -> Samples:
        running = asyncio.create_task(worker.run())
        async with Queue(queue_name, redis_url=redis_86.url) as queue:
            await queue.add("mail", 1)
        await started.wait()
        seen = await asyncio.to_thread(scrape, registry)
        go_on.set()
        await worker.close()
        await running
        return seen

    seen = asyncio.run(work())
    assert seen["chasqui_worker_running", ()] == 1
    assert seen["chasqui_worker_loop_lag_seconds", ()] > 0
    assert ("chasqui_worker_loop_lag_seconds", ()) not in scrape(registry)  # it was closed


# ── Queues without a worker ─────────────────────────────────────────────────────────────────────


async def fill(queue: Queue) -> None:
    await queue.add_bulk([{"name": "mail", "data": i} for i in range(3)])
    await queue.add_bulk([{"name": "mail", "data": i, "delay_ms": 60_000} for i in range(2)])
    await queue.upsert_repeatable_job("mail", 1, repeat={"kind": "every", "interval_ms": 60_000})
    await queue.pause()


def gauges(seen: Samples, queue: str) -> dict[str, float]:
    return {name: value for (name, at), value in seen.items() if at == (("queue", queue),)}


async def test_the_exporter_reads_queues_of_every_server(
    server: Server, queue_name: str, registry: CollectorRegistry
) -> None:
    async with Queue(queue_name, redis_url=server.url) as queue:
        await fill(queue)
    names = [queue_name, "no-such-queue", queue_name]
    with Exporter(names, redis_url=server.url, registry=registry) as exporter:
        port = exporter.serve(0)
        address = f"http://127.0.0.1:{port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address).read().decode())
        seen = parse(text)
    assert text.count(f'chasqui_queue_waiting{{queue="{queue_name}"}}') == 1
    assert seen["chasqui_up", ()] == 1
    found = gauges(seen, queue_name)
    assert found.pop("chasqui_queue_oldest_wait_seconds") >= 0
    assert found == {
        "chasqui_queue_waiting": 3,
        "chasqui_queue_pending": 0,
        "chasqui_queue_delayed": 2,
        "chasqui_queue_dlq": 0,
        "chasqui_queue_repeatables": 1,
        "chasqui_queue_paused": 1,
        "chasqui_queue_delayed_lag_seconds": 0,
        "chasqui_queue_events": 0,
        "chasqui_queue_events_max_len": EVENTS_KEPT,
    }
    assert set(gauges(seen, "no-such-queue").values()) == {0, EVENTS_KEPT}
    assert scrape(registry) == {}


async def test_a_queue_that_cannot_be_read_does_not_hide_others(
    server: Server, queue_name: str, registry: CollectorRegistry, caplog: Any
) -> None:
    broken = f"{queue_name}-broken"
    with redis_py.Redis.from_url(server.url) as client:
        client.set(Keys(broken).stream, "no stream")
    async with Queue(queue_name, redis_url=server.url) as queue:
        await fill(queue)
    with Exporter([broken, queue_name], redis_url=server.url, registry=registry):
        seen = await asyncio.to_thread(scrape, registry)
    assert seen["chasqui_up", ()] == 1
    assert gauges(seen, queue_name)["chasqui_queue_waiting"] == 3
    assert gauges(seen, broken) == {}
    assert f"queue {broken} cannot be read" in caplog.text
    with redis_py.Redis.from_url(server.url) as client:
        rights = {"passwords": "+pass", "keys": [f"*{queue_name}}}*"], "commands": ["+@all"]}
        client.acl_setuser(queue_name, enabled=True, **rights)
        user = urlsplit(server.url)._replace(netloc=f"{queue_name}:pass@127.0.0.1:{server.port}")
        names = [f"{queue_name}-forbidden", queue_name]
        with Exporter(names, redis_url=user.geturl(), registry=registry):
            seen = await asyncio.to_thread(scrape, registry)
        client.acl_deluser(queue_name)
    assert seen["chasqui_up", ()] == 1
    assert gauges(seen, queue_name)["chasqui_queue_waiting"] == 3
    assert f"queue {queue_name}-forbidden cannot be read" in caplog.text
    with Exporter([broken], redis_url=server.url, registry=registry):
        assert await asyncio.to_thread(scrape, registry) == {("chasqui_up", ()): 0}


def test_a_server_that_is_gone_is_told(registry: CollectorRegistry, caplog: Any) -> None:
    url = "redis://user:Kanari-7f3a@127.0.0.1:1"
    with Exporter(["emails"], redis_url=url, registry=registry):
        assert scrape(registry) == {("chasqui_up", ()): 0}
        scrape(registry)
    assert len(caplog.records) == 1
    assert "Kanari" not in caplog.text


def test_an_exporter_needs_queues() -> None:
    for wrong in ([], "emails"):
        with pytest.raises(ValueError, match="queues"):
            Exporter(wrong)
    with pytest.raises(ValueError, match="queue name"):
        Exporter(["a b"])


@pytest.fixture
def command(redis_86: Server, queue_name: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = ["exporter", queue_name, "--port", "0", "--redis-url", redis_86.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "chasqui", *arguments], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(
    command: "subprocess.Popen[str]", queue_name: str
) -> None:
    assert command.stdout is not None
    address = command.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
    with urllib.request.urlopen(address) as answer:
        seen = parse(answer.read().decode())
    assert seen["chasqui_queue_waiting", (("queue", queue_name),)] == 0
    command.send_signal(signal.SIGTERM)
    assert command.wait(20) == 0
