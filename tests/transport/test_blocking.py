"""The blocking connection on real servers: the same judgements, no event loop."""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from chasqui._core.entry import EntryBuilder
from chasqui.errors import (
    AuthenticationError,
    OutcomeUnknownError,
    ServerError,
    UnreachableError,
)
from chasqui.scripts import managing
from chasqui.scripts.loading import call
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Request, commands
from chasqui.transport.sockets import INBOX_BYTES
from tests.core.memory import takes_at_most
from tests.crash.conftest import eventually
from tests.fixtures import echo, incr
from tests.proxy import Fault, Proxy
from tests.servers import Server

Connect = Callable[..., BlockingConnection]
MakeProxy = Callable[[str], Proxy]

CANARY = "Kanari-7f3a"


def stream(requests: Any) -> Any:
    return (yield requests)


# ── Calls ───────────────────────────────────────────────────────────────────────────────────────


def test_calls_are_answered(server: Server, connect_blocking: Connect) -> None:
    connection = connect_blocking(server.url + "/2", client_name="chasqui-test", is_reader=True)
    profile = connection.connect()
    assert profile.claim == (server.name == "redis-8.6")
    assert connection.call(echo("x")) == b"x"
    info = connection.execute("CLIENT", "INFO", effect=Effect.READ).decode()
    assert " name=chasqui-test " in info
    assert " db=2 " in info


def test_a_unix_socket_works(server: Server, connect_blocking: Connect) -> None:
    assert connect_blocking(server.unix_url).call(echo("x")) == b"x"


def test_a_stream_is_sent_while_its_replies_are_read(
    server: Server, connect_blocking: Connect
) -> None:
    """40 MB both ways: had one side to be done before the other starts, both would stall."""
    body = "x" * 100_000
    requests = (commands(("ECHO", f"{i}:{body}"), effect=Effect.READ) for i in range(400))
    replies = connect_blocking(server.url).run(stream(requests))
    assert [reply.partition(b":")[0] for reply in replies] == [b"%d" % i for i in range(400)]


def test_an_error_inside_a_stream_is_one_of_its_replies(
    server: Server, connect_blocking: Connect
) -> None:
    names = ["ECHO", "NO-SUCH", "ECHO"]
    requests = (commands((name, "x"), effect=Effect.READ) for name in names)
    first, second, third = connect_blocking(server.url).run(stream(requests))
    assert (first, third) == (b"x", b"x")
    assert isinstance(second, ServerError)


def test_a_stream_that_breaks_off_leaves_replies_in_step(
    server: Server, connect_blocking: Connect
) -> None:
    connection = connect_blocking(server.url)

    def requests() -> Any:
        yield echo(1)
        yield echo(2)
        raise LookupError("no more")

    first, second, broken = connection.run(stream(requests()))
    assert (first, second) == (b"1", b"2")
    assert isinstance(broken, LookupError)
    assert connection.call(echo(3)) == b"3"


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_requests_are_on_their_way_than_asked_for(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy, ahead: int
) -> None:
    proxy = make_proxy(server.url)
    proxy.fail(Fault.CUT_AFTER, "ECHO", nth=50)
    sent: list[Request] = []
    waiting: list[int] = []

    def requests() -> Any:
        for i in range(200):
            waiting.append(sum(not isinstance(one.outcome.value, bytes) for one in sent))
            sent.append(echo(i))
            yield sent[-1]

    replies = connect_blocking(proxy.url).call_each(requests(), ahead)
    assert replies == [b"%d" % i for i in range(200)]
    assert max(waiting) == ahead - 1


