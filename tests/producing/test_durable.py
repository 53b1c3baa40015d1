"""Adds that wait for the disk or a replica."""

import asyncio
import os
import signal
import threading
import tracemalloc
import types
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis as redis_py

from chasqui import sync
from chasqui.errors import NotSupportedError, OutcomeUnknownError, QueueFullError
from chasqui.model.keys import Keys
from chasqui.producing.chunks import ChunkEncoder
from chasqui.queue import Queue
from chasqui.transport.request import Request
from tests.crash.conftest import eventually
from tests.fixtures import until
from tests.proxy import WAIT_S, Fault, Proxy
from tests.servers import Server


async def test_durable_needs_a_server_that_can(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
):
    for durable in (True, "disk", "replica"):
        queue = make_queue(durable=durable)
        for options in ({}, {"job_id": "x"}, {"delay_ms": 5}):
            with pytest.raises(NotSupportedError, match="durable="):
                await queue.add("n", 1, **options)
    assert redis.exists(keys.stream, keys.delayed) == 0


@pytest.mark.fault(6)
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_on_disk(
    kind: str, private_server: Callable[..., Server], queue_at: Callable[..., Any], keys: Keys
):
    server = private_server(kind, appendonly="yes", appendfsync="always")
    queue = queue_at(server.url, durable="disk")
    await queue.add("n", 1)
    await queue.add("n", 1, job_id="x")
    await queue.add_bulk([{"name": "n", "data": n} for n in range(600)])
    await queue.add_bulk([{"name": "n", "data": n, "delay_ms": 90_000} for n in range(600)])
    server.kill()
    server.start()
    with redis_py.Redis.from_url(server.url) as redis:
        assert (redis.xlen(keys.stream), redis.zcard(keys.delayed)) == (602, 600)


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_the_disk_is_waited_for_behind_every_chunk(
    kind: str,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
):
    """Also when the server has forgotten the script: chunks sent again must not be behind it."""
    server = private_server(kind, appendonly="yes")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable="disk")
    await queue.add("n", 1)
    with redis_py.Redis.from_url(server.url) as redis:
        redis.script_flush()
    before = len(proxy.commands)
    await queue.add_bulk([{"name": "n", "data": n} for n in range(1000)])
    sent = proxy.commands[before:]
    assert sent.count(b"EVALSHA") == 3
    assert sent.count(b"EVAL") >= 2, "at least the first that was unknown, and the last"
    assert sent[-3:] == [b"EVAL", b"WAITAOF", b"GETBIT"]
    assert sent.count(b"WAITAOF") == 1


@pytest.fixture(params=["redis-8.6", "redis-6.2", "valkey-9"])
def pair(
    request: pytest.FixtureRequest, private_server: Callable[..., Server]
) -> tuple[Server, Server]:
    """A primary, and a replica that is in step with it."""
    primary = private_server(request.param, repl_diskless_sync_delay="0")
    replica = private_server(request.param)
    with redis_py.Redis.from_url(replica.url) as copy:
        copy.replicaof("127.0.0.1", primary.port)
        eventually(lambda: copy.info("replication")["master_link_status"] == "up", "it is in step")
    with redis_py.Redis.from_url(primary.url) as main:
        eventually(lambda: main.wait(1, 100) == 1, "its primary knows that")
    return primary, replica


