"""Sentinel and Cluster: the queue's server is found, and followed when it moves."""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chasqui.errors import AuthenticationError, ServerError, UnreachableError
from chasqui.model import clock
from chasqui.model.config import Endpoint
from chasqui.scripts import managing
from chasqui.scripts.loading import call
from chasqui.transport import blocking_dialler, dialler
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request, Script
from chasqui.transport.topology import Directory
from tests import tls
from tests.servers import KINDS, Server
from tests.servers.groups import Cluster, Watched, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Connect = Callable[..., Connection]
ConnectBlocking = Callable[..., BlockingConnection]

CANARY = "Kanari-5f70"

#: Sentinels that stand against each other try again after a while.
ELECTION_S = 90.0

#: Those whose sentinels can be told to look around more often than every 10 s.
QUICK = ["redis-8.6", "valkey-9"]


@pytest.fixture(scope="module", params=KINDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param, cluster_node_timeout="5000") as group:
        yield group


def keys(queue_name: str) -> tuple[str, bytes]:
    """A key of the queue as text, and the queue's own."""
    return f"{{chasqui:{queue_name}}}:n", b"{chasqui:%b}:stream" % queue_name.encode()


def incr_by_script(name: str) -> Request:
    """INCR in a script of its own, so that no node has it yet."""
    source = f"return redis.call('incr', KEYS[1]) -- {uuid.uuid4()}".encode()
    script = Script("incr", source, hashlib.sha1(source).hexdigest().encode())
    return call(script, [name.encode()], [], Effect.ONCE)


def other_than(cluster: Cluster, owner: Server) -> Server:
    return next(member for member in cluster.members if member is not owner)


# ── Cluster ─────────────────────────────────────────────────────────────────────────────────────


async def test_each_queue_is_served_by_its_own_node(cluster: Cluster, connect: Connect) -> None:
    ports = set()
    for i in range(12):
        name, key = keys(f"spread-{i}")
        connection = connect(cluster.url, key=key)
        await connection.execute("INCR", name, effect=Effect.ONCE)
        link = connection._flow.link
        assert link is not None
        ports.add(link.endpoint.hosts[0][1])
        assert link.endpoint.hosts[0][1] == cluster.owner(name).port
    assert ports == {member.port for member in cluster.members}


async def test_a_plain_url_of_the_wrong_node_is_led_to_the_right_one(
    cluster: Cluster, connect: Connect, queue_name: str
) -> None:
    name, key = keys(queue_name)
    wrong = other_than(cluster, cluster.owner(name))
    connection = connect(wrong.url, key=key)
    calls = [connection.execute("INCR", name, effect=Effect.ONCE) for _ in range(50)]
    assert sorted(await asyncio.gather(*calls)) == list(range(1, 51))


@pytest.mark.fault(12)
async def test_a_moved_slot_is_followed_under_load(
    cluster: Cluster, connect: Connect, queue_name: str
) -> None:
    name, key = keys(queue_name)
    connection = connect(cluster.url, key=key)
    total = 0
    is_over = asyncio.Event()

    async def count() -> None:
        nonlocal total
        while not is_over.is_set():
            await connection.execute("INCR", name, effect=Effect.ONCE)
            total += 1

    load = [asyncio.create_task(count()) for _ in range(10)]
    slot = cluster.slot(name)
    for _ in range(4):
        source = await asyncio.to_thread(cluster.owner, name)
        await asyncio.to_thread(cluster.move, slot, source, other_than(cluster, source))
        await connection.execute("INCR", name, effect=Effect.ONCE)
        total += 1
    is_over.set()
    await asyncio.gather(*load)
    assert int(await connection.execute("GET", name, effect=Effect.READ)) == total


@pytest.mark.fault(12)
async def test_a_slot_in_the_middle_of_its_move_is_asked_for(
    cluster: Cluster, connect: Connect, queue_name: str
) -> None:
    name, key = keys(queue_name)
    connection = connect(cluster.url, key=key)
    await connection.connect()
    slot, source = cluster.slot(name), cluster.owner(name)
    target = other_than(cluster, source)
    cluster.start_move(slot, source, target)
    calls = [connection.execute("INCR", name, effect=Effect.ONCE) for _ in range(20)]
    assert sorted(await asyncio.gather(*calls)) == list(range(1, 21))
    # A script that the target has never seen.
    assert await connection.submit(incr_by_script(name)) == 21
    # Several keys, of which some are not there: neither node can tell until the move is over.
    names = [f"{name}:{i}".encode() for i in range(5)]
    counts = connection.submit(call(managing.COUNTS, names, ["g"], Effect.READ))
    assert ask(source.port, f"EXISTS {name}").startswith("-ASK")
    await asyncio.to_thread(cluster.finish_move, slot, source, target)
    assert isinstance(await counts, list)
    assert await connection.execute("INCR", name, effect=Effect.ONCE) == 22
    assert len(connection._flow.links) == 1


