"""The asyncio connection when its link is lost, or the server does not let it in."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chasqui._core.entry import EntryBuilder
from chasqui.errors import (
    AuthenticationError,
    OutcomeUnknownError,
    UnreachableError,
)
from chasqui.transport import dialler
from chasqui.transport.link import Link, open_link
from chasqui.transport.request import Effect, commands
from tests.chaos.cancels import echo
from tests.fixtures import Connect, MakeProxy, incr, until
from tests.proxy import WAIT_S, Fault
from tests.servers import Server

pytestmark = pytest.mark.both_loops

CANARY = "Kanari-7f3a"


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
    connection = connect(proxy.url)
    await connection.connect()
    proxy.fail(Fault.SWALLOW, "INCR", times=100)
    expected = UnreachableError if effect is Effect.READ else OutcomeUnknownError
    async with asyncio.timeout(10):
        with pytest.raises(expected):
            await connection.submit(incr(queue_name, effect, timeout_s=0.3))


async def test_a_short_deadline_is_kept_beside_a_long_one(
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
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
    server: Server, connect: Connect, make_proxy: MakeProxy, to_server: bool
) -> None:
    proxy = make_proxy(server.url)
    frame = len(echo("0" * 8).frame) if to_server else len(b"$8\r\n00000000\r\n")
    for cut_at in range(frame):
        connection = connect(proxy.url)
        await connection.connect()
        proxy.cut_after_bytes(cut_at, to_server=to_server)
        tag = f"{cut_at:08}"
        assert await connection.submit(echo(tag)) == tag.encode()
        await connection.close()


@pytest.mark.fault(17)
async def test_a_reply_that_broke_off_is_built_anew_though_its_link_is_kept(
    server: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.execute("XADD", queue_name, "*", "d", b"x" * 99, effect=Effect.ONCE)
    kept, builder = connection._flow.link, EntryBuilder("range")
    proxy.cut_after_bytes(40, to_server=False)
    read = commands(("XRANGE", queue_name, "-", "+"), effect=Effect.READ, builder=builder)
    assert [entry.envelope for entry in await connection.submit(read)] == [b"x" * 99]
    assert connection._flow.link is not kept


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
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.connect()
    proxy.fail(Fault.CUT_BEFORE, "ECHO", times=1000)
    with pytest.raises(UnreachableError):
        await connection.execute("ECHO", "x", effect=Effect.READ, timeout_s=1.5)
    assert 2 <= proxy.accepted <= 8


async def test_links_that_break_as_they_are_handed_over_are_not_dialled_in_a_hot_loop(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    dials = 0

    async def open_broken(*arguments: Any) -> Link:
        nonlocal dials
        dials += 1
        link = await open_link(*arguments)
        link.abort()
        return link

    connection = connect(server.url, request_timeout_s=1.0)
    await connection.connect()
    monkeypatch.setattr(dialler, "open_link", open_broken)
    await connection.execute("CLIENT", "KILL", "SKIPME", "no", effect=Effect.READ, raises=False)
    with pytest.raises(UnreachableError):
        await connection.execute("PING", effect=Effect.READ)
    assert 1 < dials < 20


@pytest.mark.fault(6)
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_restart_under_load_is_survived(
    kind: str, private_server: Callable[..., Server], connect: Connect
) -> None:
    server = private_server(kind, appendonly="yes", appendfsync="always")
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
    server: Server, connect: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
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
    server: Server, connect: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
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
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_wrong_password_is_refused_and_never_shown(
    kind: str,
    private_server: Callable[..., Server],
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    server = private_server(kind, requirepass="right")
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


async def test_a_user_without_a_password_is_not_taken_for_another(
    server: Server, connect: Connect, queue_name: str
) -> None:
    rights = ("on", "nopass", "~*", "+@all")
    admin = connect(server.url)
    await admin.execute("ACL", "SETUSER", queue_name, *rights, effect=Effect.IDEMPOTENT)

    async def provide(host: str | None) -> tuple[str | None, str | None]:
        return queue_name, None

    for connection in (
        connect(server.url.replace("//", f"//{queue_name}@")),
        connect(server.url.replace("//", f"//{queue_name}:@")),
        connect(server.url, credential_provider=provide),
    ):
        assert await connection.execute("ACL", "WHOAMI", effect=Effect.READ) == queue_name.encode()
    with pytest.raises(AuthenticationError):
        await connect(server.url.replace("//", "//nobody@")).submit(echo("x"))


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
    server: Server, connect: Connect
) -> None:
    async def provide(host: str | None) -> tuple[str | None, str | None]:
        raise LookupError("no vault")

    with pytest.raises(LookupError, match="no vault"):
        await connect(server.url, credential_provider=provide).submit(echo("x"))


@pytest.mark.parametrize("given", [None, "ab", ("ada",), ("ada", "pw", "x"), ("ada", b"pw")])
async def test_a_credential_provider_that_gives_no_pair_is_told(
    server: Server, connect: Connect, given: Any
) -> None:
    async def provide(host: str | None) -> Any:
        return given

    with pytest.raises(TypeError, match="credential_provider must give"):
        await connect(server.url, credential_provider=provide).submit(echo("x"))
