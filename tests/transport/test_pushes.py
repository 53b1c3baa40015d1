"""Messages of RESP3 that answer nothing may come at any moment, on any link: they are dropped."""

import asyncio
from typing import Any

import pytest
import redis as redis_py

from chasqui import Queue, Worker, sync
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.transport.handshake import Handshake, Talk
from chasqui.transport.request import Effect, commands
from tests.faults.fake import FakeServer, usual
from tests.fixtures import Connect, MakeProxy, echo
from tests.servers import Server
from tests.transport.test_blocking_threads import Connect as ConnectBlocking

PUSH = b">2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n$5\r\nb\r\nc\x00\r\n"
TRACKING = ("CLIENT", "TRACKING", "ON", "BCAST")


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new link is told of each key that changes, its own included."""

    real = Handshake.talk

    def talk(handshake: Handshake, endpoint: Endpoint) -> Talk:
        profile = yield from real(handshake, endpoint)
        reply = yield commands(TRACKING, effect=Effect.READ)
        assert reply == b"OK"
        return profile

    monkeypatch.setattr(Handshake, "talk", talk)


@pytest.mark.usefixtures("tracked")
@pytest.mark.both_loops(on="redis-8.6")
async def test_jobs_run_though_each_link_is_told_of_every_key(
    server: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    ran: list[int] = []

    async def handle(job: Any) -> int:
        ran.append(job.data)
        return int(job.data)

    worker = Worker(queue_name, handle, redis_url=proxy.url, store_results=True)
    running = asyncio.create_task(worker.run())
    blocking = sync.Queue(queue_name, redis_url=proxy.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        jobs = await queue.add_bulk([{"name": "n", "data": n} for n in range(300)])
        for n in range(300, 320):
            jobs.append(await queue.add("n", n))
        for n in range(320, 340):
            jobs.append(await asyncio.to_thread(blocking.add, "n", n, delay_ms=1))
        results = [await queue.wait_for_result(job.id) for job in jobs]
        links = proxy.accepted
        assert results == list(range(340))
        assert await asyncio.to_thread(blocking.get_job_result_bulk, [job.id for job in jobs])
        await worker.close()
        await running
        assert proxy.accepted == links, "no link was given up for them"
    await asyncio.to_thread(blocking.close)
    assert sorted(ran) == list(range(340))


def test_a_blocking_link_that_was_told_something_meanwhile_is_used_on(
    server: Server, queue_name: str, connect_blocking: ConnectBlocking, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    prefix = Keys(queue_name).stream
    assert connection.execute(*TRACKING, "PREFIX", prefix, effect=Effect.READ) == b"OK"
    link = connection._state().link
    assert link is not None
    with redis_py.Redis.from_url(server.url) as redis:
        for n in range(5):
            redis.set(prefix + b"%d" % n, "x", ex=60)
            while not link._poll(1, 0.1):
                pass
            assert connection.call(echo(n)) == b"%d" % n
    assert proxy.accepted == 1


@pytest.mark.both_loops
@pytest.mark.parametrize("before", [b"", PUSH, PUSH * 3])
@pytest.mark.parametrize("behind", [b"", PUSH, PUSH * 3])
async def test_pushes_around_every_answer(
    connect: Connect, connect_blocking: ConnectBlocking, before: bytes, behind: bytes
) -> None:
    with FakeServer(lambda words: before + usual(words) + behind) as server:
        connection, blocking = connect(server.url), connect_blocking(server.url)
        tags = [f"tag-{n}" for n in range(50)]
        replies = await asyncio.gather(*(connection.submit(echo(tag)) for tag in tags))
        assert replies == [tag.encode() for tag in tags]
        for tag in tags:
            assert await asyncio.to_thread(blocking.call, echo(tag)) == tag.encode()
        assert server.accepted == 2


async def test_a_reply_that_nobody_asked_for_is_no_push(
    connect: Connect, connect_blocking: ConnectBlocking
) -> None:
    """The link is given up: which answer belongs to which question is not known any more."""

    def answer(words: list[bytes]) -> bytes | None:
        return usual(words) + b"+more\r\n" if words[-1] == b"odd" else None

    with FakeServer(answer) as server:
        connection, blocking = connect(server.url), connect_blocking(server.url)
        for tag in ("even", "odd", "even"):
            assert await connection.submit(echo(tag)) == tag.encode()
            assert await asyncio.to_thread(blocking.call, echo(tag)) == tag.encode()
        assert server.accepted == 4
