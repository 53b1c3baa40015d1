"""Many at once: threads, forked children, processes, and callers that give up."""

import asyncio
import itertools
import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui import sync
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.fixtures import LOOPS
from tests.proxy import Proxy

# pytest-xdist has a thread of its own; what the children do takes no lock of it.
_forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
_SPAWN = multiprocessing.get_context("spawn")


def ids_in(redis: redis_py.Redis, keys: Keys) -> list[str]:
    return [msgpack.unpackb(fields[b"d"])[0] for _, fields in redis.xrange(keys.stream)]


def test_threads_share_one_queue(server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys):
    before = threading.active_count()
    with sync.Queue(queue_name, redis_url=server.url) as queue:

        def work(number: int) -> list[str]:
            ids = [queue.add("n", number).id for _ in range(20)]
            ids += [
                job.id for job in queue.add_bulk([{"name": "n", "data": n} for n in range(300)])
            ]
            ids.append(queue.add("n", number, job_id=f"t{number}").id)
            assert queue.cancel_delayed(queue.add("n", number, delay_ms=60_000).id)
            return ids

        with ThreadPoolExecutor(8) as pool:
            told = [job_id for ids in pool.map(work, range(16)) for job_id in ids]
        assert threading.active_count() <= before
    there = ids_in(redis, keys)
    assert len(there) == len(set(there)) == 16 * 321
    assert set(there) == set(told)
    assert redis.zcard(keys.delayed) == 0


@_forks
@pytest.mark.parametrize("is_used", [True, False], ids=["used before", "made before"])
def test_a_fork_makes_two_producers(
    is_used: bool, server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys
):
    """With their parent's numbers, the children's first jobs would be taken for repeats."""
    queue = sync.Queue(queue_name, redis_url=server.url)
    if is_used:
        queue.add("n", "before")
        queue.add("n", "before", job_id="before")
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for n in range(20):
                    queue.add("n", n)
                    queue.add("n", n, job_id=f"{child}-{n}")
                queue.add_bulk([{"name": "n", "data": n} for n in range(300)])
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    for n in range(20):
        queue.add("n", n)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    queue.add("n", "after")
    queue.close()
    there = ids_in(redis, keys)
    assert len(there) == len(set(there)) == 3 * 340 + 21 + 2 * is_used


@_forks
def test_an_async_queue_made_before_a_fork(
    server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys
):
    queue = Queue(queue_name, redis_url=server.url)

    async def add() -> None:
        async with queue:
            await queue.add("n", 1)
            await queue.add("n", 1, delay_ms=60_000)

    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                asyncio.run(add())
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    asyncio.run(add())
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert (redis.xlen(keys.stream), redis.zcard(keys.delayed)) == (3, 3)


def test_a_child_that_goes_on_in_its_parents_loop_adds_nothing(
    server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys
):
    async def add_around_a_fork() -> int:
        async with Queue(queue_name, redis_url=server.url) as queue:
            await queue.add("n", 0)
            adding = asyncio.create_task(queue.add("n", 1))
            await asyncio.sleep(0)  # it is to leave at the end of this turn
            pid = os.fork()
            if pid == 0:
                try:
                    for _ in range(3):
                        await asyncio.sleep(0)
                finally:
                    os._exit(0)
            _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 (the child is alone with the loop)
            await adding
            return status

    assert asyncio.run(add_around_a_fork()) == 0
    assert redis.xlen(keys.stream) == 2


def _add_unique(url: str, name: str, start: Any, out: Any) -> None:
    async def main() -> int:
        async with Queue(name, redis_url=url) as queue:
            await queue.is_paused()
            start.wait()
            ids = [f"id-{n}" for n in range(10_000)]
            random.shuffle(ids)
            new = 0
            for at in range(0, 8000, 400):
                part = [{"name": "n", "data": 1, "job_id": one} for one in ids[at : at + 400]]
                new += sum(job.is_new for job in await queue.add_bulk(part))
            for at in range(8000, 10_000, 50):
                adds = (queue.add_unique("n", 1, job_id=one) for one in ids[at : at + 50])
                new += sum(job.is_new for job in await asyncio.gather(*adds))
            return new

    out.put(asyncio.run(main()))


