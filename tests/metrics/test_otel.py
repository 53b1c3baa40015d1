"""OpenTelemetry: one trace from the add through all runs, and metrics that agree with them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_py
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from chasqui import Job, JobFailedError, Queue, UnrecoverableError, Worker, sync
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.traced import TracedHandlers
from chasqui.metrics import RetryScheduled
from chasqui.metrics.otel import OtelSink, OtelTracing
from chasqui.model.keys import Keys
from tests.servers import Server


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def tracing(provider: TracerProvider) -> OtelTracing:
    return OtelTracing(tracer_provider=provider)


@asynccontextmanager
async def working(name: str, handler: Any, url: str, **options: Any) -> AsyncIterator[None]:
    worker = Worker(name, handler, redis_url=url, **options)
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.close()
        await task


def by_start(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def kept(server: Server, queue_name: str) -> list[bytes]:
    with redis_py.Redis.from_url(server.url) as redis:
        return list(redis.scan_iter(Keys(queue_name).trace("*"), count=1000))


async def test_one_trace_from_the_add_through_two_retries(
    server: Server,
    queue_name: str,
    provider: TracerProvider,
    tracing: OtelTracing,
    exporter: InMemorySpanExporter,
) -> None:
    async def handler(job: Any) -> str:
        with provider.get_tracer("mine").start_as_current_span("inside"):
            if job.attempt < 2:
                raise ValueError("not yet")
        return "done"

    async with Queue(queue_name, redis_url=server.url, tracing=tracing) as queue:
        with provider.get_tracer("mine").start_as_current_span("request"):
            job = await queue.add("mail", 1, backoff=1)
        async with working(queue_name, handler, server.url, tracing=tracing, store_results=True):
            assert await job.result() == "done"
    spans = [span for span in by_start(exporter) if span.name != "inside"]
    assert [span.name for span in spans] == [
        "request",
        f"send {queue_name}",
        *[f"process {queue_name}"] * 3,
    ]
    request, send, *runs = spans
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {
        request.context.trace_id
    }
    assert send.parent == request.context
    assert (send.kind, send.attributes["messaging.operation.type"]) == (SpanKind.PRODUCER, "send")
    assert [run.parent.span_id for run in runs] == [send.context.span_id] * 3
    assert [run.kind for run in runs] == [SpanKind.CONSUMER] * 3
    assert [run.attributes["chasqui.job.attempt"] for run in runs] == [1, 2, 3]
    links = [[link.context.span_id for link in run.links] for run in runs]
    assert links == [[], [runs[0].context.span_id], [runs[1].context.span_id]]
    assert [run.status.status_code for run in runs] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    for span in (send, *runs):
        assert span.attributes["messaging.system"] == "chasqui"
        assert span.attributes["messaging.destination.name"] == queue_name
        assert span.attributes["messaging.message.id"] == job.id
    inside = [span for span in by_start(exporter) if span.name == "inside"]
    assert [span.parent.span_id for span in inside] == [run.context.span_id for run in runs]
    assert kept(server, queue_name) == []


async def test_delayed_bulk_and_unique_jobs_carry_their_trace(
    redis_86: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    async def handler(job: Any) -> None:
        pass

    async with Queue(queue_name, redis_url=redis_86.url, tracing=tracing) as queue:
        jobs = [
            await queue.add("late", 1, delay_ms=20),
            await queue.add_unique("once", 2, job_id="my-id"),
            *await queue.add_bulk([{"name": "many", "data": i} for i in range(3)]),
        ]
        again = await queue.add_unique("once", 2, job_id="my-id")
        assert not again.is_new
        async with working(queue_name, handler, redis_86.url, tracing=tracing):
            await asyncio.gather(*(job.result() for job in jobs))
    sends = [span for span in by_start(exporter) if span.kind is SpanKind.PRODUCER]
    runs = [span for span in by_start(exporter) if span.kind is SpanKind.CONSUMER]
    assert [span.attributes.get("messaging.batch.message_count") for span in sends] == [
        None,
        None,
        3,
        None,
    ]
    parents = {run.attributes["messaging.message.id"]: run.parent.span_id for run in runs}
    of_jobs = [sends[0], sends[1], *[sends[2]] * 3]
    assert parents == {
        job.id: send.context.span_id for job, send in zip(jobs, of_jobs, strict=True)
    }


async def test_a_queue_without_an_event_loop_traces_too(
    redis_86: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    done = asyncio.Event()

    async def handler(job: Any) -> None:
        done.set()

    with sync.Queue(queue_name, redis_url=redis_86.url, tracing=tracing) as queue:
        queue.add("mail", 1)
    async with working(queue_name, handler, redis_86.url, tracing=tracing):
        await done.wait()
    send, run = by_start(exporter)
    assert run.parent.span_id == send.context.span_id


async def test_a_batch_links_to_where_its_jobs_came_from(
    redis_86: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    async def handler(jobs: list[Any]) -> None:
        pass

    async with Queue(queue_name, redis_url=redis_86.url, tracing=tracing) as queue:
        jobs = [await queue.add("mail", 1), await queue.add("mail", 2)]
        async with working(queue_name, handler, redis_86.url, tracing=tracing, batch=2):
            await asyncio.gather(*(job.result() for job in jobs))
    first, second, run = by_start(exporter)
    assert run.parent is None
    assert {link.context.span_id for link in run.links} == {
        first.context.span_id,
        second.context.span_id,
    }


async def test_a_trace_that_is_not_recorded_leaves_nothing(
    redis_86: Server, queue_name: str
) -> None:
    off = OtelTracing(tracer_provider=TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    async with Queue(queue_name, redis_url=redis_86.url, tracing=off) as queue:
        await queue.add("mail", 1)
    assert kept(redis_86, queue_name) == []


async def test_jobs_that_nobody_traced_run_in_traces_of_their_own(
    redis_86: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    async def handler(job: Any) -> None:
        if job.data > 1 and job.attempt == 0:
            raise ValueError("no")

    keys = Keys(queue_name)
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        jobs = [await queue.add("mail", i, backoff=1) for i in range(3)]
        with redis_py.Redis.from_url(redis_86.url) as redis:
            (last, fields) = redis.xrevrange(keys.stream, count=1)[0]
            redis.xadd(keys.stream, {**fields, b"traceparent": b"no such thing " * 99})
            redis.xdel(keys.stream, last)
        async with working(queue_name, handler, redis_86.url, tracing=tracing):
            await asyncio.gather(*(job.result() for job in jobs))
    assert {span.parent for span in exporter.get_finished_spans()} == {None}
    assert len(exporter.get_finished_spans()) == 4
    assert kept(redis_86, queue_name) == []


async def test_the_context_is_a_field_of_the_entry(
    server: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    keys = Keys(queue_name)
    async with Queue(queue_name, redis_url=server.url) as plain:
        await plain.add("mail", 0)
        await plain.add("mail", 0, job_id="plain")
    async with Queue(queue_name, redis_url=server.url, tracing=tracing) as queue:
        await queue.add("mail", 1)
        await queue.add("", 2)
        await queue.add_unique("mail", 3, job_id="once")
        await queue.add("late", 4, delay_ms=60_000, job_id="late")
        assert await queue.reschedule("late", delay_ms=7_200_000)
        await queue.add("late", 5, delay_ms=60_000, job_id="never")
        assert set(kept(server, queue_name)) == {keys.trace("late"), keys.trace("never")}
        assert await queue.cancel_delayed("never")
    contexts = [
        f"00-{one.trace_id:032x}-{one.span_id:016x}-{one.trace_flags:02x}".encode()
        for one in (span.context for span in by_start(exporter))
    ]
    with redis_py.Redis.from_url(server.url) as redis:
        entries = [list(fields.items())[1:] for _, fields in redis.xrange(keys.stream)]
        assert entries == [
            [(b"n", b"mail")],
            [(b"n", b"mail")],
            [(b"n", b"mail"), (b"traceparent", contexts[0])],
            [(b"traceparent", contexts[1])],
            [(b"n", b"mail"), (b"traceparent", contexts[2])],
        ]
        # The delayed set has no room for it.
        assert kept(server, queue_name) == [keys.trace("late")]
        assert redis.get(keys.trace("late")) == contexts[3]
        assert 7200 < redis.ttl(keys.trace("late")) <= redis.ttl(keys.traces) <= 7200 + 3600


async def test_a_replayed_job_goes_on_in_its_trace(
    server: Server, queue_name: str, tracing: OtelTracing, exporter: InMemorySpanExporter
) -> None:
    is_mended = asyncio.Event()
    done = asyncio.Event()

    async def handler(job: Any) -> None:
        if not is_mended.is_set():
            raise UnrecoverableError("no")
        done.set()

    async with Queue(queue_name, redis_url=server.url, tracing=tracing) as queue:
        job = await queue.add("mail", 1)
        async with working(queue_name, handler, server.url, tracing=tracing):
            with pytest.raises(RuntimeError):
                await job.result()
            is_mended.set()
            await queue.replay_dlq()
            await done.wait()
    send, *runs = by_start(exporter)
    assert [run.parent.span_id for run in runs] == [send.context.span_id] * 2


async def test_metrics_agree_with_what_happened(redis_86: Server, queue_name: str) -> None:
    async def handler(job: Any) -> None:
        if job.data == 0 and job.attempt == 0:
            raise ValueError("once")
        if job.data == 1:
            raise UnrecoverableError("never")

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    sink = OtelSink(meter_provider=provider, queue=queue_name)
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        jobs = [await queue.add("mail", i, backoff=1) for i in range(5)]
        async with working(queue_name, handler, redis_86.url, metrics=sink):
            await asyncio.gather(*(job.result() for job in jobs), return_exceptions=True)
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: list(metric.data.data_points)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    sums = {
        name: sum(getattr(point, "value", getattr(point, "count", 0)) for point in points)
        for name, points in found.items()
    }
    assert sums["chasqui.jobs.completed"] == 4
    assert sums["chasqui.jobs.failed"] == 2
    assert sums["messaging.process.duration"] == 6
    assert sums["chasqui.retries.scheduled"] == sums["chasqui.promoter.promoted"] == 1
    assert sums["chasqui.dlq.routed"] == 1
    (dead,) = found["chasqui.dlq.routed"]
    assert dead.attributes == {
        "messaging.system": "chasqui",
        "messaging.destination.name": queue_name,
        "chasqui.job.name": "mail",
        "chasqui.dlq.reason": "unrecoverable",
    }
    provider.shutdown()


class Broken:
    """Tracing that raises, where a span begins or where it ends."""

    def __init__(self, where: str) -> None:
        self._where = where

    @contextmanager
    def sending(self, *arguments: Any) -> Iterator[str | None]:
        if self._where == "begin":
            raise LookupError("no span begins")
        try:
            yield None
        finally:
            raise BufferError("no span ends")

    processing = sending


def test_names_without_end_are_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chasqui.metrics.sink.NAMES_MAX", 2)
    reader = InMemoryMetricReader()
    sink = OtelSink(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    for name in ("a", "b", "c", "d", "a"):
        sink.retry_scheduled(RetryScheduled(attempt=1, backoff_ms=1, name=name))
    data = reader.get_metrics_data()
    assert data is not None
    points: dict[Any, Any] = {
        point.attributes["chasqui.job.name"]: point.value  # type: ignore[union-attr, index]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "chasqui.retries.scheduled"
        for point in metric.data.data_points
    }
    assert points == {"a": 2, "b": 1, "(other)": 2}


@pytest.mark.parametrize("where", ["begin", "end"])
async def test_tracing_that_fails_hurts_no_job(
    redis_86: Server,
    queue_name: str,
    where: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chasqui.producing.tracing._told", set())
    tracing = Broken(where)

    async def handler(job: Any) -> Any:
        if job.name == "dies":
            raise UnrecoverableError("as told")
        return job.data

    async with Queue(queue_name, redis_url=redis_86.url, tracing=tracing) as queue:
        jobs = await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
        dies = await queue.add("dies", 1)
        async with working(queue_name, handler, redis_86.url, tracing=tracing, store_results=True):
            assert await asyncio.gather(*(job.result() for job in jobs)) == [0, 1, 2]
            with pytest.raises(JobFailedError, match="as told"):
                await dies.result()
    assert caplog.text.count("tracing failed; logged once per type") == 1
    assert f"no span {where}s" in caplog.text


async def test_runs_that_never_were_leave_nothing_behind(tracing: OtelTracing) -> None:
    async def handler(job: Any) -> None:
        pass

    traced = TracedHandlers(Handlers(handler, threads=1), tracing, "q", "g")
    make = traced.make_job(lambda engine, entry: Job(entry.job_id, "n", None))
    run, _ = traced.find("n")
    for number in range(3):
        make(None, SimpleNamespace(job_id=f"never-{number}", extra={}))
    job = make(None, SimpleNamespace(job_id="runs", extra={}))
    given_up = run(job)
    assert not traced._entries
    given_up.close()  # as where a worker is cancelled before its task begins
