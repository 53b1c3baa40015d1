"""The asyncio connection on real servers: pipelining, cancellation, flow control, its end."""

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import (
    AuthenticationError,
    ClosedError,
    OutcomeUnknownError,
    ServerError,
    UnreachableError,
)
from chasqui.model.config import Endpoint
from chasqui.transport.link import Link
from chasqui.transport.request import Effect, Request, commands
from chasqui.transport.sockets import INBOX_BYTES
from tests.chaos.cancels import Storm, echo
from tests.core.memory import takes_at_most
from tests.fixtures import Connect, MakeProxy, incr, until
from tests.proxy import Fault
from tests.servers import Server

pytestmark = pytest.mark.both_loops

ENDPOINT = Endpoint.parse("redis://localhost:6379")


# ── Pipelining ──────────────────────────────────────────────────────────────────────────────────


async def test_the_commands_of_one_turn_leave_in_one_write(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    before = len(proxy.reads)
    replies = await asyncio.gather(*(connection.submit(echo(i)) for i in range(100)))
    assert replies == [b"%d" % i for i in range(100)]
    assert proxy.reads[before:] == [100]


async def test_several_replies_of_one_request_come_as_a_list(
    server: Server, connect: Connect
) -> None:
    connection = connect(server.url)
    request = commands(("ECHO", "a"), ("NO-SUCH", "b"), ("ECHO", "c"), effect=Effect.READ)
    request.raises = False
    first, second, third = await connection.submit(request)
    assert (first, third) == (b"a", b"c")
    assert second.code == "ERR"


async def test_a_stream_of_requests_has_a_reply_or_an_exception_for_each(
    server: Server, connect: Connect
) -> None:
    def plan() -> Any:
        return (
            yield (
                commands(("ECHO" if i % 3 else "NO-SUCH", str(i)), effect=Effect.READ)
                for i in range(300)
            )
        )

    replies = await connect(server.url).run(plan())
    for i, reply in enumerate(replies):
        assert reply == b"%d" % i if i % 3 else isinstance(reply, ServerError)


async def test_a_stream_that_breaks_off_leaves_replies_in_step(
    server: Server, connect: Connect
) -> None:
    connection = connect(server.url)

    def plan() -> Any:
        def requests() -> Any:
            yield echo(1)
            raise LookupError("no more")

        return (yield requests())

    first, broken = await connection.run(plan())
    assert first == b"1"
    assert isinstance(broken, LookupError)
    assert await connection.submit(echo(2)) == b"2"


@pytest.mark.fault(52)
@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [3_000, pytest.param(30_000, marks=[pytest.mark.slow, pytest.mark.timeout(180)])]
)
async def test_cancelled_calls_never_mix_up_replies(
    server: Server, connect: Connect, count: int
) -> None:
    connection = connect(server.url)
    await connection.connect()
    storm = Storm()
    await storm.run([connection], count, random.Random(count))
    assert (storm.mismatched, storm.failed) == (0, 0)
    assert storm.answered > 0
    assert await connection.submit(echo("last")) == b"last"


# ── What the server sees ────────────────────────────────────────────────────────────────────────


async def test_the_server_sees_who_we_are(server: Server, connect: Connect) -> None:
    connection = connect(server.url + "/3", client_name="chasqui-test")
    profile = await connection.connect()
    info = (await connection.execute("CLIENT", "INFO", effect=Effect.READ)).decode()
    seen = dict(part.partition("=")[::2] for part in info.split())
    assert seen["name"] == "chasqui-test"
    assert seen["db"] == "3"
    assert seen.get("resp", "3") == "3"
    if profile.version >= (7, 2, 0):
        assert seen["lib-name"] == "chasqui"
        assert seen["lib-ver"]
    # RESP3: a map comes as a map.
    assert isinstance(await connection.execute("HGETALL", "none", effect=Effect.READ), dict)


async def test_a_unix_socket_is_as_good_as_a_port(server: Server, connect: Connect) -> None:
    if not isinstance(server, Server):
        pytest.skip("a server whose socket is elsewhere")
    connection = connect(f"{server.unix_url}?db=2", client_name="by-socket")
    calls = (connection.submit(echo(i)) for i in range(100))
    assert await asyncio.gather(*calls) == [b"%d" % i for i in range(100)]
    body = "x" * 3_000_000  # more than a socket holds
    assert len(await connection.submit(echo(body))) == len(body)
    info = (await connection.execute("CLIENT", "INFO", effect=Effect.READ)).decode()
    seen = dict(part.partition("=")[::2] for part in info.split())
    assert (seen["name"], seen["db"]) == ("by-socket", "2")
    assert str(server.socket) in seen["addr"]
    # A link that is cut is made anew.
    await connection.execute("CLIENT", "KILL", "ID", seen["id"], "SKIPME", "no", effect=Effect.READ)
    assert await connection.submit(echo("again")) == b"again"


async def test_a_socket_that_is_not_there_is_told(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=str(tmp_path)):
        await connect(f"unix://{tmp_path}/none").submit(echo("x"))


