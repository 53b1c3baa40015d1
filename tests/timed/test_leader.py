"""The lease and the bell: held by one, judged by the monotonic clock, lost by no error."""

import asyncio
from collections.abc import Callable

import pytest

from chasqui.transport.connection import Connection
from chasqui.errors import ServerError
from chasqui.model.keys import Keys
from chasqui.leader import FOLLOW_S, Bell, Lease
from tests.timed.facts import WAIT_S, Redis, eventually
from tests.proxy import Fault, Proxy
from tests.servers import Server


@pytest.fixture
def connection(server: Server, connect: Callable[..., Connection]) -> Connection:
    return connect(server.url)


async def test_a_free_lease_is_taken_in_chasquimqs_form(
    keys: Keys, connection: Connection, redis: Redis
):
    lease = Lease(keys.promoter_lock, "me")
    assert not lease.is_held
    assert await lease.hold(connection)
    assert lease.is_held
    assert await redis("GET", keys.promoter_lock) == b"me"
    assert 0 < await redis("PTTL", keys.promoter_lock) <= 5000


async def test_a_held_lease_is_refused_and_shows_when_to_come_back(
    keys: Keys, connection: Connection, redis: Redis
):
    await redis("SET", keys.promoter_lock, "other", "PX", 300)
    lease = Lease(keys.promoter_lock, "me")
    assert not await lease.hold(connection)
    assert not lease.is_held
    assert 0 < lease.next_step_s <= 0.3
    assert 0 < lease.free_in_s <= 0.3
    # Renewed by its holder meanwhile: the next look shows that.
    await redis("SET", keys.promoter_lock, "other", "EX", 1000)
    lease._look_at_s = 0.1
    assert not await lease.hold(connection)
    assert 0 < lease.next_step_s <= FOLLOW_S
    assert lease.free_in_s > 900
    await redis("DEL", keys.promoter_lock)
    assert not await lease.hold(connection), "there was no look: none was due"
    assert await lease.hold(connection, is_freed=True)


async def test_a_lock_without_an_end_is_left_alone(
    keys: Keys, connection: Connection, redis: Redis
):
    await redis("SET", keys.promoter_lock, "operator")
    lease = Lease(keys.promoter_lock, "me")
    assert not await lease.hold(connection)
    assert not await lease.hold(connection)
    assert 0 < lease.next_step_s <= FOLLOW_S
    assert await redis("GET", keys.promoter_lock) == b"operator"


async def test_a_renewal_is_due_before_the_end_and_keeps_it(
    keys: Keys, connection: Connection, redis: Redis
):
    lease = Lease(keys.promoter_lock, "me", ttl_s=1000)
    await lease.hold(connection)
    await redis("PEXPIRE", keys.promoter_lock, 5000)
    assert await lease.hold(connection)
    assert await redis("PTTL", keys.promoter_lock) <= 5000, "no renewal was due"
    lease._renew_at_s = 0.0
    assert await lease.hold(connection)
    assert await redis("PTTL", keys.promoter_lock) > 900_000


async def test_a_leader_notices_at_its_renewal_that_another_leads(
    keys: Keys, connection: Connection, redis: Redis
):
    lease = Lease(keys.promoter_lock, "me")
    await lease.hold(connection)
    await redis("SET", keys.promoter_lock, "other", "EX", 5)
    lease._renew_at_s = 0.0
    assert not await lease.hold(connection)
    assert await redis("GET", keys.promoter_lock) == b"other"


@pytest.mark.fault(34)
@pytest.mark.slow
async def test_a_lease_that_was_not_renewed_is_over_and_goes_to_the_next(
    keys: Keys, connection: Connection
):
    first, second = (
        Lease(keys.promoter_lock, "first", ttl_s=1),
        Lease(keys.promoter_lock, "second", ttl_s=1000),
    )
    await first.hold(connection)
    await eventually(lambda: second.hold(connection))
    assert not first.is_held
    assert not await first.hold(connection)


