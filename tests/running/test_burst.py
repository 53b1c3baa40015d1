"""Groups that end by themselves when nothing is left to run."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue, Worker, WorkerGroup
from chasqui.consuming import burst
from chasqui.model.keys import Keys
from tests.running.conftest import WAIT_S, Program
from tests.servers import RemoteServer, Server


class Shop:
    """Two queues of a server, and what has run."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.names = (f"{name}-a", f"{name}-b")
        self.runs: Counter[Any] = Counter()

    def queue(self, n: int = 0) -> Queue:
        return Queue(self.names[n], redis_url=self.url)

    async def run(self, handler: Callable[[Job], Any], **options: Any) -> WorkerGroup:
        """Run a group to its own end."""
        options = {"redis_url": self.url, "max_attempts": 3, **options}
        workers = [Worker(name, handler, **options) for name in self.names]
        group = WorkerGroup(workers, name="shop", burst=True)
        await asyncio.wait_for(group.run(), WAIT_S)
        assert group.is_closed
        return group

    async def count(self, job: Job) -> None:
        self.runs[job.data] += 1


@pytest.fixture
def shop(server: Server | RemoteServer, queue_name: str) -> Shop:
    return Shop(server.url, queue_name)


async def test_it_runs_all_jobs_and_ends(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    async with shop.queue(0) as first, shop.queue(1) as second:
        await first.add_bulk([{"name": "job", "data": n} for n in range(300)])
        await second.add_bulk([{"name": "job", "data": n} for n in range(300, 400)])
        await shop.run(shop.count)
        assert shop.runs == Counter(range(400))
        for queue in (first, second):
            counts = await queue.counts()
            assert (counts.waiting, counts.pending, counts.delayed) == (0, 0, 0)
    assert caplog.text.count("nothing is left to run") == 2


async def test_an_empty_queue_ends_at_once(shop: Shop) -> None:
    await shop.run(shop.count)
    assert not shop.runs


async def test_jobs_that_handlers_add_to_the_other_queue_run_too(shop: Shop) -> None:
    queues = [shop.queue(0), shop.queue(1)]

    async def handler(job: Job) -> None:
        shop.runs[job.data] += 1
        if job.data < 20:
            await asyncio.sleep(0.01)
            await queues[(job.data + 1) % 2].add("job", job.data + 1)

    await queues[0].add("job", 0)
    await shop.run(handler)
    for queue in queues:
        await queue.close()
    assert shop.runs == Counter(range(21))


async def test_retries_and_jobs_that_are_due_soon_are_waited_for(shop: Shop) -> None:
    async def handler(job: Job) -> None:
        shop.runs[job.data] += 1
        if job.data == "fails" and shop.runs["fails"] < 3:
            raise ValueError("once more")

    async with shop.queue() as queue:
        await queue.add("job", "fails")
        await queue.add("job", "delayed", delay_ms=1500)
        await shop.run(handler)
    assert shop.runs == Counter({"fails": 3, "delayed": 1})


async def test_jobs_that_are_due_later_are_left_and_counted(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    async with shop.queue() as queue:
        await queue.add("job", "now")
        for n in range(2):
            await queue.add("job", n, delay_ms=burst.SOON_MS + 60_000)
        await shop.run(shop.count)
        assert shop.runs == Counter(["now"])
        assert (await queue.counts()).delayed == 2
    assert f"queue {shop.names[0]}: nothing is left to run now; 2 jobs are due later" in caplog.text


async def test_a_paused_queue_is_left(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    async with shop.queue() as queue:
        await queue.add("job", 1)
        await queue.pause()
        await shop.run(shop.count)
        assert (await queue.counts()).waiting == 1
        await queue.resume()
    assert "paused; 1 job is left" in caplog.text


async def test_jobs_that_a_killed_worker_left_are_taken_over(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    stream = Keys(shop.names[0]).stream
    with redis_py.from_url(shop.url) as redis:
        async with shop.queue() as queue:
            await queue.add_bulk([{"name": "job", "data": n} for n in range(2)])
        redis.xgroup_create(stream, "default", "0")
        ((_, (_, (other, _))),) = redis.xreadgroup("default", "killed", {stream: ">"})
        await shop.run(shop.count, claim_min_idle_ms=60_000)
        assert not shop.runs  # for all that is known the worker lives
        redis.xclaim(stream, "default", "killed", 0, [other], idle=58_000)
        await shop.run(shop.count, claim_min_idle_ms=60_000)
        assert shop.runs == Counter([1])
    for count in ("2 jobs", "1 job"):
        assert f"nothing is left to run; other workers have {count}\n" in caplog.text


async def test_one_that_is_told_to_end_does_not_look_any_longer(shop: Shop) -> None:
    begun = asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await asyncio.sleep(0.2)

    async with shop.queue() as queue:
        await queue.add("job", 1)
        await queue.add("job", 2, delay_ms=burst.SOON_MS // 2)
        workers = [Worker(name, handler, redis_url=shop.url) for name in shop.names]
        group = WorkerGroup(workers, name="shop", burst=True)
        running = asyncio.ensure_future(group.run())
        await asyncio.wait_for(begun.wait(), WAIT_S)
        await group.close()
        await asyncio.wait_for(running, WAIT_S)
        assert (await queue.counts()).delayed == 1


PROGRAM = """
from chasqui import Worker

async def handler(job):
    with open("ran", "a") as file:
        print(job.data, file=file)

worker = Worker(QUEUE, handler)
"""


@pytest.mark.parametrize(
    "arguments", [[], ["--processes", "2"], ["--max-jobs", "10"]], ids=["one", "two", "recycled"]
)
async def test_the_command_ends_with_code_0(
    program: Program, valkey_9: Server, queue_name: str, arguments: list[str]
) -> None:
    program.write(PROGRAM.replace("QUEUE", repr(queue_name)))
    async with Queue(queue_name, redis_url=valkey_9.url) as queue:
        await queue.add_bulk([{"name": "job", "data": n} for n in range(50)])
        assert program.run("shop:worker", "--burst", *arguments) == 0
        assert (await queue.counts()).waiting == 0
    assert sorted(map(int, program.lines("ran"))) == list(range(50))
    assert "another one starts" not in program.log
