"""Reading through everything that may happen to a queue while a worker waits for it."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job, NotSupportedError
from chasqui.metrics import ReaderBatch
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.transport.recovery import SharedDialPacing
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.proxy import Proxy
from tests.servers import KINDS, Server

Start = Callable[..., Running]


async def fine(job: Job) -> None:
    pass


async def test_the_group_begins_at_the_first_job(queue: Queue, start: Start) -> None:
    await queue.add_bulk([{"name": "n", "data": i} for i in range(10)])
    running = start(fine)
    await running.completed(10)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param("XGROUP DESTROY", marks=pytest.mark.fault(25)),
        pytest.param("DEL", marks=pytest.mark.fault(24)),
    ],
)
@pytest.mark.both_loops
async def test_reading_recovers_by_itself(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    harm: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "chasqui")
    running = start(fine)
    for i in range(3):
        await queue.add("n", i)
        await running.completed(i + 1)
        # The read is blocked again by now, or about to be: both must do.
        await redis(*harm.split(), keys.stream, *(["default"] if "GROUP" in harm else []))
    await queue.add("n", "last")
    await running.completed(4)
    assert len(caplog.records) < 20, "no hot loop"


@pytest.mark.fault(24)
@pytest.mark.parametrize("kind", KINDS)
async def test_flushall_while_blocked(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
) -> None:
    server = private_server(kind)
    redis = redis_at(server.url)
    async with Queue(queue_name, redis_url=server.url) as queue:
        running = start_at(server.url, fine)
        await queue.add("n", 1)
        await running.completed(1)
        await redis("FLUSHALL")
        await redis("SCRIPT", "FLUSH")
        await queue.add("n", 2)
        await running.completed(2)


@pytest.mark.fault(25)
async def test_a_destroyed_group_does_not_run_what_is_running(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    gate = asyncio.Event()
    begun: list[int] = []

    async def handler(job: Job) -> None:
        begun.append(job.data)
        if job.data < 5:
            await gate.wait()

    running = start(handler, claim_min_idle_ms=60_000)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(5)])

    async def all_run() -> bool:
        return len(begun) == 5

    await until(all_run, "five run")
    await redis("XGROUP", "DESTROY", keys.stream, "default")
    await queue.add("n", 5)
    await running.completed(1)
    gate.set()
    await running.completed(6)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert sorted(begun) == [0, 1, 2, 3, 4, 5], "each ran once"


@pytest.mark.slow
@pytest.mark.fault(6)
async def test_all_links_of_a_worker_together_dial_five_times_a_second(
    redis_86: Server,
    make_proxy: Callable[[str], Proxy],
    start_at: Start,
    queue_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dials_s: list[float] = []
    dialling = SharedDialPacing.dialling

    def note(self: SharedDialPacing, now_s: float) -> None:
        dials_s.append(now_s)
        dialling(self, now_s)

    monkeypatch.setattr(SharedDialPacing, "dialling", note)
    proxy = make_proxy(redis_86.url)
    # A short lease, so that the heartbeat dials too.
    running = start_at(proxy.url, fine, claim_min_idle_ms=300)
    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        await queue.add("n", 0)
        await running.completed(1)
        proxy.is_refusing = True
        proxy.cut()
        dials_s.clear()

        async def has_dialled() -> bool:
            return len(dials_s) > 6

        await until(has_dialled, "the server is searched for")
        proxy.is_refusing = False
        times_s = sorted(dials_s)
        # A race between the loop and the heartbeat's thread costs one more.
        assert all(
            after - before > 0.95 for before, after in zip(times_s, times_s[6:], strict=False)
        )
        await queue.add("n", 1)
        await running.completed(2)


@pytest.mark.fault(28)
@pytest.mark.slow
async def test_a_stream_of_another_type_is_said_at_most_once_a_second(
    queue: Queue, start: Start, redis: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    await redis("SET", keys.stream, "no stream")
    running = start(fine)

    def said_s() -> list[float]:
        found = [one for one in caplog.records if "cannot be read" in one.getMessage()]
        return [one.created for one in found]

    async def has_complained() -> bool:
        return len(said_s()) > 1

    await until(has_complained, "it is said again")
    times_s = said_s()
    assert all(after - before > 0.95 for before, after in itertools.pairwise(times_s))
    await redis("DEL", keys.stream)
    await queue.add("n", 1)
    await running.completed(1)


@pytest.mark.fault(23)
@pytest.mark.parametrize("kind", KINDS)
async def test_scripts_may_be_flushed_at_any_time(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    keys: Keys,
) -> None:
    server = private_server(kind)
    redis = redis_at(server.url)

    async def handler(job: Job) -> Any:
        if job.data % 5 == 0 and job.attempt == 0:
            raise ValueError
        await asyncio.sleep(0.002)
        return job.data

    async def flush_for_ever() -> None:
        while True:
            await redis("SCRIPT", "FLUSH")
            await asyncio.sleep(0.05)

    flushing = asyncio.ensure_future(flush_for_ever())
    async with Queue(queue_name, redis_url=server.url) as queue:
        running = start_at(server.url, handler, store_results=True, concurrency=10)
        await queue.add_bulk([{"name": "n", "data": i} for i in range(500)])
        await running.completed(500)
        await until(lambda: at_rest(redis, keys), "all is done")
    flushing.cancel()


# ── Pause ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_pause_counts_at_once_and_costs_no_delivery(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running = start(fine, read_block_ms=5000)
    await queue.add("n", 0)
    await running.completed(1)
    await queue.pause()  # while the read is blocked
    entries = await queue.add_bulk([{"name": "n", "data": i} for i in range(3)])
    assert len(entries) == 3

    async def handed_back() -> list[Any] | None:
        pending = await redis("XPENDING", keys.stream, "default", "-", "+", 10)
        waits = [one for one in pending if one[2] >= 864_000_000]
        delivered = len(pending)
        return waits if waits and len(waits) == delivered else None

    for _, _, _, deliveries in await until(handed_back, "what came in is handed back"):
        assert deliveries == 0
    assert running.metrics.jobs_completed == 1
    await queue.resume()
    await running.completed(4)
    await until(lambda: at_rest(redis, keys), "all is done")


async def test_a_worker_that_starts_during_a_pause_waits(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    await queue.add("n", 0)
    await queue.pause()
    running = start(fine)

    async def is_there() -> bool:
        try:
            return bool(await redis("XINFO", "CONSUMERS", keys.stream, "default"))
        except Exception:
            return False

    await until(is_there, "the worker has come")
    assert running.metrics.jobs_completed == 0
    await queue.resume()
    await running.completed(1)


# ── Destinations that cannot be written ─────────────────────────────────────────────────────────


@pytest.mark.fault(28)
@pytest.mark.parametrize("key", ["delayed", "dlq"])
async def test_nothing_leaves_the_stream_before_its_copy_is_made(
    queue: Queue, start: Start, redis: Redis, keys: Keys, key: str
) -> None:
    async def handler(job: Job) -> None:
        raise ValueError

    broken = getattr(keys, key)
    await redis("SET", broken, "wrong type")
    running = start(handler, delayed_enabled=False)
    attempts = 1 if key == "dlq" else 5
    added = await queue.add_bulk([{"name": "n", "data": i, "attempts": attempts} for i in range(5)])

    async def all_tried() -> bool:
        health = running.worker.health()
        return health is not None and health.moves_waiting == 5

    await until(all_tried, "the moves are refused")
    assert await redis("XLEN", keys.stream) == 5
    assert (await redis("XPENDING", keys.stream, "default"))[0] == 5
    await redis("DEL", broken)
    if key == "dlq":
        await running.buried(5)
    else:
        await running.retried(5)
    assert await redis("XLEN", keys.stream) == 0
    assert len(added) == 5


@pytest.mark.fault(29)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_read_brought_that_was_refused_in_part_runs_without_waiting_for_a_lease(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    keys: Keys,
) -> None:
    """It delivers a job; the question behind it, whether there is a pause, may not be asked."""
    server = private_server(kind)
    redis = redis_at(server.url)
    prefix = f"~{{chasqui:{queue_name}}}:"
    user = ("ACL", "SETUSER", "hindered")
    await redis(*user, "on", ">secret", "+@all", "-@dangerous", "+info", prefix + "*")
    url = server.url.replace("redis://", "redis://hindered:secret@")
    options = {"delayed_enabled": False, "run_scheduler": False, "read_block_ms": 50}
    async with Queue(queue_name, redis_url=server.url) as queue:
        running = start_at(url, fine, claim_min_idle_ms=120_000, **options)
        await queue.add("n", 1)
        await running.completed(1)
        await until(lambda: at_rest(redis, keys), "it is acknowledged")
        # One that comes while the rights change may still be read as a whole.
        while (await redis("XPENDING", keys.stream, "default"))[0] == 0:
            await redis(*user, "resetkeys", prefix + "stream", prefix + "events")
            await queue.add("n", 2)
        await redis(*user, prefix + "*")
        await until(lambda: at_rest(redis, keys), "what was delivered has run")


# ── How much ────────────────────────────────────────────────────────────────────────────────────


async def test_prefetch_is_bounded_while_handlers_are_slow(queue: Queue, start: Start) -> None:
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        await gate.wait()

    await queue.add_bulk([{"name": "n", "data": i} for i in range(2000)])
    running = start(handler, concurrency=10)

    async def all_busy() -> bool:
        health = running.worker.health()
        return health is not None and health.running == 10

    await until(all_busy, "all slots are busy")
    await running.next(ReaderBatch)
    assert running.metrics.total_read <= 10 + 32 + 10
    gate.set()
    await running.completed(2000)
    assert max(batch.size for batch in running.metrics.all(ReaderBatch)) <= 1000


@pytest.mark.slow
async def test_large_payloads_are_prefetched_by_their_size(
    redis_86: Server, queue_name: str, start_at: Callable[..., Running]
) -> None:
    sizes: list[int] = []

    async def handler(job: Job) -> None:
        sizes.append(len(job.data))
        await asyncio.sleep(0)

    async with Queue(queue_name, redis_url=redis_86.url) as queue:
        data = b"x" * 1_000_000
        for _ in range(12):
            await queue.add_bulk([{"name": "n", "data": data}] * 10)
        running = start_at(redis_86.url, handler, concurrency=200)
        await running.completed(120)
    batches = [batch.size for batch in running.metrics.all(ReaderBatch)]
    assert max(batches) <= 33, "32 MB are enough in hand"
    assert sizes == [1_000_000] * 120


async def test_read_count_bounds_each_read(queue: Queue, start: Start) -> None:
    await queue.add_bulk([{"name": "n", "data": i} for i in range(100)])
    running = start(fine, read_count=7)
    await running.completed(100)
    assert max(batch.size for batch in running.metrics.all(ReaderBatch)) <= 7


@pytest.mark.slow
async def test_orphans_are_taken_over_without_delay_between_them(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    await queue.add_bulk([{"name": "n", "data": i} for i in range(1000)])
    await redis("XGROUP", "CREATE", keys.stream, "default", "0")
    await redis(
        "XREADGROUP", "GROUP", "default", "dead", "COUNT", 1000, "STREAMS", keys.stream, ">"
    )
    running = start(fine, claim_min_idle_ms=1000)
    await running.completed(1000)
    assert running.metrics.total_reclaimed == 1000
    await until(lambda: at_rest(redis, keys), "all is done")


async def test_a_group_of_another_name_reads(queue: Queue, start: Start) -> None:
    running = start(fine, group="other")
    await queue.add("n", None)
    await running.completed(1)


async def test_a_second_group_is_refused(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """What one has done is gone for the other: each would lose jobs to it."""
    first = start(fine)
    await queue.add("n", None)
    await first.completed(1)
    others = [start(fine, group=f"group-{n}") for n in range(3)]
    for other in others:
        with pytest.raises(NotSupportedError, match=r"has the group 'default'.*DESTROY"):
            await other.task
    groups = await redis("XINFO", "GROUPS", keys.stream)
    assert [facts[b"name"] for facts in groups] == [b"default"]
    again = start(fine)
    await first.stop()
    await queue.add("n", None)
    await again.completed(1)


async def test_of_groups_that_come_at_once_one_is_made(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    started = [start(fine, group=f"group-{n}") for n in range(5)]
    await queue.add("n", None)
    tasks = {one.task for one in started}
    while len(tasks) > 1:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {type(task.exception()) for task in done} == {NotSupportedError}
    assert len(await redis("XINFO", "GROUPS", keys.stream)) == 1

    async def is_done() -> bool:
        return bool(await redis("XLEN", keys.stream) == 0)

    await until(is_done, "the one that is there has run it")