async def test_only_the_holder_releases(keys: Keys, connection: Connection, redis: Redis):
    lease = Lease(keys.promoter_lock, "me")
    await lease.hold(connection)
    await redis("SET", keys.promoter_lock, "other", "EX", 5)
    await lease.release(connection)
    assert await redis("GET", keys.promoter_lock) == b"other"
    assert not await redis("EXISTS", lease.freed)


async def test_a_release_frees_the_lock_and_wakes_a_sleeper(
    keys: Keys, connection: Connection, redis: Redis, connect: Callable[..., Connection]
):
    lease = Lease(keys.promoter_lock, "me")
    await lease.hold(connection)
    bell = Bell(connect(str_url(connection)), lambda: None)
    bell.listen(lease.freed, WAIT_S)
    await lease.release(connection)
    await asyncio.wait({bell._waiting}, timeout=WAIT_S)
    assert bell.take_ring()
    assert not await redis("EXISTS", keys.promoter_lock)
    assert not lease.is_held
    await bell.close()


async def test_an_error_never_counts_as_success(keys: Keys, connection: Connection, redis: Redis):
    await redis("LPUSH", keys.promoter_lock, "no string")
    lease = Lease(keys.promoter_lock, "me")
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await lease.hold(connection)
    assert not lease.is_held
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await lease.hold(connection)
    assert not lease.is_held


@pytest.mark.parametrize("command", ["EVALSHA", "GETEX", "PTTL"])
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda one: one.name)
async def test_a_cut_link_neither_loses_nor_doubles_the_lease(
    server: Server,
    keys: Keys,
    redis: Redis,
    connect: Callable[..., Connection],
    make_proxy: Callable[[str], Proxy],
    command: str,
    fault: Fault,
):
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    lease = Lease(keys.promoter_lock, "me", ttl_s=1000)
    if command == "PTTL":
        await redis("SET", keys.promoter_lock, "other", "EX", 1000)
        await lease.hold(connection)
        lease._look_at_s = 0.1
    elif command == "GETEX":
        await lease.hold(connection)
        lease._renew_at_s = 0.0
    proxy.fail(fault, command)
    assert await lease.hold(connection) == (command != "PTTL")
    assert await redis("GET", keys.promoter_lock) == (b"other" if command == "PTTL" else b"me")


async def test_a_bell_rings_once_per_ring_and_is_silent_otherwise(
    keys: Keys, redis: Redis, connect: Callable[..., Connection], connection: Connection
):
    bell = Bell(connect(str_url(connection)), lambda: None)
    assert not bell.take_ring()
    await redis("LPUSH", keys.wake, "1")
    bell.listen(keys.wake, WAIT_S)
    await asyncio.wait({bell._waiting}, timeout=WAIT_S)
    assert bell.take_ring()
    assert not bell.take_ring()
    bell.listen(keys.wake, 0.01)
    await asyncio.wait({bell._waiting}, timeout=WAIT_S)
    assert not bell.take_ring(), "nobody rang: the wait came to its end"
    await bell.close()


async def test_a_bell_that_lost_its_link_counts_as_rung(
    server: Server,
    keys: Keys,
    connect: Callable[..., Connection],
    make_proxy: Callable[[str], Proxy],
):
    proxy = make_proxy(server.url)
    bell = Bell(connect(proxy.url), lambda: None)
    proxy.fail(Fault.CUT_AFTER, "BLPOP")
    bell.listen(keys.wake, 0.01)
    await asyncio.wait({bell._waiting}, timeout=WAIT_S)
    assert bell.take_ring()
    bell.listen(keys.wake, WAIT_S)
    assert bell._waiting is None, "it takes a rest before it tries again"
    await bell.close()


def str_url(connection: Connection) -> str:
    host, port = connection.endpoint.hosts[0]
    return f"redis://{host}:{port}"
