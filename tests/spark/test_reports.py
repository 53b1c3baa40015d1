"""What a report says of failures, losses and dead jobs, over events of real workers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Queue, UnrecoverableError, Worker
from chasqui.job import Job
from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.direct import Redis


class Wordless(Exception):
    """Raised without a text, as a timeout of asyncio is."""


#: Per kind of job what its runs raise.
RAISED: dict[str, Callable[[int], Exception]] = {
    "parse": lambda i: ValueError(f"order {i} is no order"),
    "hang": lambda i: Wordless(),
    # Longer than what events keep of it, with a quote that is open where they cut it.
    "page": lambda i: KeyError(f"{i}" + "x" * 1500),
    "stop": lambda i: UnrecoverableError(f"no customer '{i}'"),
}


async def fail(url: str, queue_name: str, each: int) -> list[str]:
    """Let a worker bury so many jobs of each kind; their ids."""

    async def handler(job: Job) -> None:
        raise RAISED[job.name](job.data)

    worker = Worker(queue_name, handler, redis_url=url, max_attempts=1)
    async with Queue(queue_name, redis_url=url) as queue:
        jobs = [{"name": name, "data": i} for name in RAISED for i in range(each)]
        added = await queue.add_bulk(jobs)
        running = asyncio.create_task(worker.run())
        while (await queue.counts()).dlq < len(jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await worker.close()
        await running
    return [job.id for job in added]


@pytest.fixture
def two_queues(redis_86: Server, queue_name: str) -> str:
    """Two queues whose jobs are dead, with commas between."""
    names = (queue_name, f"{queue_name}-b")
    for name in names:
        asyncio.run(fail(redis_86.url, name, each=3))
    return ",".join(names)


def test_a_failed_run_and_its_dead_job_have_one_signature(
    spark: Any, redis_86: Server, two_queues: str
):
    from chasqui.spark import read, triage

    failed = triage(read(spark, "events", two_queues, url=redis_86.url)).collect()
    dead = triage(read(spark, "dlq", two_queues, url=redis_86.url)).collect()
    assert [row["signature"] for row in failed] == [row["signature"] for row in dead]
    assert len(failed) == len(RAISED), "one row for both queues"
    for ran, died in zip(failed, dead, strict=True):
        assert ran["failures"] == died["failures"] == 6
        assert ran["masked_reason"] == died["masked_reason"]
        assert ran["queues"] == died["queues"] == two_queues.split(",")
        assert ran["sample_ids"] == died["sample_ids"], "ids of jobs, in both"
    words = {row["masked_reason"][:40] for row in failed}
    assert {"ValueError: order <n> is no order", "Wordless"} < words


def test_replay_takes_the_signatures_that_events_show(
    spark: Any, redis_86: Server, two_queues: str
):
    from chasqui.spark import read, triage

    url, queue_name = redis_86.url, two_queues.split(",")[0]
    rows = triage(read(spark, "events", two_queues, url=url)).collect()
    signatures = {row["names"][0]: row["signature"] for row in rows}
    redis = Redis(url, queue_name)
    for left, name in enumerate(reversed(RAISED)):
        chosen = ("replay", "-q", two_queues, "--signature", signatures[name], "--yes", "--json")
        assert call("spark", *chosen, url=url).json == {"replayed": 6, "selected": 6}
        assert redis("XLEN", redis.keys.dlq) == 9 - 3 * left
    assert call("spark", "replay", "-q", queue_name, "--signature", "5e8", url=url).code == 2
