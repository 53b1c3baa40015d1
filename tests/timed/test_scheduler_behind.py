"""A scheduler that is slower than its specs: it fires whole pages, never loses the last fire
time of a spec, and says how far it is behind."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chasqui.metrics import SchedulerTick
from chasqui.metrics.testing import InMemorySink
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import FIRED, Keys
from chasqui.queue import Queue
from chasqui.timed import leader, scheduler
from chasqui.timed.fire_calls import FIRES_PER_CALL
from chasqui.timed.fire_plan import plan_fires
from chasqui.timed.scheduler import SchedulerLoop
from chasqui.transport.connection import Connection
from tests.proxy import Proxy
from tests.servers import Server
from tests.timed.facts import (
    MINUTE_MS,
    MakeScheduler,
    Redis,
    fires,
    make_due,
    now_ms,
    score,
)

SPECS = 5
#: A round over the slow link takes longer than a spec's interval.
INTERVAL_MS, ROUND_TRIP_S = 50, 0.03
ROUNDS = 4


class SlowLink:
    """A connection to a server that is far away."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def submit(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(ROUND_TRIP_S)
        return await self._connection.submit(*arguments, **options)

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(ROUND_TRIP_S)
        return await self._connection.execute(*arguments, **options)


async def write(queue: Queue, count: int, interval_ms: int, **options: Any) -> list[str]:
    pattern = RepeatPattern.every(interval_ms)
    jobs = [
        await queue.upsert_repeatable_job("r", i, repeat=pattern, key=f"key-{i}", **options)
        for i in range(count)
    ]
    return [job.id for job in jobs]


async def rounds(loop: SchedulerLoop) -> list[int]:
    """How many jobs each of some rounds fires, when each finds every spec due twice or more."""
    loop.connection = SlowLink(loop.connection)  # type: ignore[assignment]
    await loop.run_once()
    counts = []
    for _ in range(ROUNDS):
        fired = await loop.run_once()
        assert fired is not None
        counts.append(fired.count)
    return counts


async def test_specs_that_are_due_again_before_their_round_fire_in_each_round(
    queue: Queue,
    make_scheduler: MakeScheduler,
    caplog: pytest.LogCaptureFixture,
):
    await write(queue, SPECS, INTERVAL_MS)
    metrics = InMemorySink()
    with caplog.at_level(logging.WARNING, "chasqui.timed.scheduler"):
        assert await rounds(make_scheduler(metrics=metrics)) == [SPECS] * ROUNDS
    last = metrics.all(SchedulerTick)[-1]
    assert (last.fired, last.late) == (SPECS, SPECS)
    assert last.lag_ms >= INTERVAL_MS
    (record,) = (one for one in caplog.records if one.name == "chasqui.timed.scheduler")
    assert f"is behind: {SPECS} specs fired up to" in record.getMessage()
    assert record.specs == SPECS


async def test_without_knowing_that_it_led_it_would_fire_none_of_them(
    queue: Queue, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
):
    def forgetful(*arguments: Any, led_since_ms: int) -> Any:
        return plan_fires(*arguments)

    monkeypatch.setattr(scheduler, "plan_fires", forgetful)
    await write(queue, SPECS, INTERVAL_MS)
    assert await rounds(make_scheduler()) == [0] * ROUNDS


@pytest.mark.parametrize("kind", ["every", "cron"])
async def test_of_the_fire_times_that_came_while_it_led_the_last_one_fires(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler, kind: str
):
    pattern = RepeatPattern.every(MINUTE_MS)
    if kind == "cron":
        pattern = RepeatPattern.cron("* * * * *")
    job = await queue.upsert_repeatable_job("r", 1, repeat=pattern)
    loop = make_scheduler()
    await loop.run_once()
    due_ms = (await now_ms(redis) // MINUTE_MS - 10) * MINUTE_MS
    for led_s, count in ((61 * 60, 1), (0, 0)):
        await redis("ZADD", keys.repeat, due_ms, job.id)
        loop.lock._since_s = leader.monotonic() - led_s
        fired = await loop.run_once()
        assert fired is not None
        assert fired.count == count
        next_ms = await score(redis, keys, job.id)
        assert next_ms is not None
        assert (next_ms - due_ms) // MINUTE_MS in (11, 12), "12 if a minute began meanwhile"
    assert await redis("HGET", keys.repeat_spec(job.id), FIRED) == b"1"


async def test_a_spec_that_was_written_since_the_last_look_is_not_late(
    keys: Keys, queue: Queue, redis: Redis, make_scheduler: MakeScheduler
):
    metrics = InMemorySink()
    loop = make_scheduler(metrics=metrics)
    await loop.run_once()
    loop.lock._since_s -= 60
    (key,) = await write(queue, 1, 10_000)
    for late in (0, 1):
        await make_due(redis, keys, key, ago_ms=2_000)
        await loop.run_once()
        assert metrics.all(SchedulerTick)[-1].late == late


async def test_a_page_of_specs_takes_one_call(
    server: Server,
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
):
    names = await write(queue, 600, 1_000_000)
    due_ms = await now_ms(redis)
    for name in names:
        await redis("ZADD", keys.repeat, due_ms, name)
    proxy = make_proxy(server.url)
    fired = await make_scheduler(url=proxy.url).run_once()
    assert fired is not None
    assert fired.count == 600
    assert Counter(await fires(redis, keys)) == Counter(range(600))
    calls = proxy.count("EVALSHA") + proxy.count("EVAL")
    assert calls <= 6, "the lock and three pages; each script may have to be sent"
    for name in names:
        assert await score(redis, keys, name) == due_ms + 1_000_000


async def test_a_page_of_long_catch_ups_is_split(
    server: Server,
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    make_proxy: Callable[[str], Proxy],
):
    policy = MissedFiresPolicy.fire_all(1000)
    for name in await write(queue, 5, 10, missed_fires=policy, limit=300):
        await make_due(redis, keys, name, ago_ms=10_000)
    proxy = make_proxy(server.url)
    fired = await make_scheduler(url=proxy.url).run_once()
    assert fired is not None
    assert fired.count == 1500
    assert Counter(await fires(redis, keys)) == dict.fromkeys(range(5), 300)
    assert proxy.count("EVALSHA") + proxy.count("EVAL") >= 1 + 1500 / FIRES_PER_CALL


async def test_the_lock_is_renewed_while_a_round_lasts_and_its_loss_ends_the_round(
    keys: Keys,
    queue: Queue,
    redis: Redis,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(leader, "_RENEW_SHARE", 0.0)
    names = await write(queue, 4, 1_000_000)
    for name in names:
        await make_due(redis, keys, name, ago_ms=0)
    loop = make_scheduler(batch=1)
    pages = 0
    fire_page = loop._fire_page

    async def counted(*arguments: Any) -> None:
        nonlocal pages
        pages += 1
        if pages == 3:
            await redis("SET", keys.scheduler_lock, "another", "EX", 1000)
        await fire_page(*arguments)

    monkeypatch.setattr(loop, "_fire_page", counted)
    fired = await loop.run_once()
    assert fired is not None
    assert fired.count == pages == 3
    assert not loop.lock.is_held
    assert await redis("ZCOUNT", keys.repeat, "-inf", await now_ms(redis)) == 1
