"""Leaders that are not: what promoter and scheduler would do without what protects them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import RepeatPattern, sync
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import timing
from chasqui.scripts.loading import call
from chasqui.timed.leader import LeaderLock
from chasqui.timed.promoter import PromoterLoop
from chasqui.timed.scheduler import SchedulerLoop
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.consuming.conftest import Redis
from tests.faults.careless import careless
from tests.ledger import Census, audit
from tests.servers import Server

COUNT = 20


def delayed(url: str, queue_name: str) -> None:
    """Put jobs there that are due."""
    jobs = [{"name": "quick", "data": {"n": n}, "delay_ms": 1} for n in range(COUNT)]
    with sync.Queue(queue_name, redis_url=url) as queue:
        queue.add_bulk(jobs)


async def promote_together(
    url: str, queue_name: str, keys: Keys, connect: Callable[..., Connection]
) -> dict[str, set[int]]:
    """Three promoters that all believe to lead promote what is due, and look once more; what is
    wrong then."""
    delayed(url, queue_name)
    loops = [PromoterLoop(keys, connect(url), connect(url)) for _ in range(3)]
    while len(Census.take(url, queue_name).stream) < COUNT:
        await asyncio.gather(*(loop._promote() for loop in loops))
    await asyncio.gather(*(loop._promote() for loop in loops))
    return audit(range(COUNT), [], Census.take(url, queue_name)).faults


@pytest.mark.fault(32)
async def test_promoters_that_all_believe_to_lead_promote_each_job_once(
    server: Server, queue_name: str, keys: Keys, connect: Callable[..., Connection]
) -> None:
    assert await promote_together(server.url, queue_name, keys, connect) == {}


@pytest.mark.fault(32, control=True)
async def test_without_taking_what_they_add_they_promote_it_again(
    server: Server,
    queue_name: str,
    keys: Keys,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that was stopped between the two steps, if they were two."""
    monkeypatch.setattr(timing, "PROMOTE", careless(timing.PROMOTE, "ZREM", instead="return 0"))
    wrong = await promote_together(server.url, queue_name, keys, connect)
    assert wrong == {"doubled": set(range(COUNT))}


async def fire_twice(
    redis: Redis, queue: Queue, keys: Keys, loop: SchedulerLoop, script: Any
) -> int:
    """A scheduler computes a fire, is stopped, another one fires, and it goes on; fires in all."""
    job = await queue.upsert_repeatable_job("r", {"n": 1}, repeat=RepeatPattern.every(90_000))
    seconds, micros = await redis("TIME")
    due_ms = int(seconds) * 1000 + int(micros) // 1000
    await redis("ZADD", keys.repeat, due_ms, job.id)
    names = [keys.stream, keys.delayed, keys.repeat, keys.wake, keys.repeat_spec(job.id)]
    arguments = ["", job.id, due_ms, due_ms + 90_000, "r", 1, due_ms, b"envelope"]
    stopped = call(script, names, arguments, Effect.IDEMPOTENT)
    await loop.run_once()
    await loop.connection.submit(stopped)
    return int(await redis("XLEN", keys.stream))


@pytest.mark.fault(33)
async def test_a_scheduler_that_was_stopped_before_its_fire_fires_nothing(
    server: Server, redis: Redis, queue: Queue, keys: Keys, connect: Callable[..., Connection]
) -> None:
    loop = SchedulerLoop(keys, connect(server.url), connect(server.url))
    assert await fire_twice(redis, queue, keys, loop, timing.FIRE) == 1


@pytest.mark.fault(33, control=True)
async def test_without_comparing_scores_the_fire_time_fires_twice(
    server: Server,
    redis: Redis,
    queue: Queue,
    keys: Keys,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = b"math.floor(tonumber(score)) ~= tonumber(argv[i + 1])"
    assert compare in timing.FIRE.source
    source = timing.FIRE.source.replace(compare, b"false")
    careless = type(timing.FIRE)("fire", source, b"0" * 40)  # unknown, so it is sent whole
    loop = SchedulerLoop(keys, connect(server.url), connect(server.url))
    assert await fire_twice(redis, queue, keys, loop, careless) == 2


#: Each step has as long, and the first has to find the script missing: room for a busy machine.
TTL_S = 2


async def takes_over(connection: Connection, key: bytes) -> bool:
    """Whether another one leads as soon as the leader's lock should be over."""
    heir = LeaderLock(key, "heir", ttl_s=TTL_S)
    for _ in range(6):
        if await heir.hold(connection):
            return True
        await asyncio.sleep(heir.next_step_s)
    return False


@pytest.mark.fault(34)
async def test_the_lock_of_a_dead_leader_ends(
    server: Server, keys: Keys, connect: Callable[..., Connection]
) -> None:
    connection = connect(server.url)
    assert await LeaderLock(keys.promoter_lock, "dead", ttl_s=TTL_S).hold(connection)
    assert await takes_over(connection, keys.promoter_lock)


@pytest.mark.fault(34, control=True)
async def test_a_lock_without_an_end_goes_to_nobody(
    server: Server,
    keys: Keys,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = careless(timing.LEASE_TAKE, "SET", instead="return ask(name, key, a)")
    monkeypatch.setattr(timing, "LEASE_TAKE", endless)
    connection = connect(server.url)
    assert await LeaderLock(keys.promoter_lock, "dead", ttl_s=TTL_S).hold(connection)
    assert not await takes_over(connection, keys.promoter_lock)
