"""Links that fall silent, break at a byte or trickle: found out, replaced, nothing by halves."""

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chasqui import Job, Queue
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.model.keys import Keys
from chasqui.scripts import adding
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.sockets import TCP_USER_TIMEOUT_MS
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.crash.load import Seed
from tests.faults.careless import careless
from tests.ledger import Audit, Census, audit
from tests.proxy import Fault, Proxy
from tests.servers import Server

StartAt = Callable[..., Running]
MakeProxy = Callable[[str], Proxy]


#: Chunks are not known again: the bit was never set, the first answer never kept.
FORGETFUL = {
    "ADD": careless(adding.ADD, "GETBIT", "SETBIT", instead="return 0"),
    "ADD_MIXED": careless(adding.ADD_MIXED, "GET", instead="return false"),
}
MIXED = [{"name": "n", "data": {"n": 2}}, {"name": "n", "data": {"n": 3}, "delay_ms": 60_000}]


async def lose_replies(server: Server, proxy: Proxy, queue_name: str) -> Audit:
    """Adds of either script are done, and the link is reset before the answer."""
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        await queue.add("n", {"n": 0})  # each script is known when the fault comes
        await queue.add("n", {"n": 1}, delay_ms=60_000)
        proxy.fail(Fault.CUT_AFTER, "EVALSHA")
        await queue.add_bulk(MIXED)
        proxy.fail(Fault.CUT_AFTER, "EVALSHA")
        await queue.add("n", {"n": 4})
    assert proxy.accepted == 3
    return audit(range(5), [], Census.take(server.url, queue_name))


@pytest.mark.fault(14)
@pytest.mark.fault(16)
async def test_an_add_whose_reply_is_lost_happens_once(
    server: Server, make_proxy: MakeProxy, queue_name: str
) -> None:
    assert (await lose_replies(server, make_proxy(server.url), queue_name)).faults == {}


@pytest.mark.fault(14, control=True)
@pytest.mark.fault(16, control=True)
@pytest.mark.parametrize(("script", "doubled"), [("ADD", {4}), ("ADD_MIXED", {2})])
async def test_a_chunk_that_is_not_known_again_is_added_twice(
    server: Server,
    make_proxy: MakeProxy,
    queue_name: str,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    doubled: set[int],
) -> None:
    monkeypatch.setattr(adding, script, FORGETFUL[script])
    found = await lose_replies(server, make_proxy(server.url), queue_name)
    assert found.faults == {"doubled": doubled}


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
    monkeypatch.setattr("chasqui.consuming.reader.READ_SLACK_S", 0.5)  # 5 s, else
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
    monkeypatch.setattr("chasqui.consuming.reader.READ_SLACK_S", 1000.0)
    proxy = make_proxy(server.url)
    with pytest.raises(TimeoutError):
        await fall_silent(server, proxy, queue_name, start_at, redis_at(server.url), 2)


@pytest.mark.fault(15)
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
async def test_the_system_is_told_when_to_give_up_a_peer_that_is_gone(
    server: Server,
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
) -> None:
    """What is sent and never acknowledged: no proxy can play that."""
    connection, blocking = connect(server.url), connect_blocking(server.url)
    await connection.connect()
    blocking.connect()
    one, other = connection._flow.link, blocking._state().link
    assert one is not None
    assert other is not None
    for link in (one._transport.get_extra_info("socket"), other._sock):
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        after_ms = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert after_ms == TCP_USER_TIMEOUT_MS


# ── Cuts ────────────────────────────────────────────────────────────────────────────────────────


async def cut_adds(
    server: Server, proxy: Proxy, queue_name: str, options: dict[str, Any]
) -> dict[str, set[int]]:
    """An add cut at each of its bytes in turn; what is wrong then."""
    numbers = itertools.count(1000)  # all of the same length
    sizes = []
    for _ in range(2):  # the first carries its script
        async with Queue(queue_name, redis_url=proxy.url) as queue:
            await queue.is_paused()
            before = proxy.bytes_in
            await queue.add("n", {"n": next(numbers)}, **options)
            sizes.append(proxy.bytes_in - before)
    size = sizes[-1]
    for cut_at in range(size + 1):
        async with Queue(queue_name, redis_url=proxy.url) as queue:
            await queue.is_paused()
            if cut_at < size:
                proxy.cut_after_bytes(cut_at, to_server=True)
            else:  # behind the last one, and before the answer comes
                proxy.fail(Fault.CUT_AFTER, "EVALSHA")
            await queue.add("n", {"n": next(numbers)}, **options)
    assert not proxy.disarm(), "each add was cut"
    print(f"cut at each of {size} bytes")
    return audit(range(1000, next(numbers)), [], Census.take(server.url, queue_name)).faults


@pytest.mark.fault(17)
@pytest.mark.parametrize("options", [{}, {"delay_ms": 60_000}], ids=["now", "delayed"])
async def test_an_add_cut_at_every_byte(
    server: Server, make_proxy: MakeProxy, queue_name: str, options: dict[str, Any]
) -> None:
    assert await cut_adds(server, make_proxy(server.url), queue_name, options) == {}


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
async def test_a_job_that_was_added_before_the_cut_is_added_again(
    server: Server, make_proxy: MakeProxy, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all places there is one behind the last byte, where the server did what it was told."""
    monkeypatch.setattr(adding, "ADD", FORGETFUL["ADD"])
    wrong = await cut_adds(server, make_proxy(server.url), queue_name, {})
    assert [*wrong] == ["doubled"]


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
    async with Queue(queue_name, redis_url=proxy.url, request_timeout_s=2) as queue:
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
            except (OutcomeUnknownError, UnreachableError):
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
    transport: Any = connection._flow.link and connection._flow.link._transport
    held = connection._flow.unsent_bytes + transport.get_write_buffer_size()
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
