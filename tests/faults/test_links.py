"""Links that fall silent, break at a byte or trickle: found out, replaced, nothing by halves."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from chasqui import Job, Queue
from chasqui.connection import Connection
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.request import Effect, commands
from tests.crash.broken import BrokenWorker
from tests.crash.load import Seed
from tests.integration.consuming.conftest import Redis, Running, at_rest, envelope, until
from tests.ledger import Census, audit
from tests.proxy import Fault, Proxy
from tests.servers import Server

StartAt = Callable[..., Running]
MakeProxy = Callable[[str], Proxy]


def sent_twice(server: Server, proxy: Proxy, queue_name: str) -> set[int]:
    """A producer that sends a job again when its link breaks, as it came; the jobs doubled."""
    keys = Keys(queue_name)
    retry = Retry(NoBackoff(), 1, supported_errors=(redis_py.ConnectionError,))
    with redis_py.Redis(port=proxy.port, retry=retry) as client:
        client.ping()
        proxy.fail(Fault.CUT_AFTER, "XADD")
        client.xadd(keys.stream, {ENVELOPE: envelope({"n": 0})})
    return audit([0], [], Census.take(server.url, queue_name)).doubled


@pytest.mark.fault(14, control=True)
@pytest.mark.fault(16, control=True)
def test_a_producer_that_just_sends_again(
    server: Server, make_proxy: MakeProxy, queue_name: str
) -> None:
    assert sent_twice(server, make_proxy(server.url), queue_name) == {0}


# ── Silence ─────────────────────────────────────────────────────────────────────────────────────


async def fall_silent(
    server: Server, proxy: Proxy, queue_name: str, start_at: StartAt, redis: Redis, limit_s: float
) -> None:
    """The links of a worker are dead and nobody says so, while a job arrives."""
    runs: Counter[int] = Counter()

    async def handler(job: Job) -> None:
        runs[job.data] += 1

    async with Queue(queue_name, redis_url=server.url) as queue:
        running = start_at(proxy.url, handler, read_block_ms=200, claim_min_idle_ms=2000)
        await queue.add("n", 0)
        await running.completed(1)
        keys = Keys(queue_name)
        await until(lambda: at_rest(redis, keys), "it is acknowledged")
        proxy.silence()
        await queue.add("n", 1)
        try:
            async with asyncio.timeout(limit_s):
                await running.completed(2)
            await until(lambda: at_rest(redis, keys), "it is acknowledged too")
        finally:
            proxy.cut()
    assert runs == {0: 1, 1: 1}


@pytest.mark.fault(15)
async def test_a_link_that_falls_silent_is_replaced(
    server: Server,
    make_proxy: MakeProxy,
    queue_name: str,
    start_at: StartAt,
    redis_at: Callable[[str], Redis],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chasqui.consumer.reader.READ_SLACK_S", 0.5)  # 5 s, else
    proxy = make_proxy(server.url)
    await fall_silent(server, proxy, queue_name, start_at, redis_at(server.url), 20)


@pytest.mark.fault(15, control=True)
async def test_without_a_deadline_nobody_notices(
    server: Server,
    make_proxy: MakeProxy,
    queue_name: str,
    start_at: StartAt,
    redis_at: Callable[[str], Redis],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chasqui.consumer.reader.READ_SLACK_S", 1000.0)
    proxy = make_proxy(server.url)
    with pytest.raises(TimeoutError):
        await fall_silent(server, proxy, queue_name, start_at, redis_at(server.url), 2)


# ── Cuts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(17)
@pytest.mark.parametrize("options", [{}, {"delay_ms": 60_000}], ids=["now", "delayed"])
async def test_an_add_cut_at_every_byte(
    server: Server, make_proxy: MakeProxy, queue_name: str, options: dict[str, Any]
) -> None:
    proxy = make_proxy(server.url)
    sizes = []
    for n in range(2):  # the first carries its script
        async with Queue(queue_name, redis_url=proxy.url) as queue:
            await queue.is_paused()
            before = proxy.bytes_in
            await queue.add("n", {"n": n}, **options)
            sizes.append(proxy.bytes_in - before)
    size = sizes[-1]
    for cut_at in range(size + 1):
        async with Queue(queue_name, redis_url=proxy.url) as queue:
            await queue.is_paused()
            proxy.cut_after_bytes(cut_at, to_server=True)
            await queue.add("n", {"n": 2 + cut_at}, **options)
    print(f"cut at each of {size} bytes")
    assert audit(range(size + 3), [], Census.take(server.url, queue_name)).faults == {}


@pytest.mark.fault(17)
async def test_a_worker_cut_at_any_byte(
    server: Server,
    make_proxy: MakeProxy,
    queue_name: str,
    start_at: StartAt,
    redis_at: Callable[[str], Redis],
) -> None:
    """Its reads, acks, retries and events, wherever the seed lets the cut fall."""
    seed = Seed()
    runs: Counter[int] = Counter()

    async def handler(job: Job) -> None:
        runs[job.data] += 1
        if job.attempt == 0:
            raise ValueError("once")

    proxy, redis, keys = make_proxy(server.url), redis_at(server.url), Keys(queue_name)
    async with Queue(queue_name, redis_url=server.url) as queue:
        running = start_at(proxy.url, handler)
        for n in range(7):
            if n:  # a worker that never reached its server says so and ends
                proxy.cut_after_bytes(seed.random.randrange(1500), to_server=True)
            await queue.add("n", n, attempts=3, backoff=1)
            await running.completed(n + 1)
            await until(lambda: at_rest(redis, keys), "it is acknowledged")
    assert runs == dict.fromkeys(range(7), 2)


@pytest.mark.fault(17, control=True)
def test_two_commands_where_one_script_should_be(
    server: Server, make_proxy: MakeProxy, queue_name: str, tmp_path: Path
) -> None:
    """The job is in both places when the link breaks between them."""
    proxy = make_proxy(server.url)
    with redis_py.Redis.from_url(server.url) as client:
        client.xadd(Keys(queue_name).stream, {ENVELOPE: envelope({"n": 0})})
    broken = BrokenWorker(proxy.url, queue_name, tmp_path, "broken")
    ((entry_id, found),) = broken.take()
    stream, dlq = broken.keys.stream, broken.keys.dlq
    with broken.client.pipeline(transaction=False) as pipeline:
        pipeline.xadd(dlq, {ENVELOPE: found})
        pipeline.xack(stream, DEFAULT_GROUP, entry_id)
        pipeline.xdel(stream, entry_id)
        proxy.fail(Fault.CUT_BEFORE, "XACK")
        with pytest.raises(redis_py.ConnectionError):
            pipeline.execute()
    assert audit([0], [], Census.take(server.url, queue_name)).doubled == {0}


# ── Slowness ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(18)
async def test_work_gets_done_over_a_trickle(
    server: Server,
    make_proxy: MakeProxy,
    queue_name: str,
    start_at: StartAt,
    redis_at: Callable[[str], Redis],
) -> None:
    """16 bytes at a time, with a pause after each: nothing is sent twice out of impatience."""
    runs: Counter[int] = Counter()

    async def handler(job: Job) -> None:
        runs[job.data] += 1

    proxy, redis, keys = make_proxy(server.url), redis_at(server.url), Keys(queue_name)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        running = start_at(proxy.url, handler)
        await queue.add("n", 0)
        await running.completed(1)
        links, seen = proxy.accepted, len(proxy.commands)
        proxy.piece_bytes, proxy.delay_s = 16, 0.001
        await queue.add_bulk([{"name": "n", "data": n} for n in range(1, 20)])
        await running.completed(20)
        await until(lambda: at_rest(redis, keys), "all is acknowledged")
        proxy.piece_bytes, proxy.delay_s = 1 << 20, 0.0
        assert len(proxy.commands) - seen < 200, "no busy loop"
        assert proxy.accepted <= links + 2, "no link was given up"
    assert runs == dict.fromkeys(range(20), 1)


@pytest.mark.fault(18)
async def test_a_deadline_holds_over_a_trickle(
    server: Server, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    async with Queue(queue_name, redis_url=proxy.url, request_timeout_s=0.5) as queue:
        await queue.add("n", 0)
        proxy.piece_bytes, proxy.delay_s = 1, 0.05
        with pytest.raises((OutcomeUnknownError, UnreachableError)):
            await queue.add("n", "x" * 1000)
        proxy.piece_bytes, proxy.delay_s = 1 << 20, 0.0
        proxy.cut()
        while True:  # dials are spaced out by now
            try:
                await queue.add("n", 2)
                break
            except ConnectionError:
                continue


async def flood(connection: Connection, proxy: Proxy) -> None:
    """Twenty megabytes for a server that takes nothing: what is held of them is bounded."""
    await connection.connect()
    proxy.stall()
    body, made = "x" * 100_000, 0

    def plan() -> Any:
        nonlocal made
        made += 1
        yield commands(("ECHO", body), effect=Effect.READ)

    calls = [asyncio.ensure_future(connection.run(plan())) for _ in range(200)]

    async def all_made() -> bool:
        return made == len(calls)

    await until(all_made, "all are under way")
    transport: Any = connection._link and connection._link._transport
    held = connection._unsent_bytes + transport.get_write_buffer_size()
    proxy.resume()
    await asyncio.gather(*calls)
    assert held <= 10 * 1024 * 1024


@pytest.mark.fault(18)
async def test_what_waits_for_a_slow_server_is_bounded(
    server: Server, make_proxy: MakeProxy, connect: Callable[..., Connection]
) -> None:
    proxy = make_proxy(server.url)
    await flood(connect(proxy.url), proxy)


@pytest.mark.fault(18, control=True)
async def test_without_waiting_for_room_it_is_not(
    server: Server,
    make_proxy: MakeProxy,
    connect: Callable[..., Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Connection, "is_congested", False)
    proxy = make_proxy(server.url)
    with pytest.raises(AssertionError):
        await flood(connect(proxy.url), proxy)
