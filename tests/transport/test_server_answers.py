"""What the asyncio connection makes of the errors that a server answers with."""

import asyncio
from collections.abc import Callable

import pytest

from chasqui.errors import (
    ServerError,
)
from chasqui.scripts import managing
from chasqui.scripts.loading import call
from chasqui.transport.request import Effect, commands
from tests.fixtures import Connect, MakeProxy, echo, incr, until
from tests.servers import Server

pytestmark = pytest.mark.both_loops


@pytest.mark.fault(23)
async def test_a_flushed_script_is_sent_again(
    server: Server, connect: Connect, queue_name: str
) -> None:
    connection = connect(server.url)
    names = [b"%b:%d" % (queue_name.encode(), i) for i in range(5)]
    expected = None
    for _ in range(3):
        await connection.execute("SCRIPT", "FLUSH", effect=Effect.IDEMPOTENT)
        calls = [
            connection.submit(call(managing.COUNTS, names, ["g"], Effect.READ)) for _ in range(20)
        ]
        replies = await asyncio.gather(*calls)
        expected = expected or replies[0]
        assert replies == [expected] * 20


async def test_an_error_of_the_server_is_raised_with_its_code(
    server: Server, connect: Connect, queue_name: str
) -> None:
    connection = connect(server.url)
    await connection.execute("SET", queue_name, "text", effect=Effect.IDEMPOTENT)
    with pytest.raises(ServerError) as caught:
        await connection.execute("LPUSH", queue_name, "x", effect=Effect.ONCE)
    assert caught.value.code == "WRONGTYPE"


@pytest.mark.fault(20)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_busy_server_is_waited_for(
    private_server: Callable[..., Server], connect: Connect, kind: str
) -> None:
    server = private_server(kind)
    connection, control, killer = (connect(server.url) for _ in range(3))
    for one in (connection, control, killer):
        await one.connect()
    setting = "lua-time-limit"  # the old name of busy-reply-threshold: every server knows it
    await control.execute("CONFIG", "SET", setting, "1", effect=Effect.IDEMPOTENT)
    endless = commands(("EVAL", "while true do end", "0"), effect=Effect.ONCE)
    script = control.submit(endless)
    await asyncio.sleep(0)  # uvloop writes the links of one turn in any order
    waiting = connection.submit(incr("n", Effect.ONCE))
    late = connect(server.url)  # its greeting meets the busy server too
    greeted = asyncio.ensure_future(late.connect())
    await until(lambda: bool(connection._flow.held))  # the server has said BUSY
    await killer.execute("SCRIPT", "KILL", effect=Effect.IDEMPOTENT)
    with pytest.raises(ServerError):
        await script
    assert await waiting == 1
    assert (await greeted).version >= (6, 2, 0)


@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_busy_until_the_deadline_is_told_as_busy(
    kind: str, private_server: Callable[..., Server], connect: Connect
) -> None:
    server = private_server(kind)
    connection, control = connect(server.url, request_timeout_s=2), connect(server.url)
    killer = connect(server.url)
    await asyncio.gather(connection.connect(), killer.connect())
    await control.execute("CONFIG", "SET", "lua-time-limit", "1", effect=Effect.IDEMPOTENT)
    script = control.submit(commands(("EVAL", "while true do end", "0"), effect=Effect.ONCE))
    await asyncio.sleep(0)  # uvloop writes the links of one turn in any order
    with pytest.raises(ServerError) as caught:  # of a read, the outcome is never unknown
        await connection.submit(echo("x"))
    assert caught.value.code == "BUSY"
    await killer.execute("SCRIPT", "KILL", effect=Effect.IDEMPOTENT)
    with pytest.raises(ServerError):
        await script


@pytest.mark.fault(11)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_demoted_server_is_left_and_tried_again(
    private_server: Callable[..., Server], connect: Connect, make_proxy: MakeProxy, kind: str
) -> None:
    server = private_server(kind)
    proxy = make_proxy(server.url)
    connection, control = connect(proxy.url), connect(server.url)
    await connection.connect()
    await control.execute("REPLICAOF", "127.0.0.1", "1", effect=Effect.IDEMPOTENT)
    waiting = connection.submit(incr("n", Effect.ONCE))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.accepted >= 2)
    await control.execute("REPLICAOF", "NO", "ONE", effect=Effect.IDEMPOTENT)
    assert await waiting == 1
    assert proxy.accepted <= 10


@pytest.mark.fault(36)
@pytest.mark.slow
async def test_a_loading_server_is_waited_for(
    private_server: Callable[..., Server], connect: Connect
) -> None:
    server = private_server("redis-8.6", enable_debug_command="yes", key_load_delay="0")
    connection, control = connect(server.url), connect(server.url)
    await connection.connect()
    fill = "for i = 1, 3000 do redis.call('set', i, i) end"
    await control.execute("EVAL", fill, "0", effect=Effect.IDEMPOTENT)
    await control.execute("CONFIG", "SET", "key-load-delay", "500", effect=Effect.IDEMPOTENT)
    await control.execute(
        "CONFIG", "SET", "loading-process-events-interval-bytes", "1024", effect=Effect.IDEMPOTENT
    )
    reload = control.submit(commands(("DEBUG", "RELOAD"), effect=Effect.ONCE))
    late = connect(server.url, is_reader=True)
    value, profile = await asyncio.gather(connection.submit(incr("n", Effect.ONCE)), late.connect())
    assert value == 1
    assert profile.claim  # asked again once it had loaded, not believed while it was loading
    await reload