@pytest.mark.slow
def test_two_processes_add_the_same_ids(
    server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys
):
    start, out = _SPAWN.Barrier(2), _SPAWN.Queue()
    processes = [
        _SPAWN.Process(target=_add_unique, args=(server.url, queue_name, start, out))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    new = [out.get(timeout=50) for _ in processes]
    for process in processes:
        process.join()
    there = ids_in(redis, keys)
    assert len(there) == len(set(there)) == 10_000
    assert sum(new) == 10_000
    assert min(new) > 0, "the two never met"


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "count",
    [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(240)])],
    ids=["1e4", "1e5"],
)
async def test_adds_that_are_given_up(
    count: int,
    server: Any,
    queue_name: str,
    keys: Keys,
    make_proxy: Callable[[str], Proxy],
):
    """Whoever gives up leaves no reply to the next one, no task and no connection behind."""
    dice = random.Random(4)
    failures: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    proxy = make_proxy(server.url)
    kept: dict[str, int] = {}
    given_up = 0
    with redis_py.Redis.from_url(server.url) as redis:
        async with Queue(queue_name, redis_url=proxy.url) as queue:
            await queue.is_paused()
            tasks_before = len(asyncio.all_tasks())

            async def call(n: int) -> None:
                kind = n % 10
                if kind < 7:
                    job = await queue.add("n", n)
                elif kind == 7:
                    job = await queue.add("n", n, delay_ms=600_000)
                elif kind == 8:
                    job = (await queue.add_bulk([{"name": "n", "data": n}]))[0]
                else:
                    job = await queue.add("n", n, job_id=f"mine-{n}")
                    assert job.id == f"mine-{n}"
                kept[job.id] = n

            numbers = itertools.count()
            while given_up < count:
                tasks = [asyncio.create_task(call(next(numbers))) for _ in range(100)]
                for _ in range(dice.randrange(1, 5)):  # all begun, some sent, some answered
                    await asyncio.sleep(0)
                for task in dice.sample(tasks, 80):
                    given_up += task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(one) for one in results} <= {type(None), asyncio.CancelledError}
            assert len(asyncio.all_tasks()) == tasks_before
            assert proxy.accepted == 1
            assert (await queue.add("n", "last")).is_new
        proxy.wait_for(lambda: not proxy._links)
        waiting = [fields[b"d"] for _, fields in redis.xrange(keys.stream)]
        delayed = [member[5:] for member in redis.zrange(keys.delayed, 0, -1)]
    there = {}
    for envelope in (*waiting, *delayed):
        job_id, payload, *_ = msgpack.unpackb(envelope)
        assert job_id not in there
        there[job_id] = msgpack.unpackb(payload)
    assert kept.items() <= there.items()
    assert len(kept) > count / 8
    assert failures == []


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
async def test_queues_leave_nothing_open(server: Any, queue_name: str):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with Queue(queue_name, redis_url=server.url) as queue:
        await queue.add("n", 1)
    before = open_files()
    for _ in range(20):
        async with Queue(queue_name, redis_url=server.url) as queue:
            await queue.add("n", 1)
        with sync.Queue(queue_name, redis_url=server.url) as blocking:
            blocking.add("n", 1)
    assert open_files() == before


@pytest.mark.parametrize("loops", LOOPS)
def test_an_add_that_an_event_loop_left_behind(
    loops: str, server: Any, queue_name: str, redis: redis_py.Redis, keys: Keys
):
    """It waits for its turn, which never comes; another loop's add must not wait with it."""
    queue = Queue(queue_name, redis_url=server.url)
    loop, other = LOOPS[loops](), LOOPS[loops]()
    try:
        loop.run_until_complete(queue.add("n", 0))

        async def add_and_stop() -> None:
            left.append(asyncio.ensure_future(queue.pause()))  # so that the add is not alone
            await asyncio.sleep(0)
            left.append(asyncio.ensure_future(queue.add("n", 1)))
            await asyncio.sleep(0)
            loop.stop()

        left: list[asyncio.Future[Any]] = []
        left.append(loop.create_task(add_and_stop()))
        loop.run_forever()
        with pytest.raises(RuntimeError, match="another event loop"):
            other.run_until_complete(asyncio.wait_for(queue.add("n", 2), 20))
        loop.run_until_complete(asyncio.gather(*left))
        loop.run_until_complete(queue.close())
        assert redis.xlen(keys.stream) == 2
    finally:
        loop.close()
        other.close()


@pytest.mark.fault(18)
async def test_a_stalled_server_bounds_what_single_adds_hold(
    server: Any, queue_name: str, make_proxy: Callable[[str], Proxy]
):
    """Those who do not get in wait with their data; no frame is made of it yet."""
    proxy = make_proxy(server.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        await queue.add("n", 0)
        proxy.stall()
        adds = [asyncio.create_task(queue.add("n", b"x" * 500_000)) for _ in range(200)]
        connection = queue._connection
        async with asyncio.timeout(20):
            while len(connection._waiters) < 150:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert connection._flow.unsent_bytes <= 10 << 20
        proxy.resume()
        await asyncio.gather(*adds)
        assert (await queue.counts()).waiting == 201
