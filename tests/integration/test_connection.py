"""The asyncio connection on real servers: pipelining, cancellation, lost links, deadlines."""

import asyncio
import gc
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chasqui import dialler, scripts
from chasqui.connection import Connection
from chasqui.errors import (
    AuthenticationError,
    ClosedError,
    OutcomeUnknownError,
    ServerError,
    UnreachableError,
)
from chasqui.link import Link, open_link
from chasqui.request import Effect, Request, commands
from tests.chaos.cancels import Storm, echo
from tests.proxy import WAIT_S, Fault, Proxy
from tests.servers import Server

pytestmark = pytest.mark.both_loops

Connect = Callable[..., Connection]
MakeProxy = Callable[[str], Proxy]

CANARY = "Kanari-7f3a"


def incr(key: str, effect: Effect) -> Request:
    return commands(("INCR", key), effect=effect)


async def until(fact: Callable[[], bool]) -> None:
    """Let the loop turn until something is true."""
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110 - what is watched has no event of its own
            await asyncio.sleep(0)


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
    redis_86: Server, connect: Connect
) -> None:
    connection = connect(redis_86.url)

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
    redis_86: Server, connect: Connect, count: int
) -> None:
    connection = connect(redis_86.url)
    await connection.connect()
    storm = Storm()
    await storm.run([connection], count, random.Random(count))
    assert (storm.mismatched, storm.failed) == (0, 0)
    assert storm.answered > 0
    assert await connection.submit(echo("last")) == b"last"


# ── Lost links ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(14)
@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
@pytest.mark.parametrize("effect", list(Effect))
async def test_a_cut_link_is_judged_by_the_request_s_effect(
    server: Server,
    connect: Connect,
    make_proxy: MakeProxy,
    queue_name: str,
    fault: Fault,
    effect: Effect,
) -> None:
    proxy = make_proxy(server.url)
    connection, control = connect(proxy.url), connect(server.url)
    await connection.connect()
    proxy.fail(fault, "INCR")
    was_applied = fault is Fault.CUT_AFTER
    if effect is Effect.ONCE:
        with pytest.raises(OutcomeUnknownError):
            await connection.submit(incr(queue_name, effect))
        expected = int(was_applied)
    else:  # sent again, whatever came of the first
        await connection.submit(incr(queue_name, effect))
        expected = 1 + int(was_applied)
    value = await control.execute("GET", queue_name, effect=Effect.READ)
    assert int(value or 0) == expected
    assert await connection.submit(echo("again")) == b"again"


@pytest.mark.fault(15)
@pytest.mark.parametrize("effect", [Effect.ONCE, Effect.IDEMPOTENT, Effect.READ])
async def test_a_swallowed_reply_ends_at_the_deadline(
    server: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str, effect: Effect
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url, request_timeout_s=0.3)
    await connection.connect()
    proxy.fail(Fault.SWALLOW, "INCR", times=100)
    expected = UnreachableError if effect is Effect.READ else OutcomeUnknownError
    async with asyncio.timeout(10):
        with pytest.raises(expected):
            await connection.submit(incr(queue_name, effect))


