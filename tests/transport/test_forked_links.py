"""Forked children have copies of our sockets: what we close is closed, what they close is not."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_py

from chasqui import Queue, Worker, sync
from chasqui.model.config import Endpoint
from chasqui.transport.connection import Connection
from chasqui.transport.link import Link
from tests import tls
from tests.fixtures import Connect, MakeProxy, echo, until
from tests.servers import Server
from tests.transport.test_blocking_threads import Connect as ConnectBlocking


@contextlib.contextmanager
def forked(deed: Callable[[], object] = lambda: None) -> Iterator[int]:
    """A child that does something and lives until the block ends; its pid."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(writing)
            deed()
            code = 0
            os.read(reading, 1)
        finally:
            os._exit(code)
    os.close(reading)
    try:
        yield pid
    finally:
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ── What the parent closes ──────────────────────────────────────────────────────────────────────


@pytest.mark.both_loops
async def test_a_closed_worker_reads_no_more_though_a_child_of_its_handler_lives(
    server: Server, queue_name: str
) -> None:
    """Its blocked read would be given the next jobs, which nobody runs."""
    children = contextlib.ExitStack()

    async def fork(job: object) -> None:
        children.enter_context(forked())

    def links() -> list[str]:
        with redis_py.Redis.from_url(server.url) as redis:
            return [one["id"] for one in redis.client_list() if queue_name in one["name"]]

    with children:
        worker = Worker(queue_name, fork, redis_url=server.url, consumer_id=queue_name)
        running = asyncio.create_task(worker.run())
        async with Queue(queue_name, redis_url=server.url) as queue:
            job = await queue.add("fork", 1)
            await queue.wait_for_end(job.id)
            await worker.close()
            await running
            await until(lambda: not links())
            await queue.add("later", 2)
            assert (await queue.counts()).pending == 0


@pytest.fixture(params=["tcp", "unix"])
async def watched(
    request: pytest.FixtureRequest, redis_86: Server, queue_name: str
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """A server's URL, and how many links it has of this test's name."""

    def links() -> int:
        return sum(one["name"] == queue_name for one in redis.client_list())

    with redis_py.Redis.from_url(redis_86.url) as redis:
        yield (redis_86.url if request.param == "tcp" else redis_86.unix_url), links


@pytest.mark.both_loops
async def test_a_closed_connection_is_closed_at_the_server(
    connect: Connect, watched: tuple[str, Callable[[], int]], queue_name: str
) -> None:
    url, links = watched
    connection = connect(url, client_name=queue_name)
    await connection.submit(echo("x"))
    with forked():
        assert links() == 1
        await connection.close()
        await until(lambda: links() == 0)


async def test_so_is_a_blocking_one(
    connect_blocking: ConnectBlocking, watched: tuple[str, Callable[[], int]], queue_name: str
) -> None:
    url, links = watched
    connection = connect_blocking(url, client_name=queue_name)
    connection.call(echo("x"))
    with forked():
        assert links() == 1
        connection.close()
        await until(lambda: links() == 0)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_so_is_one_whose_loop_is_gone(server: Server, queue_name: str) -> None:
    connection = Connection(Endpoint.parse(server.url), key=b"k", client_name=queue_name)
    with asyncio.Runner() as runner, redis_py.Redis.from_url(server.url) as redis:
        runner.run(connection.connect())
        with forked():
            runner.close()
            with contextlib.suppress(StopIteration):
                connection.close().send(None)
            asyncio.run(
                until(lambda: all(one["name"] != queue_name for one in redis.client_list()))
            )
    gc.collect()  # here, where the warnings of a loop that was left are expected


@pytest.mark.both_loops
@pytest.mark.parametrize("is_blocking", [False, True], ids=["asyncio", "blocking"])
async def test_so_is_one_by_tls(
    redis_86: Server,
    connect: Connect,
    connect_blocking: ConnectBlocking,
    tmp_path: Path,
    is_blocking: bool,
) -> None:
    authority = tls.make_authority(tmp_path, "authority")
    certificate = tls.make_certificate(tmp_path, authority, "127.0.0.1")
    with tls.TlsRelay(redis_86.port, certificate) as relay:
        url = f"rediss://127.0.0.1:{relay.port}?ssl_ca_certs={authority}"
        connection, blocking = connect(url), connect_blocking(url)
        if is_blocking:
            await asyncio.to_thread(blocking.call, echo("x"))
        else:
            await connection.submit(echo("x"))
        with forked():
            assert len(relay._relays) == 1
            await asyncio.to_thread(blocking.close) if is_blocking else await connection.close()
            await until(lambda: not relay._relays)


# ── What a child closes ─────────────────────────────────────────────────────────────────────────


def dismiss(connection: Connection, link: Link) -> None:
    """What a child may do to its copy of a connection."""
    with contextlib.suppress(StopIteration):
        connection.close().send(None)
    link.shut_down()


@pytest.mark.both_loops
async def test_a_child_that_closes_its_copy_leaves_the_parents_link_alone(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    link = connection._flow.link
    assert link is not None
    with forked(lambda: dismiss(connection, link)):
        pass
    assert await connection.submit(echo("x")) == b"x"
    assert proxy.accepted == 1


def test_so_does_one_that_closes_a_blocking_one(
    server: Server, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    with sync.Queue(queue_name, redis_url=proxy.url) as queue:
        queue.add("n", 1)
        with forked(queue.close):
            pass
        queue.add("n", 2)
        assert queue.counts().waiting == 2
    assert proxy.accepted == 1


async def test_a_child_that_took_the_link_for_its_own_would_end_it(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    """The control: without a look at whose it is."""
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    link = connection._flow.link
    assert link is not None

    def take() -> None:
        link._pid = os.getpid()
        link.shut_down()

    with forked(take):
        pass
    await until(lambda: not connection.is_connected)
