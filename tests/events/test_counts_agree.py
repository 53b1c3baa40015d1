"""Events, sinks, handlers and the queue itself tell the same numbers."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis as redis_py
from prometheus_client import CollectorRegistry

from chasqui import Queue, QueueEvents, UnrecoverableError, Worker
from chasqui.metrics.prometheus import PrometheusSink
from chasqui.metrics.testing import InMemorySink
from chasqui.model.keys import Keys
from tests.metrics.test_prometheus import Both, scrape
from tests.servers import Server


def entry(number: int) -> dict[str, Any]:
    """Of ten jobs: seven are done, one fails once, one twice, one dies; every fifth is delayed."""
    name = {7: "once", 8: "twice", 9: "dies"}.get(number % 10, "good")
    options = {"backoff": 1} if name in ("once", "twice") else {}
    if number % 5 == 0:
        options["delay_ms"] = 10
    return {"name": name, "data": number, **options}


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
async def test_events_and_metrics_agree(redis_86: Server, queue_name: str, count: int) -> None:
    runs: Counter[str] = Counter()

    async def handler(job: Any) -> None:
        runs[job.name] += 1
        if job.name == "dies":
            raise UnrecoverableError("no use")
        if job.attempt < {"once": 1, "twice": 2}.get(job.name, 0):
            raise ValueError("not yet")

    registry = CollectorRegistry()
    told: Counter[str] = Counter()
    sinks: list[InMemorySink] = []
    all_ended = asyncio.Event()

    async def listen(events: QueueEvents) -> None:
        async for event in events:
            if event.name == "last of all":
                return
            told[event.name] += 1
            if told["completed"] + told["dlq"] == count:
                all_ended.set()

    async with (
        Queue(queue_name, redis_url=redis_86.url) as queue,
        QueueEvents(queue_name, redis_url=redis_86.url, count=1000) as events,
    ):
        listening = asyncio.create_task(listen(events))
        for start in range(0, count, 1000):
            await queue.add_bulk([entry(number) for number in range(start, start + 1000)])
        ended = asyncio.create_task(all_ended.wait())
        while not ended.done():  # workers come and go: what one leaves, the next one takes
            sinks.append(Both(PrometheusSink(registry=registry)))
            worker = Worker(queue_name, handler, redis_url=redis_86.url, metrics=sinks[-1])
            running = asyncio.create_task(worker.run())
            await asyncio.wait([ended], timeout=1.0)
            await worker.close()
            await running
        with redis_py.Redis.from_url(redis_86.url) as redis:
            redis.xadd(Keys(queue_name).events, {"e": "last of all"})
        await listening
        counts = await queue.counts()
    seen = scrape(registry)

    def total(metric: str) -> float:
        return sum(value for (name, _), value in seen.items() if name == metric)

    tenth = count // 10
    assert runs == {"good": 7 * tenth, "once": 2 * tenth, "twice": 3 * tenth, "dies": tenth}
    assert told["gap"] == 0
    completed = sum(sink.jobs_completed for sink in sinks)
    failed = sum(sink.jobs_failed for sink in sinks)
    assert completed == told["completed"] == total("chasquimq_jobs_completed_total") == 9 * tenth
    assert failed == told["failed"] == total("chasquimq_jobs_failed_total") == 4 * tenth
    assert sum(runs.values()) == completed + failed == told["active"]
    retries = sum(sink.total_retries for sink in sinks)
    assert retries == told["retry-scheduled"] == total("chasquimq_retries_scheduled_total")
    assert retries == 3 * tenth
    dead = sum(sink.dlq_count("unrecoverable") for sink in sinks)
    assert dead == told["dlq"] == total("chasquimq_dlq_routed_total") == counts.dlq == tenth
    promoted = sum(sink.total_promoted for sink in sinks)
    assert promoted == told["waiting"] == total("chasquimq_promoter_promoted_total")
    assert promoted == retries + count // 5
    assert (counts.waiting, counts.pending, counts.delayed) == (0, 0, 0)