async def test_a_short_deadline_is_kept_beside_a_long_one(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    connection = connect(proxy.url, request_timeout_s=600)
    await connection.connect()
    proxy.fail(Fault.SWALLOW, "ECHO", times=2)
    calm = asyncio.ensure_future(connection.submit(echo("calm")))
    hasty = commands(("ECHO", "hasty"), effect=Effect.READ, timeout_s=0.2)
    async with asyncio.timeout(20):
        with pytest.raises(UnreachableError):
            await connection.submit(hasty)
        assert await calm == b"calm"  # its link was dropped with the other's: it was sent again


@pytest.mark.fault(17)
@pytest.mark.parametrize("to_server", [True, False])
async def test_a_link_cut_at_any_byte_recovers(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy, to_server: bool
) -> None:
    proxy = make_proxy(redis_86.url)
    frame = len(echo("0" * 8).frame) if to_server else len(b"$8\r\n00000000\r\n")
    for cut_at in range(frame):
        connection = connect(proxy.url)
        await connection.connect()
        proxy.cut_after_bytes(cut_at, to_server=to_server)
        tag = f"{cut_at:08}"
        assert await connection.submit(echo(tag)) == tag.encode()
        await connection.close()


@pytest.mark.fault(44)
async def test_garbage_drops_the_link_and_the_next_one_works(
    server: Server, connect: Connect, make_proxy: MakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    proxy.fail(Fault.GARBAGE, "ECHO")
    with caplog.at_level(logging.WARNING, "chasqui"):
        assert await connection.submit(echo("x")) == b"x"
    assert proxy.accepted == 2
    assert "Protocol error" in caplog.text


@pytest.mark.fault(37)
@pytest.mark.fault(14)
@pytest.mark.slow
async def test_a_server_that_breaks_every_link_is_not_dialled_in_a_hot_loop(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    connection = connect(proxy.url, request_timeout_s=1.5)
    proxy.fail(Fault.CUT_BEFORE, "ECHO", times=1000)
    with pytest.raises(UnreachableError):
        await connection.submit(echo("x"))
    assert 2 <= proxy.accepted <= 8


async def test_links_that_break_as_they_are_handed_over_are_not_dialled_in_a_hot_loop(
    redis_86: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    dials = 0

    async def open_broken(*arguments: Any) -> Link:
        nonlocal dials
        dials += 1
        link = await open_link(*arguments)
        link.abort()
        return link

    connection = connect(redis_86.url, request_timeout_s=1.0)
    await connection.connect()
    monkeypatch.setattr(dialler, "open_link", open_broken)
    await connection.execute("CLIENT", "KILL", "SKIPME", "no", effect=Effect.READ, raises=False)
    with pytest.raises(UnreachableError):
        await connection.execute("PING", effect=Effect.READ)
    assert 1 < dials < 20


@pytest.mark.fault(6)
async def test_a_restart_under_load_is_survived(
    private_server: Callable[..., Server], connect: Connect
) -> None:
    server = private_server("redis-8.6", appendonly="yes", appendfsync="always")
    connection, control = connect(server.url), connect(server.url)
    sent = 0
    is_over = asyncio.Event()

    async def add_members() -> None:
        nonlocal sent
        while not is_over.is_set():
            member = sent = sent + 1
            await connection.execute("SADD", "all", member, effect=Effect.IDEMPOTENT)

    load = [asyncio.create_task(add_members()) for _ in range(20)]
    for _ in range(3):
        before = sent
        await until(lambda before=before: sent >= before + 500)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    is_over.set()
    await asyncio.gather(*load)
    assert await control.execute("SCARD", "all", effect=Effect.READ) == sent


# ── Servers that cannot be reached or will not let us in ────────────────────────────────────────


async def test_a_refused_first_dial_is_told_at_once(
    connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy("redis://127.0.0.1:1")
    proxy.close()
    with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{proxy.port}"):
        await connect(proxy.url).submit(echo("x"))


async def test_a_silent_host_ends_at_the_deadline(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    proxy.stall()
    with pytest.raises(UnreachableError):
        await connect(proxy.url, request_timeout_s=0.2).submit(echo("x"))


class Tally:
    """An outcome that wants to hear more, whatever it was told, as acks and events do."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self.told.append(reply)

    def set_exception(self, error: Exception, /) -> None:
        self.told.append(error)


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "unsent"])
async def test_a_request_that_was_given_up_is_told_once_and_never_sent_again(
    server: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str, is_sent: bool
) -> None:
    proxy = make_proxy(server.url)
    connection, tally = connect(proxy.url, request_timeout_s=0.3), Tally()
    await connection.connect()
    if is_sent:
        proxy.fail(Fault.SWALLOW, "INCR")
    else:
        proxy.is_refusing = True
        proxy.cut()
        await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)
    connection.post(incr(queue_name, Effect.IDEMPOTENT), tally)
    await until(lambda: bool(tally.told))
    if not is_sent:
        with pytest.raises(UnreachableError):  # by then deadlines were looked at again
            await connection.submit(echo("still gone"))
        proxy.is_refusing = False
    back = echo("back")
    back.timeout_s = WAIT_S
    assert await connection.submit(back) == b"back"
    assert len(tally.told) == 1
    assert isinstance(tally.told[0], OutcomeUnknownError if is_sent else UnreachableError)
    value = await connection.execute("GET", queue_name, effect=Effect.READ)
    assert value == (b"1" if is_sent else None)


@pytest.mark.slow
async def test_a_lost_server_is_waited_for_until_the_deadline(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(redis_86.url)
    connection = connect(proxy.url, request_timeout_s=0.5)
    await connection.connect()
    proxy.is_refusing = True
    proxy.cut()
    await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)
    with pytest.raises(UnreachableError):  # was never sent: nothing is in doubt
        await connection.submit(incr(queue_name, Effect.ONCE))
    proxy.is_refusing = False
    assert await connection.submit(echo("x")) == b"x"


@pytest.mark.fault(37)
async def test_a_wrong_password_is_refused_and_never_shown(
    private_server: Callable[..., Server], connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = private_server("redis-8.6", requirepass="right")
    for user in ("", "nobody"):
        connection = connect(server.url.replace("//", f"//{user}:{CANARY}@"))
        with pytest.raises(AuthenticationError) as caught:
            await connection.submit(echo("x"))
        error: BaseException | None = caught.value
        while error is not None:
            assert CANARY not in f"{error}{error!r}{vars(error)}"
            error = error.__cause__ or error.__context__
        assert CANARY not in repr(connection.endpoint) + str(connection.endpoint)
    with pytest.raises(AuthenticationError):
        await connect(server.url).submit(echo("x"))
    assert CANARY not in caplog.text


@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_all_ways_to_authenticate(
    private_server: Callable[..., Server], connect: Connect, kind: str
) -> None:
    server = private_server(kind, requirepass="p:a/s@s")
    admin = connect(server.url.replace("//", "//:p%3Aa%2Fs%40s@"))
    acl = ("ACL", "SETUSER", "ada", "on", ">pw1", "~*", "+@all")
    await admin.execute(*acl, effect=Effect.IDEMPOTENT)
    by_url = connect(server.url.replace("//", "//ada:pw1@"))
    assert await by_url.execute("ACL", "WHOAMI", effect=Effect.READ) == b"ada"
    asked: list[str | None] = []
    password = "pw1"

    async def provide(host: str | None) -> tuple[str | None, str | None]:
        asked.append(host)
        return "ada", password

    provided = connect(server.url, credential_provider=provide)
    assert await provided.execute("ACL", "WHOAMI", effect=Effect.READ) == b"ada"
    assert asked == ["127.0.0.1"]
    # The password is changed and the link is dropped: the new one is asked for.
    password = "pw2"
    await admin.execute("ACL", "SETUSER", "ada", "resetpass", ">pw2", effect=Effect.IDEMPOTENT)
    await admin.execute("CLIENT", "KILL", "USER", "ada", effect=Effect.IDEMPOTENT)
    assert await provided.execute("ACL", "WHOAMI", effect=Effect.READ) == b"ada"
    assert asked == ["127.0.0.1"] * 2


async def test_a_server_without_hello_is_greeted_the_old_way(
    private_server: Callable[..., Server],
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Its refusal quotes what it was sent, password and all: that must not get out."""
    caplog.set_level(logging.DEBUG)
    config = tmp_path / "no-hello.conf"
    config.write_text('rename-command HELLO ""\n')
    server = private_server("redis-8.6", requirepass=CANARY, include=str(config))
    connection = connect(server.url.replace("//", f"//:{CANARY}@") + "/2", client_name="old")
    profile = await connection.connect()
    assert (profile.name, profile.version[0], profile.xackdel) == ("redis", 8, True)
    info = (await connection.execute("CLIENT", "INFO", effect=Effect.READ)).decode()
    assert " name=old " in info
    assert " db=2 " in info
    assert " resp=2 " in info
    with pytest.raises(AuthenticationError) as caught:
        await connect(server.url.replace("//", f"//:{CANARY}-not@")).submit(echo("x"))
    with pytest.raises(AuthenticationError):
        await connect(server.url).submit(echo("x"))
    assert CANARY not in f"{caught.value}{caught.value!r}{caught.value.__context__!r}{caplog.text}"


async def test_what_a_credential_provider_raises_is_raised(
    redis_86: Server, connect: Connect
) -> None:
    async def provide(host: str | None) -> tuple[str | None, str | None]:
        raise LookupError("no vault")

    with pytest.raises(LookupError, match="no vault"):
        await connect(redis_86.url, credential_provider=provide).submit(echo("x"))


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


async def test_a_database_that_is_not_there_is_refused(redis_86: Server, connect: Connect) -> None:
    with pytest.raises(ServerError, match="DB index"):
        await connect(redis_86.url + "/99999").submit(echo("x"))


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


# ── The server's own answers ────────────────────────────────────────────────────────────────────


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
            connection.submit(scripts.call(scripts.COUNTS, names, ["g"], Effect.READ))
            for _ in range(20)
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
    waiting = connection.submit(incr("n", Effect.ONCE))
    late = connect(server.url)  # its greeting meets the busy server too
    greeted = asyncio.ensure_future(late.connect())
    await until(lambda: bool(connection._held))  # the server has said BUSY
    await killer.execute("SCRIPT", "KILL", effect=Effect.IDEMPOTENT)
    with pytest.raises(ServerError):
        await script
    assert await waiting == 1
    assert (await greeted).version >= (6, 2, 0)


async def test_busy_until_the_deadline_is_told_as_busy(
    private_server: Callable[..., Server], connect: Connect
) -> None:
    server = private_server("redis-8.6")
    connection, control = connect(server.url, request_timeout_s=0.5), connect(server.url)
    killer = connect(server.url)
    await asyncio.gather(connection.connect(), killer.connect())
    await control.execute("CONFIG", "SET", "busy-reply-threshold", "1", effect=Effect.IDEMPOTENT)
    script = control.submit(commands(("EVAL", "while true do end", "0"), effect=Effect.ONCE))
    with pytest.raises(ServerError) as caught:
        await connection.submit(incr("n", Effect.ONCE))
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


# ── Flow control ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(18)
@pytest.mark.slow
async def test_a_stalled_server_bounds_memory(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
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
    assert connection._unsent_bytes <= 10 * 1024 * 1024
    await until(lambda: len(connection._waiters) > 5_000)
    proxy.resume()
    await asyncio.gather(*calls)
    assert done == len(calls)


@pytest.mark.fault(18)
async def test_no_room_until_the_deadline_is_told(
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    connection = connect(proxy.url, request_timeout_s=0.5)
    await connection.connect()
    proxy.stall()

    def plan() -> Any:
        return (yield (commands(("ECHO", "x" * 500_000), effect=Effect.READ) for _ in range(100)))

    replies = await connection.run(plan())
    assert 2 < len(replies) < 100  # what comes after the first that had no room is not made
    assert all(isinstance(reply, UnreachableError) for reply in replies)


# ── Loops, forks, the end ───────────────────────────────────────────────────────────────────────


async def test_another_event_loop_is_refused(redis_86: Server, connect: Connect) -> None:
    connection = connect(redis_86.url)
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


async def test_close_in_another_event_loop(redis_86: Server, connect: Connect) -> None:
    connection = connect(redis_86.url)
    await connection.connect()

    def elsewhere() -> None:
        asyncio.run(connection.close())

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)
    assert not connection.is_closed
    assert await connection.submit(echo("x")) == b"x"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_close_after_the_end_of_its_event_loop(redis_86: Server, connect: Connect) -> None:
    connection = connect(redis_86.url)

    def elsewhere() -> None:
        asyncio.run(connection.connect())  # type: ignore[arg-type]
        asyncio.run(connection.close())

    await asyncio.to_thread(elsewhere)
    assert connection.is_closed
    gc.collect()


@pytest.mark.fault(51)
async def test_a_forked_child_is_refused_and_the_parent_goes_on(
    redis_86: Server, connect: Connect
) -> None:
    connection = connect(redis_86.url)
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
    redis_86: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(redis_86.url)
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
    redis_86: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    proxy.stall()
    connection = connect(proxy.url)
    waiting = connection.submit(echo("x"))
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.accepted == 1)
    await connection.close()
    with pytest.raises(ClosedError):
        await waiting
    proxy.resume()
    await asyncio.to_thread(proxy.wait_for, lambda: not proxy._links)