def test_reads_take_no_new_memory(server: Server, connect_blocking: Connect) -> None:
    """Nor do those of the next link."""
    connection = connect_blocking(server.url)
    me = connection.execute("CLIENT", "ID", effect=Effect.READ)
    with takes_at_most(INBOX_BYTES // 4):
        connection.execute("CLIENT", "KILL", "ID", me, "SKIPME", "no", effect=Effect.READ)
        assert connection.call(echo("y")) == b"y"


# ── Lost links ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(14)
@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
@pytest.mark.parametrize("effect", list(Effect))
def test_a_cut_link_is_judged_by_the_request_s_effect(
    server: Server,
    connect_blocking: Connect,
    make_proxy: MakeProxy,
    queue_name: str,
    fault: Fault,
    effect: Effect,
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.fail(fault, "INCR")
    was_applied = fault is Fault.CUT_AFTER
    if effect is Effect.ONCE:
        with pytest.raises(OutcomeUnknownError):
            connection.call(incr(queue_name, effect))
        expected = int(was_applied)
    else:
        connection.call(incr(queue_name, effect))
        expected = 1 + int(was_applied)
    value = connect_blocking(server.url).execute("GET", queue_name, effect=Effect.READ)
    assert int(value or 0) == expected
    assert connection.call(echo("again")) == b"again"


@pytest.mark.fault(17)
def test_a_reply_that_broke_off_is_built_anew_though_its_link_is_kept(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.call(commands(("XADD", queue_name, "*", "d", b"x" * 99), effect=Effect.ONCE))
    kept, builder = connection._state().link, EntryBuilder("range")
    proxy.cut_after_bytes(40, to_server=False)
    read = commands(("XRANGE", queue_name, "-", "+"), effect=Effect.READ, builder=builder)
    assert [entry.envelope for entry in connection.call(read)] == [b"x" * 99]
    assert connection._state().link is not kept


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.GARBAGE])
def test_a_stream_survives_a_fault_in_its_middle(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy, fault: Fault
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    proxy.fail(fault, "ECHO", nth=50)
    replies = connection.run(stream(echo(i) for i in range(200)))
    assert replies == [b"%d" % i for i in range(200)]
    assert proxy.accepted == 2


@pytest.mark.fault(15)
@pytest.mark.parametrize("effect", list(Effect))
def test_a_swallowed_reply_ends_at_the_deadline(
    server: Server,
    connect_blocking: Connect,
    make_proxy: MakeProxy,
    queue_name: str,
    effect: Effect,
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.fail(Fault.SWALLOW, "INCR", times=100)
    expected = UnreachableError if effect is Effect.READ else OutcomeUnknownError
    with pytest.raises(expected):
        connection.call(incr(queue_name, effect, timeout_s=0.3))
    assert connection.call(echo("next")) == b"next"


def test_a_link_that_died_while_idle_is_not_used(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.cut()
    proxy.wait_for(lambda: not proxy._links)
    assert connection.call(incr(queue_name, Effect.ONCE)) == 1


@pytest.mark.fault(44)
def test_garbage_drops_the_link_and_the_next_one_works(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    proxy.fail(Fault.GARBAGE, "ECHO")
    assert connection.call(echo("x")) == b"x"
    assert proxy.accepted == 2


@pytest.mark.fault(6)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
def test_a_restart_under_load_is_survived(
    kind: str, private_server: Callable[..., Server], connect_blocking: Connect
) -> None:
    server = private_server(kind, appendonly="yes", appendfsync="always")
    connection = connect_blocking(server.url)
    count = 0
    is_over = threading.Event()
    moved = threading.Condition()

    def work() -> None:
        nonlocal count
        while not is_over.is_set():
            with moved:
                member = count = count + 1
                moved.notify_all()
            connection.execute("SADD", "all", member, effect=Effect.IDEMPOTENT)

    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(work) for _ in range(4)]
        for _ in range(3):
            with moved:
                goal = count + 300
                assert moved.wait_for(lambda goal=goal: count >= goal, 30)
            server.kill()
            server.start()
        is_over.set()
        for one in load:
            one.result()
    assert connection.execute("SCARD", "all", effect=Effect.READ) == count


@pytest.mark.slow
def test_random_cuts_never_mix_up_replies(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    chance = random.Random(7)
    for round_number in range(20):
        connection = connect_blocking(proxy.url)
        connection.connect()
        proxy.cut_after_bytes(chance.randrange(20_000), to_server=round_number % 2 == 0)
        tags = [f"{round_number}-{i}" for i in range(1000)]
        replies = connection.run(stream(map(echo, tags)))
        assert replies == [tag.encode() for tag in tags]


# ── Servers that cannot be reached or will not let us in ────────────────────────────────────────


def test_a_refused_first_dial_is_told_at_once(
    connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy("redis://127.0.0.1:1")
    proxy.close()
    with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{proxy.port}"):
        connect_blocking(proxy.url).call(echo("x"))


def test_a_silent_host_ends_at_the_deadline(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    proxy.stall()
    with pytest.raises(UnreachableError):
        connect_blocking(proxy.url, request_timeout_s=0.2).call(echo("x"))


@pytest.mark.fault(37)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_a_wrong_password_is_refused_and_never_shown(
    kind: str, private_server: Callable[..., Server], connect_blocking: Connect
) -> None:
    server = private_server(kind, requirepass="right")
    connection = connect_blocking(server.url.replace("//", f"//:{CANARY}@"))
    with pytest.raises(AuthenticationError) as caught:
        connection.call(echo("x"))
    assert CANARY not in f"{caught.value}{caught.value!r}{connection.endpoint!r}"


@pytest.mark.fault(37)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_a_server_that_knows_no_auth_repeats_the_password_and_we_do_not(
    kind: str,
    private_server: Callable[..., Server],
    connect_blocking: Connect,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    renamed = tmp_path / "renamed.conf"
    renamed.write_text('rename-command AUTH ""\nrename-command HELLO ""\n')
    place = private_server(kind, include=str(renamed)).url.removeprefix("redis://")
    caplog.set_level(logging.DEBUG)
    for url in (
        f"redis://:{CANARY}@{place}",
        f"redis://ada:{CANARY}@{place}",
        f"redis+cluster://:{CANARY}@{place}",
        f"redis+sentinel://{place}?sentinel_password={CANARY}",
    ):
        with pytest.raises((ServerError, UnreachableError), match="unknown command") as caught:
            connect_blocking(url).call(echo("x"))
        assert CANARY not in f"{caught.value}{caught.value!r}{caplog.text}"


@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_credentials_come_from_a_function_of_either_kind(
    kind: str, private_server: Callable[..., Server], connect_blocking: Connect
) -> None:
    server = private_server(kind, requirepass="secret")
    asked: list[str | None] = []

    def plain(host: str | None) -> tuple[str | None, str | None]:
        asked.append(host)
        return None, "secret"

    async def coroutine(host: str | None) -> tuple[str | None, str | None]:
        await asyncio.sleep(0)
        return plain(host)

    for provider in (plain, coroutine):
        connection = connect_blocking(server.url, credential_provider=provider)
        assert connection.call(echo("x")) == b"x"
        connection.execute("CLIENT", "KILL", "SKIPME", "no", "TYPE", "normal", effect=Effect.READ)
        assert connection.call(echo("y")) == b"y"
    assert len(asked) >= 4

    async def inside_a_loop() -> None:
        with pytest.raises(RuntimeError, match="plain function"):
            connect_blocking(server.url, credential_provider=coroutine).call(echo("x"))

    asyncio.run(inside_a_loop())


def test_a_user_without_a_password_is_not_taken_for_another(
    server: Server, connect_blocking: Connect, queue_name: str
) -> None:
    rights = ("on", "nopass", "~*", "+@all")
    admin = connect_blocking(server.url)
    admin.execute("ACL", "SETUSER", queue_name, *rights, effect=Effect.IDEMPOTENT)
    for connection in (
        connect_blocking(server.url.replace("//", f"//{queue_name}@")),
        connect_blocking(server.url, credential_provider=lambda host: (queue_name, None)),
    ):
        assert connection.execute("ACL", "WHOAMI", effect=Effect.READ) == queue_name.encode()


def test_a_credential_provider_that_gives_no_pair_is_told(
    server: Server, connect_blocking: Connect
) -> None:
    with pytest.raises(TypeError, match="credential_provider must give a pair"):
        connect_blocking(server.url, credential_provider=lambda host: None).call(echo("x"))


# ── The server's own answers ────────────────────────────────────────────────────────────────────


@pytest.mark.fault(23)
def test_a_flushed_script_is_sent_again(
    server: Server, connect_blocking: Connect, queue_name: str
) -> None:
    connection = connect_blocking(server.url)
    names = [b"%b:%d" % (queue_name.encode(), i) for i in range(5)]
    for _ in range(2):
        connection.execute("SCRIPT", "FLUSH", effect=Effect.IDEMPOTENT)
        calls = [call(managing.COUNTS, names, ["g"], Effect.READ) for _ in range(20)]
        replies = connection.run(stream(calls))
        assert replies == [replies[0]] * 20
        assert isinstance(replies[0], list)


def is_busy(server: Server) -> bool:
    try:
        with redis_py.Redis.from_url(server.url) as client:
            return not client.ping()
    except redis_py.ResponseError as error:
        return "BUSY" in str(error)


@pytest.mark.fault(20)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_a_busy_server_is_waited_for(
    kind: str,
    private_server: Callable[..., Server],
    connect_blocking: Connect,
    make_proxy: MakeProxy,
) -> None:
    server = private_server(kind)
    proxy = make_proxy(server.url)
    connection, control, killer = (
        connect_blocking(url) for url in (proxy.url, server.url, server.url)
    )
    for one in (connection, control, killer):
        one.connect()
    control.execute("CONFIG", "SET", "lua-time-limit", "1", effect=Effect.IDEMPOTENT)
    endless = commands(("EVAL", "while true do end", "0"), effect=Effect.ONCE)
    with ThreadPoolExecutor(2) as pool:
        script = pool.submit(control.call, endless)
        eventually(lambda: is_busy(server), "the server runs the script")
        waiting = pool.submit(connection.call, incr("n", Effect.ONCE))
        proxy.wait_for(lambda: proxy.commands.count(b"INCR") >= 2)  # the first was refused
        killer.execute("SCRIPT", "KILL", effect=Effect.IDEMPOTENT)
        with pytest.raises(ServerError):
            script.result()
        assert waiting.result() == 1


@pytest.mark.fault(11)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_a_demoted_server_is_left_and_tried_again(
    kind: str,
    private_server: Callable[..., Server],
    connect_blocking: Connect,
    make_proxy: MakeProxy,
) -> None:
    server = private_server(kind)
    proxy = make_proxy(server.url)
    connection, control = connect_blocking(proxy.url), connect_blocking(server.url)
    connection.connect()
    control.execute("REPLICAOF", "127.0.0.1", "1", effect=Effect.IDEMPOTENT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, incr("n", Effect.ONCE))
        proxy.wait_for(lambda: proxy.accepted >= 2)
        control.execute("REPLICAOF", "NO", "ONE", effect=Effect.IDEMPOTENT)
        assert waiting.result() == 1