@pytest.mark.fault(10)
@pytest.mark.slow
async def test_on_a_replica(pair: tuple[Server, Server], queue_at: Callable[..., Any], keys: Keys):
    primary, replica = pair
    queue = queue_at(primary.url, durable="replica")
    await queue.add("n", 1)
    await queue.add_bulk([{"name": "n", "data": n} for n in range(600)])
    with redis_py.Redis.from_url(replica.url) as copy:
        assert copy.xlen(keys.stream) == 601


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_adds_at_once_share_their_waits(
    kind: str,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    keys: Keys,
):
    server = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable="disk")
    await queue.add("n", 0)
    before = proxy.count("WAITAOF")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(30))
    proxy.stall()  # until all of them are there: threads come one after the other
    adds = [asyncio.create_task(queue.add("n", n)) for n in range(20)]
    adds += [asyncio.create_task(queue.add("n", n, job_id=f"id-{n}")) for n in range(5)]
    await until(lambda: handed_over(queue) >= len(adds))
    # Its last chunk is in line when the others are answered.
    bulk = asyncio.create_task(queue.add_bulk([{"name": "n", "data": 1}] * 600))
    proxy.resume()
    jobs = await asyncio.gather(*adds)
    await bulk
    assert proxy.count("WAITAOF") - before <= 3
    assert all(job.is_new for job in jobs)
    with redis_py.Redis.from_url(server.url) as redis:
        assert redis.xlen(keys.stream) == 626


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
@pytest.mark.parametrize("options", [{}, {"delay_ms": 90_000}], ids=["now", "later"])
def test_threads_that_begin_at_once_are_not_taken_for_one_another(
    options: dict[str, Any],
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each draws an id for the producer before the other has one, and a number before the other
    makes its chunk."""
    server = private_server(kind, appendonly="yes", appendfsync="always")
    drawing, making = threading.Barrier(2), threading.Barrier(2)

    def uuid4() -> uuid.UUID:
        drawing.wait(WAIT_S)
        return uuid.uuid4()

    def mark(*arguments: Any) -> Request:
        making.wait(WAIT_S)
        return real_mark(*arguments)

    real_mark = ChunkEncoder.mark
    monkeypatch.setattr("chasqui.producing.chunks.uuid", types.SimpleNamespace(uuid4=uuid4))
    monkeypatch.setattr(ChunkEncoder, "mark", mark)
    with sync.Queue(queue_name, redis_url=server.url, durable="disk") as queue:
        with ThreadPoolExecutor(2) as pool:
            adds = [pool.submit(queue.add, "n", n, **options) for n in range(2)]
            assert all(add.result().is_new for add in adds)
        counts = queue.counts()
        assert counts.waiting + counts.delayed == 2


def handed_over(queue: Any) -> int:
    """How many adds wait for the server, or for others that do."""
    if isinstance(queue, Queue):
        return len(asyncio.all_tasks())  # they all start in the next turn of the loop
    (line,) = queue.queue._durable._lines.values()
    return len(line.next) + line.is_busy


@pytest.mark.slow
async def test_nothing_else_waits_behind_an_add_that_is_not_confirmed_yet(
    pair: tuple[Server, Server], queue_at: Callable[..., Any]
):
    primary, replica = pair
    queue = queue_at(primary.url, durable="replica")
    await queue.add("n", 1)
    os.kill(replica.pid, signal.SIGSTOP)
    try:
        adding = asyncio.create_task(queue.add("n", 2))
        while (await queue.counts()).waiting < 2:
            assert not adding.done()
        assert not adding.done()
    finally:
        os.kill(replica.pid, signal.SIGCONT)
    assert (await adding).is_new


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_no_room(
    kind: str, private_server: Callable[..., Server], queue_at: Callable[..., Any], keys: Keys
):
    """A batch is refused as a whole, and one that fits is added once though it asks first."""
    server = private_server(kind, appendonly="yes", appendfsync="always")
    queue = queue_at(server.url, durable="disk", max_backlog=700)
    rows = [{"name": "n", "data": n} for n in range(600)]
    assert len(await queue.add_bulk(rows)) == 600
    for jobs in (rows, rows[:101]):
        with pytest.raises(QueueFullError):
            await queue.add_bulk(jobs)
    await queue.add("n", 1, job_id="x")
    with redis_py.Redis.from_url(server.url) as redis:
        assert redis.xlen(keys.stream) == 601


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_what_a_dead_server_lost_is_added_again(
    kind: str,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    keys: Keys,
):
    """Chunks that were answered by a server that then died must not count as confirmed by the one
    that takes its place."""
    server = private_server(kind, appendonly="yes", appendfsync="always")
    other = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable="disk", max_backlog=10_000)
    await queue.add("n", 0)
    proxy.fail(Fault.HOLD_BEFORE, "WAITAOF")
    adding = asyncio.create_task(queue.add_bulk([{"name": "n", "data": n} for n in range(600)]))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.is_held)
    proxy.point_to(other.url)
    proxy.resume()
    jobs = await adding
    assert len({job.id for job in jobs}) == 600
    with redis_py.Redis.from_url(other.url) as redis:
        assert redis.xlen(keys.stream) == 600


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_bulk_that_no_link_outlives_is_added_once_and_not_confirmed(
    kind: str,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
):
    """Every chunk is answered, each over another link: no wait was for all of them."""
    monkeypatch.setattr("chasqui.producing.durable.ROUNDS", 2)
    server = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable="disk")
    await queue.add("n", 0)
    proxy.fail(Fault.CUT_BEHIND, "EVALSHA", times=100)
    with pytest.raises(OutcomeUnknownError, match="perhaps not for good: the link was lost"):
        await queue.add_bulk([{"name": "n", "data": n} for n in range(600)])
    assert proxy.count("WAITAOF") >= 2 + 2
    with redis_py.Redis.from_url(server.url) as redis:
        assert redis.xlen(keys.stream) == 601


@pytest.mark.parametrize("max_backlog", [None, 10_000])
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_bulk_is_sent_as_it_is_made(
    kind: str,
    max_backlog: int | None,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    keys: Keys,
):
    """Not as one frame, which would be the bulk in memory some times more."""
    server = private_server(kind, appendonly="yes")
    queue = queue_at(server.url, durable="disk", max_backlog=max_backlog)
    await queue.add("n", 0)
    rows = [{"name": "n", "data": bytes(1 << 18)} for _ in range(100)]
    tracemalloc.start()
    try:
        await queue.add_bulk(rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Once as payloads, and what is on its way; as one frame it was there five times.
    assert peak < 3 * 25 << 20
    with redis_py.Redis.from_url(server.url) as redis:
        assert redis.xlen(keys.stream) == 101


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_durable_add_takes_no_longer_than_a_request_may(
    kind: str,
    private_server: Callable[..., Server],
    queue_at: Callable[..., Any],
    make_proxy: Callable[[str], Proxy],
):
    server = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    queue = queue_at(proxy.url, durable="disk", request_timeout_s=0.5)
    await queue.add("n", 0)
    proxy.fail(Fault.HOLD_BEFORE, "WAITAOF")
    with pytest.raises(OutcomeUnknownError):
        async with asyncio.timeout(15):  # shorter than any limit of the wait's own
            await queue.add("n", 1)


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_an_add_behind_one_that_is_given_up_is_told_too(
    kind: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    """It goes out as the one before it is told that there is no way to the server."""
    server = private_server(kind, appendonly="yes", requirepass="pw")
    is_away = False

    async def provider(_host: str | None) -> tuple[str | None, str]:
        if is_away:
            raise RuntimeError("the token service is away")
        return None, "pw"

    queue = Queue(queue_name, redis_url=server.url, durable="disk", credential_provider=provider)
    await queue.add("n", 0)
    durable = queue._durable
    assert durable is not None
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(queue.add("n", 1))
    await until(lambda: durable._is_waiting)
    behind = asyncio.create_task(queue.add("n", 2))
    await until(lambda: bool(durable._next))
    is_away = True
    server.kill()
    async with asyncio.timeout(20):
        told = await asyncio.gather(waiting, behind, return_exceptions=True)
    assert [isinstance(one, Exception) for one in told] == [True, True]
    is_away = False
    server.start()
    async with asyncio.timeout(20):
        assert (await queue.add("n", 3)).is_new
    await queue.close()