async def test_the_profile_is_what_the_server_can_do(server: Server, connect: Connect) -> None:
    profile = await connect(server.url, is_reader=True).connect()
    expected = {
        "redis-8.6": ("redis", True, True, True),
        "redis-6.2": ("redis", False, False, False),
        "valkey-9": ("valkey", False, False, True),
    }.get(server.name)
    if expected is None:
        pytest.skip("a server of unknown abilities")
    assert (profile.name, profile.xackdel, profile.claim, profile.waitaof) == expected


async def test_a_database_that_is_not_there_is_refused(server: Server, connect: Connect) -> None:
    with pytest.raises(ServerError, match="DB index"):
        await connect(server.url + "/99999").submit(echo("x"))


@pytest.mark.slow
async def test_an_idle_connection_sends_nothing(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection, control = connect(proxy.url), connect(server.url)
    await connection.connect()
    seen = proxy.bytes_in
    # Longer than any timer of the connection, on the server's own clock.
    await control.execute("BLPOP", "never-there", "1", effect=Effect.READ)
    assert proxy.bytes_in == seen


# ── Flow control ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(18)
@pytest.mark.slow
async def test_a_stalled_server_bounds_memory(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    proxy.stall()
    body, made, done = "x" * 10_000, 0, 0

    def plan() -> Any:
        nonlocal made, done
        made += 1
        reply = yield commands(("ECHO", body), effect=Effect.READ)
        assert len(reply) == len(body)
        done += 1

    async def one() -> None:
        await connection.run(plan())

    calls = [asyncio.create_task(one()) for _ in range(10_000)]
    await until(lambda: made == len(calls))
    assert connection._flow.unsent_bytes <= 10 * 1024 * 1024
    await until(lambda: len(connection._waiters) > 5_000)
    proxy.resume()
    await asyncio.gather(*calls)
    assert done == len(calls)


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("request_timeout_s", "timeout_s"),
    [pytest.param(2, None, id="no room"), pytest.param(20, 0.3, id="room of what is given up")],
)
async def test_no_room_until_the_deadline_is_told(
    server: Server,
    connect: Connect,
    make_proxy: MakeProxy,
    request_timeout_s: float,
    timeout_s: float | None,
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url, request_timeout_s=request_timeout_s)
    await connection.connect()
    proxy.stall()
    big = ("ECHO", "x" * 500_000)

    def plan() -> Any:
        return (yield (commands(big, effect=Effect.READ, timeout_s=timeout_s) for _ in range(100)))

    replies = await connection.run(plan())
    assert 2 < len(replies) < 100  # what comes after the first that had no room is not made
    assert all(isinstance(reply, UnreachableError) for reply in replies)


async def test_there_is_room_once_unsent_requests_are_given_up(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url, request_timeout_s=10)
    await connection.connect()
    proxy.close()
    waiting = connection.submit(commands(("PING",), effect=Effect.READ))
    big = ("ECHO", "x" * 1_000_000)
    many = [connection.submit(commands(big, effect=Effect.READ, timeout_s=0.3)) for _ in range(10)]
    await until(lambda: not connection.is_connected)
    assert connection.is_congested
    async with asyncio.timeout(5):
        await connection.room()
    assert not waiting.done()
    waiting.cancel()
    given_up = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(one, UnreachableError) for one in given_up)


async def test_reads_take_no_new_memory(server: Server, connect: Connect) -> None:
    """Nor do those of the next link."""
    connection = connect(server.url)
    me = await connection.execute("CLIENT", "ID", effect=Effect.READ)
    with takes_at_most(INBOX_BYTES // 4):
        await connection.execute("CLIENT", "KILL", "ID", me, "SKIPME", "no", effect=Effect.READ)
        assert await connection.submit(echo("y")) == b"y"


async def test_what_two_links_bring_at_once_is_not_mixed_up(
    server: Server, connect: Connect
) -> None:
    connections = [connect(server.url) for _ in range(4)]

    async def ask(number: int) -> None:
        texts = [b"%d-" % number * size for size in (1, 20_000, 50_000, 200_000)]
        requests = [commands(("ECHO", text), effect=Effect.READ) for text in texts]
        submitted = map(connections[number].submit, requests)
        assert await asyncio.gather(*submitted) == texts

    await asyncio.gather(*(ask(number) for number in [*range(4)] * 10))


def arrive(link: Link, data: bytes) -> None:
    """What an event loop does with bytes."""
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))


async def test_a_link_that_reads_while_another_hands_over_leaves_that_its_bytes() -> None:
    """An event loop that is run inside a callback of itself does that."""
    first, second = Link(ENDPOINT), Link(ENDPOINT)
    texts, found = [b"a" * 30_000, b"b" * 30_000], []

    def on_reply(link: Link, request: Request, reply: Any) -> None:
        if link is first:
            arrive(second, b"$60000\r\n" + b"!" * 60_000 + b"\r\n")
            found.append(reply)

    for link, count in (first, 2), (second, 2):
        link.on_reply = on_reply
        link.inflight.extend(echo("x") for _ in range(count))
    arrive(first, b"".join(b"$30000\r\n%s\r\n" % text for text in texts))
    assert found == texts


