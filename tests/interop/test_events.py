"""Events of either package, read by the other's QueueEvents."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import JobFailedError, Queue, QueueEvents, UnrecoverableError, Worker
from tests.servers import Server


async def work(url: str, name: str, count: int) -> None:
    """Run our worker until it has run so many jobs; those called `bad` fail for good."""
    seen = 0
    enough = asyncio.Event()

    async def handler(job: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            enough.set()
        if job.name == "bad":
            raise UnrecoverableError("no use \u2713")

    worker = Worker(name, handler, redis_url=url)
    running = asyncio.create_task(worker.run())
    await enough.wait()
    await worker.close()
    await running


async def test_chasquimq_reads_our_events(
    peer: Callable[[str], Any], queue: Queue, redis_86: Server, queue_name: str
) -> None:
    good, bad = await queue.add("good", 1), await queue.add("bad", 2)
    await work(redis_86.url, queue_name, 2)
    async with QueueEvents(queue_name, redis_url=redis_86.url, last_event_id="0") as events:
        ours = [await anext(events) for _ in range(5)]
    theirs, place = [], "0"
    for event in ours:
        reader = f"QueueEvents(name, redis_url={redis_86.url!r}, last_event_id={place!r})"
        theirs.append(
            await asyncio.to_thread(
                peer, f"asyncio.ensure_future(anext(aiter(chasquimq.{reader})))"
            )
        )
        place = event.id
    assert theirs == [
        {"name": e.name, "job_id": e.job_id, "job_name": e.job_name, "fields": e.fields}
        for e in ours
    ]
    assert {(e.name, e.job_id) for e in ours} == {
        ("active", good.id),
        ("completed", good.id),
        ("active", bad.id),
        ("failed", bad.id),
        ("dlq", bad.id),
    }


async def test_we_read_chasquimqs_events(
    peer: Callable[[str], Any], redis_86: Server, queue_name: str
) -> None:
    job_id = (await asyncio.to_thread(peer, "queue.add('mail', 1)"))[0]
    async with QueueEvents(queue_name, redis_url=redis_86.url) as events:
        await asyncio.to_thread(peer, "work(1)")
        told = [await anext(events) for _ in range(2)]
    assert [(e.name, e.job_id, e.job_name) for e in told] == [
        ("active", job_id, "mail"),
        ("completed", job_id, "mail"),
    ]
    assert told[0].fields.keys() == {"ts", "attempt"}
    assert told[1].fields.keys() == {"ts", "attempt", "duration_us"}
    assert {type(value) for e in told for value in e.fields.values()} == {int}


async def test_a_job_that_chasquimq_runs_is_waited_for(
    peer: Callable[[str], Any], queue: Queue
) -> None:
    """Its worker tells of the end before the result is stored."""
    job = await queue.add("mail", 7)
    waiting = asyncio.create_task(job.result(poll_interval=1000))
    await asyncio.to_thread(peer, "work(1, store_results=True)")
    assert await waiting == {"done": 7}
    job = await queue.add("mail", 8)
    waiting = asyncio.create_task(job.result(poll_interval=1000))
    await asyncio.to_thread(peer, "work(1)")
    assert await waiting is None
    job = await queue.add("mail", 9)
    waiting = asyncio.create_task(job.result(poll_interval=1000))
    await asyncio.to_thread(peer, "work(1, failing=1)")
    with pytest.raises(JobFailedError, match="unrecoverable"):
        await waiting
