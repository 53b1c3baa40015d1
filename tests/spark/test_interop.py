"""What the writer writes, our worker and a chasquimq worker run; what chasquimq wrote is read."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from chasqui import Job, Worker
from tests.interop.conftest import interop_python, peer
from tests.servers import Server
from tests.spark.direct import Redis, batches, consume_reader, read, step, struct, writer

__all__ = ["interop_python", "peer"]  # fixtures

SCHEMA = struct(n="bigint", name="string", job_id="string", attempts="int")


def write(server: Server, queue: str, count: int) -> None:
    columns = {
        "n": list(range(count)),
        "name": ["mail"] * count,
        "job_id": [None if i % 2 else f"own-{i}" for i in range(count)],
        "attempts": [3 if i % 3 == 0 else None for i in range(count)],
    }
    it = writer(server.url, SCHEMA, queue=queue)
    it.commit([it.write(batches(columns, SCHEMA))])


def test_a_chasquimq_worker_runs_what_was_written(
    peer: Callable[[str], Any], redis_86: Server, queue_name: str
):
    write(redis_86, queue_name, 200)
    seen = peer("work(200, failing=1, store_results=True)")
    assert sorted(data["n"] for _, _, data, _ in seen) == list(range(200))
    assert {name for _, name, _, _ in seen} == {"mail"}
    events = read(redis_86.url, queue_name, table="events")
    assert sum(row["event"] == "completed" for row in events) == 199
    (dead,) = read(redis_86.url, queue_name, table="dlq", payloadFormat="json")
    assert dead["job_id"] == seen[0][0]
    ids = ",".join(job_id for job_id, *_ in seen)
    results = read(redis_86.url, queue_name, table="results", jobIds=ids, payloadFormat="json")
    assert len(results) == 199
    assert {json.loads(row["value"])["done"]["n"] for row in results} == {
        data["n"] for job_id, _, data, _ in seen if job_id != dead["job_id"]
    }


async def test_our_worker_runs_what_was_written(redis_86: Server, queue_name: str):
    await asyncio.to_thread(write, redis_86, queue_name, 200)
    seen: list[int] = []
    enough = asyncio.Event()

    async def handle(job: Job) -> None:
        seen.append(job.data["n"])
        if len(seen) == 200:
            enough.set()

    worker = Worker(queue_name, handle, redis_url=redis_86.url)
    running = asyncio.ensure_future(worker.run())
    await asyncio.wait_for(enough.wait(), 20)
    await worker.close()
    await running
    assert sorted(seen) == list(range(200))


def test_jobs_that_chasquimq_added_are_read_and_consumed(
    peer: Callable[[str], Any], redis_86: Server, queue_name: str
):
    peer("queue.add_bulk([{'name': 'theirs', 'data': {'n': i}} for i in range(50)])")
    peer("queue.add('later', {'n': 1}, delay_ms=60_000)")
    rows = read(redis_86.url, queue_name, payloadFormat="json")
    assert [json.loads(row["payload"])["n"] for row in rows] == list(range(50))
    (later,) = read(redis_86.url, queue_name, table="delayed")
    assert later["name"] == "later"
    reader = consume_reader(redis_86.url, queue_name)
    end, rows = step(reader, reader.initialOffset())
    assert {row["name"] for row in rows} == {"theirs"}
    reader.commit(end)
    redis = Redis(redis_86.url, queue_name)
    assert redis("XLEN", redis.keys.stream) == 0