async def test_a_link_that_is_asked_for_room_keeps_it_until_it_has_read() -> None:
    first, second = Link(ENDPOINT), Link(ENDPOINT)
    lent = first.get_buffer(-1)
    assert second.get_buffer(-1).obj is not lent.obj
    assert first.get_buffer(-1).obj is lent.obj
    first.connection_lost(None)
    assert Link(ENDPOINT).get_buffer(-1).obj is lent.obj


async def test_a_link_that_a_signal_interrupts_is_dropped_with_what_it_has_not_read() -> None:
    """Of its replies some are handed over: nobody knows which. And nobody reads over the rest."""
    link, other = Link(ENDPOINT), Link(ENDPOINT)

    def on_reply(link: Link, request: Request, reply: Any) -> None:
        raise KeyboardInterrupt

    link.on_reply = on_reply
    link.inflight.extend(echo("x") for _ in range(2))
    lent = link.get_buffer(-1).obj
    with pytest.raises(KeyboardInterrupt):
        arrive(
            link, b"".join(b"$30000\r\n%s\r\n" % text for text in (b"a" * 30_000, b"b" * 30_000))
        )
    assert link.is_retired
    assert other.get_buffer(-1).obj is not lent


# ── Loops, forks, the end ───────────────────────────────────────────────────────────────────────


async def test_another_event_loop_is_refused(server: Server, connect: Connect) -> None:
    connection = connect(server.url)
    await connection.connect()

    def elsewhere() -> None:
        asyncio.run(connection.execute("PING", effect=Effect.READ))

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)
    assert await connection.submit(echo("x")) == b"x"


@pytest.mark.parametrize("server_error", ["WRONGTYPE", "NOPERM"])
async def test_an_error_inside_a_script_has_its_code(
    server_error: str, server: Server, connect: Connect, queue_name: str
) -> None:
    connection = connect(server.url)
    await connection.execute("SET", queue_name, "x", effect=Effect.IDEMPOTENT)
    user = f"u{queue_name}"
    rights = ("on", ">pw", "~*", "+eval", "+@connection", "+info", "+command")
    await connection.execute("ACL", "SETUSER", user, *rights, effect=Effect.IDEMPOTENT)
    if server_error == "NOPERM":
        connection = connect(server.url.replace("redis://", f"redis://{user}:pw@"))
    code = "return redis.call('LPUSH', KEYS[1], 'x')"
    with pytest.raises((ServerError, AuthenticationError)) as caught:
        await connection.execute("EVAL", code, 1, queue_name, effect=Effect.IDEMPOTENT)
    if server_error == "NOPERM":
        assert isinstance(caught.value, AuthenticationError)
    else:
        assert isinstance(caught.value, ServerError)
        assert caught.value.code == server_error


async def test_close_in_another_event_loop(server: Server, connect: Connect) -> None:
    connection = connect(server.url)
    await connection.connect()

    def elsewhere() -> None:
        asyncio.run(connection.close())

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)
    assert not connection.is_closed
    assert await connection.submit(echo("x")) == b"x"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_close_after_the_end_of_its_event_loop(server: Server, connect: Connect) -> None:
    connection = connect(server.url)

    def elsewhere() -> None:
        asyncio.run(connection.connect())  # type: ignore[arg-type]
        asyncio.run(connection.close())

    await asyncio.to_thread(elsewhere)
    assert connection.is_closed
    gc.collect()


@pytest.mark.fault(51)
async def test_a_forked_child_is_refused_and_the_parent_goes_on(
    server: Server, connect: Connect
) -> None:
    connection = connect(server.url)
    await connection.connect()
    pid = os.fork()
    if pid == 0:  # in the child: report by the exit code, run nothing of pytest
        code = 1
        try:
            asyncio.run(connection.execute("PING", effect=Effect.READ))
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert await connection.submit(echo("x")) == b"x"


async def test_close_ends_everything(
    server: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    tasks = asyncio.all_tasks()
    connection = connect(proxy.url)
    await connection.connect()
    proxy.fail(Fault.SWALLOW, "INCR")
    sent = connection.submit(incr(queue_name, Effect.ONCE))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.commands[-1] == b"INCR")
    proxy.stall()
    waiting = connection.submit(echo("x"))
    await connection.close()
    await connection.close()
    with pytest.raises(OutcomeUnknownError):
        await sent
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await connection.submit(echo("x"))
    proxy.resume()
    await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)
    assert asyncio.all_tasks() == tasks
    gc.collect()  # an unclosed socket or transport would warn, and warnings are errors


async def test_close_while_dialling(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    proxy.stall()
    connection = connect(proxy.url)
    waiting = connection.submit(echo("x"))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.accepted == 1)
    await connection.close()
    with pytest.raises(ClosedError):
        await waiting
    proxy.resume()
    await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)