@pytest.mark.fault(12)
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_slot_is_not_asked_for_after_a_long_sleep(
    cluster: Cluster,
    connect: Connect,
    connect_blocking: ConnectBlocking,
    queue_name: str,
    is_blocking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine slept while the other node was dialled. By now nobody there may remember what
    was sent before."""
    name, key = keys(queue_name)
    slot, source = cluster.slot(name), cluster.owner(name)
    target = other_than(cluster, source)
    slept_s, real = 0, clock.boot_s
    monkeypatch.setattr(clock, "boot_s", lambda: real() + slept_s)

    def asleep(open_link: Callable[..., object]) -> Callable[..., object]:
        def open_late(endpoint: Endpoint, *rest: object) -> object:
            nonlocal slept_s
            if endpoint.hosts[0][1] == target.port:
                slept_s = 3600
            return open_link(endpoint, *rest)

        return open_late

    awaited, blocking = connect(cluster.url, key=key), connect_blocking(cluster.url, key=key)
    await awaited.connect()
    blocking.connect()
    for module in (dialler, blocking_dialler):
        monkeypatch.setattr(module, "open_link", asleep(module.open_link))
    cluster.start_move(slot, source, target)

    async def increase() -> object:
        if is_blocking:
            return await asyncio.to_thread(blocking.execute, "INCR", name, effect=Effect.ONCE)
        return await awaited.execute("INCR", name, effect=Effect.ONCE)

    with pytest.raises(ServerError, match="ASK"):
        await increase()
    assert slept_s
    await asyncio.to_thread(cluster.finish_move, slot, source, target)
    assert await increase() == 1


@pytest.mark.fault(13)
async def test_a_slot_without_a_node_is_waited_for(
    cluster: Cluster, connect: Connect, queue_name: str
) -> None:
    name, key = keys(queue_name)
    connection = connect(cluster.url, key=key)
    await connection.connect()
    slot, owner = cluster.slot(name), cluster.owner(name)
    ask(owner.port, f"CLUSTER DELSLOTS {slot}")
    waiting = asyncio.ensure_future(connection.execute("INCR", name, effect=Effect.ONCE))
    while not connection._flow.held and not waiting.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    ask(owner.port, f"CLUSTER ADDSLOTS {slot}")
    assert await waiting == 1
    await asyncio.to_thread(cluster.wait_until_whole)


@pytest.mark.fault(12)
def test_the_blocking_connection_follows_a_slot(
    cluster: Cluster, connect_blocking: ConnectBlocking, queue_name: str
) -> None:
    name, key = keys(queue_name)
    connection = connect_blocking(cluster.url, key=key)
    assert connection.execute("INCR", name, effect=Effect.ONCE) == 1
    slot, source = cluster.slot(name), cluster.owner(name)
    target = other_than(cluster, source)
    cluster.move(slot, source, target)
    assert connection.execute("INCR", name, effect=Effect.ONCE) == 2
    fresh = f"{name}-fresh"
    cluster.start_move(slot, target, source)
    assert connection.execute("INCR", fresh, effect=Effect.ONCE) == 1
    assert connection.call(incr_by_script(fresh)) == 2
    cluster.finish_move(slot, target, source)
    assert connection.execute("INCR", name, effect=Effect.ONCE) == 3
    assert connection.execute("INCR", fresh, effect=Effect.ONCE) == 3


def set_user(cluster: Cluster, user: str, *rules: str) -> None:
    """Make or change a user on every node; those who are in as him are put out."""
    for member in cluster.members:
        assert ask(member.port, f"ACL SETUSER {user} {' '.join(rules)}").startswith("+OK")
        ask(member.port, f"CLIENT KILL USER {user}")


@pytest.mark.fault(37)
async def test_a_wrong_password_is_final_and_never_shown(
    cluster: Cluster,
    connect: Connect,
    connect_blocking: ConnectBlocking,
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    name, key = keys(queue_name)
    url = cluster.url.replace("//", f"//{queue_name}:{CANARY}@")
    set_user(cluster, queue_name, "on", f">{CANARY}", "~*", "+@all")
    connection, blocking = connect(url, key=key), connect_blocking(url, key=key)
    assert await connection.execute("INCR", name, effect=Effect.ONCE) == 1
    assert blocking.execute("INCR", name, effect=Effect.ONCE) == 2
    set_user(cluster, queue_name, "resetpass", ">another")
    told = []
    for late in (connection, connect(url, key=key)):
        with pytest.raises(AuthenticationError, match="refused the credentials") as refused:
            await late.execute("GET", name, effect=Effect.READ)
        told.append(repr(refused.value))
    for one in (blocking, connect_blocking(url, key=key)):
        with pytest.raises(AuthenticationError, match="refused the credentials") as refused:
            one.execute("GET", name, effect=Effect.READ)
        told.append(repr(refused.value))
    assert CANARY not in f"{told}{caplog.text}"


async def test_a_user_of_the_cluster_needs_no_password_but_his_rights(
    cluster: Cluster, connect: Connect, queue_name: str
) -> None:
    _, key = keys(queue_name)
    url = cluster.url.replace("//", f"//{queue_name}@")
    rights = "on nopass ~* -@all +ping +client|setname +client|setinfo +command|info +acl|whoami"
    if cluster.members[0].name == "redis-6.2":
        rights = rights.replace(" +client|setinfo", "")  # not known there, and not missed
    set_user(cluster, queue_name, rights)
    with pytest.raises(AuthenticationError, match="refused the credentials"):
        await connect(url, key=key).execute("ACL", "WHOAMI", effect=Effect.READ)
    set_user(cluster, queue_name, "+cluster|slots")
    answer = await connect(url, key=key).execute("ACL", "WHOAMI", effect=Effect.READ)
    assert answer == queue_name.encode()


# ── Sentinel ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(10)
@pytest.mark.parametrize("kind", QUICK)
async def test_a_failover_is_followed(kind: str, connect: Connect) -> None:
    with Watched(kind, replicas=1, sentinels=1, down_after_ms=3000) as group:
        connection = connect(group.url, request_timeout_s=ELECTION_S)
        assert await connection.execute("SADD", "all", 0, effect=Effect.IDEMPOTENT) == 1
        old = group.primary
        await asyncio.to_thread(group.fail_over)
        member = 0
        while True:
            member += 1
            await connection.execute("SADD", "all", member, effect=Effect.IDEMPOTENT)
            link = connection._flow.link
            if link is not None and link.endpoint.hosts[0][1] != old.port:
                break
        # What the old primary took while it was being left may be lost; what came after is there.
        assert await connection.execute("SISMEMBER", "all", member, effect=Effect.READ) == 1


@pytest.mark.fault(10)
@pytest.mark.parametrize("kind", QUICK)
async def test_a_killed_primary_is_replaced(kind: str, connect: Connect) -> None:
    with Watched(kind, replicas=2, sentinels=3) as group:
        connection = connect(group.url, request_timeout_s=ELECTION_S)
        await connection.execute("SET", "before", "1", effect=Effect.IDEMPOTENT)
        assert await connection.execute("WAIT", 2, 10_000, effect=Effect.READ) == 2
        old = group.primary
        await asyncio.to_thread(old.kill)
        await connection.execute("SET", "after", "1", effect=Effect.IDEMPOTENT)
        assert await connection.execute("EXISTS", "before", "after", effect=Effect.READ) == 2
        assert connection._flow.link is not None
        assert connection._flow.link.endpoint.hosts[0][1] != old.port


@pytest.mark.fault(10)
def test_the_blocking_connection_follows_a_failover(connect_blocking: ConnectBlocking) -> None:
    with Watched("redis-8.6", replicas=1, sentinels=1) as group, ThreadPoolExecutor(1) as pool:
        connection = connect_blocking(group.url, request_timeout_s=ELECTION_S)
        connection.execute("SET", "before", "1", effect=Effect.IDEMPOTENT)
        assert connection.execute("WAIT", 1, 10_000, effect=Effect.READ) == 1
        old = group.primary
        old.kill()
        waiting = pool.submit(connection.execute, "SET", "after", "1", effect=Effect.IDEMPOTENT)
        assert waiting.result() == b"OK"
        assert connection.execute("EXISTS", "before", "after", effect=Effect.READ) == 2


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_one_that_refuses_us_decides_nothing_while_others_are_away(
    scheme: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    """It may be the one that came back without its users."""
    refusing = private_server("redis-8.6", requirepass="right")
    path = "/primary?sentinel_password=wrong" if scheme == "redis+sentinel" else ""
    both = f"127.0.0.1:{refusing.port},127.0.0.1:1"
    for hosts, told in ((both, UnreachableError), (both.split(",")[0], AuthenticationError)):
        endpoint = Endpoint.parse(f"{scheme}://:wrong@{hosts}{path}")
        with pytest.raises(told):
            Directory(endpoint).locate(endpoint, queue_name.encode())


async def test_no_sentinel_at_all_is_told(connect: Connect) -> None:
    with pytest.raises(UnreachableError, match="no sentinel answered that knows one"):
        await connect("redis+sentinel://127.0.0.1:1/mymaster").execute("PING", effect=Effect.READ)


@pytest.mark.fault(37)
@pytest.mark.parametrize("kind", KINDS)
async def test_sentinels_have_credentials_of_their_own(
    kind: str,
    connect: Connect,
    connect_blocking: ConnectBlocking,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    with Watched(kind, replicas=0, sentinels=1, down_after_ms=30_000) as group:
        sentinel, primary = group.members[-1].port, group.primary
        ask(primary.port, "ACL SETUSER ada on >theirs ~* +@all")
        ask(sentinel, f"ACL SETUSER eve on >{CANARY} -@all +sentinel|masters")
        ask(sentinel, f"ACL SETUSER default resetpass >{CANARY}")  # what requirepass does
        assert ask(sentinel, "PING").startswith("-NOAUTH")
        url = group.url.replace("//", "//ada:theirs@")
        for user in ("", "sentinel_username=eve&"):
            right = f"{url}?{user}sentinel_password={CANARY}"
            connection = connect(right)
            assert await connection.execute("ACL", "WHOAMI", effect=Effect.READ) == b"ada"
            whoami = connect_blocking(right).execute("ACL", "WHOAMI", effect=Effect.READ)
            assert whoami == b"ada"
            told += [repr(connection.endpoint), str(connection.endpoint)]
        for wrong in ("", f"?sentinel_password={CANARY}-not", "?sentinel_username=nobody"):
            with pytest.raises(AuthenticationError, match="sentinel_password in") as refused:
                await connect(url + wrong).execute("PING", effect=Effect.READ)
            told.append(repr(refused.value))
    assert CANARY not in f"{told}{caplog.text}"


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────


def locate_by_tls(url: str, port: int, queue_name: str, folder: Path, name: str) -> int:
    """The port of the server that a node names which has a certificate for `name`."""
    authority = tls.make_authority(folder, "authority")
    with tls.TlsRelay(port, tls.make_certificate(folder, authority, name)) as relay:
        where = url.format(f"127.0.0.1:{relay.port}")
        endpoint = Endpoint.parse(f"{where}?ssl_ca_certs={authority}", tls=True)
        return Directory(endpoint).locate(endpoint, keys(queue_name)[1]).hosts[0][1]


@pytest.mark.fault(38)
def test_a_node_is_asked_only_if_its_certificate_has_its_name(
    cluster: Cluster, queue_name: str, tmp_path: Path
) -> None:
    where = ("redis+cluster://{}", cluster.members[0].port, queue_name, tmp_path)
    assert locate_by_tls(*where, "127.0.0.1") == cluster.owner(keys(queue_name)[0]).port
    with pytest.raises(UnreachableError, match="certificate"):
        locate_by_tls(*where, "elsewhere.example")


@pytest.mark.fault(38)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sentinel_is_asked_only_if_its_certificate_has_its_name(
    kind: str, queue_name: str, tmp_path: Path
) -> None:
    with Watched(kind, replicas=0, sentinels=1, down_after_ms=30_000) as group:
        where = ("redis+sentinel://{}/mymaster", group.members[-1].port, queue_name, tmp_path)
        assert locate_by_tls(*where, "127.0.0.1") == group.primary.port
        with pytest.raises(UnreachableError, match="certificate"):
            locate_by_tls(*where, "elsewhere.example")
