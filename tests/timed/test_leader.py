"""The leader lock and the wake list: one holder, by the monotonic clock, whatever goes wrong."""

import asyncio
from collections.abc import Callable

import pytest

from chasqui.errors import ServerError
from chasqui.model.keys import Keys
from chasqui.timed.leader import FOLLOW_S, LeaderLock
from chasqui.timed.wakeup import WakeList
from chasqui.transport.connection import Connection
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.timed.facts import WAIT_S, Redis, eventually


@pytest.fixture
def connection(server: Server, connect: Callable[..., Connection]) -> Connection:
    return connect(server.url)


async def test_a_free_lock_is_taken_in_chasquimqs_form(
    keys: Keys, connection: Connection, redis: Redis
):
    lock = LeaderLock(keys.promoter_lock, "me")
    assert not lock.is_held
    assert await lock.hold(connection)
    assert lock.is_held
    assert await redis("GET", keys.promoter_lock) == b"me"
    assert 0 < await redis("PTTL", keys.promoter_lock) <= 5000


async def test_a_held_lock_is_refused_and_shows_when_to_come_back(
    keys: Keys, connection: Connection, redis: Redis
):
    await redis("SET", keys.promoter_lock, "other", "PX", 300)
    lock = LeaderLock(keys.promoter_lock, "me")
    assert not await lock.hold(connection)
    assert not lock.is_held
    assert 0 < lock.next_step_s <= 0.3
    assert 0 < lock.free_in_s <= 0.3
    # Renewed by its holder meanwhile: the next look shows that.
    await redis("SET", keys.promoter_lock, "other", "EX", 1000)
    lock._look_at_s = 0.1
    assert not await lock.hold(connection)
    assert 0 < lock.next_step_s <= FOLLOW_S
    assert lock.free_in_s > 900
    await redis("DEL", keys.promoter_lock)
    assert not await lock.hold(connection), "there was no look: none was due"
    assert await lock.hold(connection, is_freed=True)


async def test_a_lock_without_an_end_is_left_alone(
    keys: Keys, connection: Connection, redis: Redis
):
    await redis("SET", keys.promoter_lock, "operator")
    lock = LeaderLock(keys.promoter_lock, "me")
    assert not await lock.hold(connection)
    assert not await lock.hold(connection)
    assert 0 < lock.next_step_s <= FOLLOW_S
    assert await redis("GET", keys.promoter_lock) == b"operator"


async def test_a_renewal_is_due_before_the_end_and_keeps_it(
    keys: Keys, connection: Connection, redis: Redis
):
    lock = LeaderLock(keys.promoter_lock, "me", ttl_s=1000)
    await lock.hold(connection)
    await redis("PEXPIRE", keys.promoter_lock, 5000)
    assert await lock.hold(connection)
    assert await redis("PTTL", keys.promoter_lock) <= 5000, "no renewal was due"
    lock._renew_at_s = 0.0
    assert await lock.hold(connection)
    assert await redis("PTTL", keys.promoter_lock) > 900_000


async def test_a_leader_notices_at_its_renewal_that_another_leads(
    keys: Keys, connection: Connection, redis: Redis
):
    lock = LeaderLock(keys.promoter_lock, "me")
    await lock.hold(connection)
    await redis("SET", keys.promoter_lock, "other", "EX", 5)
    lock._renew_at_s = 0.0
    assert not await lock.hold(connection)
    assert await redis("GET", keys.promoter_lock) == b"other"


@pytest.mark.fault(34)
@pytest.mark.slow
async def test_a_lock_that_was_not_renewed_is_over_and_goes_to_the_next(
    keys: Keys, connection: Connection
):
    first, second = (
        LeaderLock(keys.promoter_lock, "first", ttl_s=1),
        LeaderLock(keys.promoter_lock, "second", ttl_s=1000),
    )
    await first.hold(connection)
    await eventually(lambda: second.hold(connection))
    assert not first.is_held
    assert not await first.hold(connection)


async def test_only_the_holder_releases(keys: Keys, connection: Connection, redis: Redis):
    lock = LeaderLock(keys.promoter_lock, "me")
    await lock.hold(connection)
    await redis("SET", keys.promoter_lock, "other", "EX", 5)
    await lock.release(connection)
    assert await redis("GET", keys.promoter_lock) == b"other"
    assert not await redis("EXISTS", lock.freed)


async def test_a_release_frees_the_lock_and_wakes_a_sleeper(
    keys: Keys, connection: Connection, redis: Redis, connect: Callable[..., Connection]
):
    lock = LeaderLock(keys.promoter_lock, "me")
    await lock.hold(connection)
    wake_list = WakeList(connect(str_url(connection)), lambda: None)
    wake_list.listen(lock.freed, WAIT_S)
    await lock.release(connection)
    await asyncio.wait({wake_list._waiting}, timeout=WAIT_S)
    assert wake_list.take_wake()
    assert not await redis("EXISTS", keys.promoter_lock)
    assert not lock.is_held
    await wake_list.close()


async def test_an_error_never_counts_as_success(keys: Keys, connection: Connection, redis: Redis):
    await redis("LPUSH", keys.promoter_lock, "no string")
    lock = LeaderLock(keys.promoter_lock, "me")
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await lock.hold(connection)
    assert not lock.is_held
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await lock.hold(connection)
    assert not lock.is_held


@pytest.mark.parametrize("command", ["EVALSHA", "GETEX", "PTTL"])
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda one: one.name)
async def test_a_cut_link_neither_loses_nor_doubles_the_lock(
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
    lock = LeaderLock(keys.promoter_lock, "me", ttl_s=1000)
    if command == "PTTL":
        await redis("SET", keys.promoter_lock, "other", "EX", 1000)
        await lock.hold(connection)
        lock._look_at_s = 0.1
    elif command == "GETEX":
        await lock.hold(connection)
        lock._renew_at_s = 0.0
    proxy.fail(fault, command)
    assert await lock.hold(connection) == (command != "PTTL")
    assert await redis("GET", keys.promoter_lock) == (b"other" if command == "PTTL" else b"me")


async def test_a_wake_list_wakes_once_per_push_and_is_silent_otherwise(
    keys: Keys, redis: Redis, connect: Callable[..., Connection], connection: Connection
):
    wake_list = WakeList(connect(str_url(connection)), lambda: None)
    assert not wake_list.take_wake()
    await redis("LPUSH", keys.wake, "1")
    wake_list.listen(keys.wake, WAIT_S)
    await asyncio.wait({wake_list._waiting}, timeout=WAIT_S)
    assert wake_list.take_wake()
    assert not wake_list.take_wake()
    wake_list.listen(keys.wake, 0.01)
    await asyncio.wait({wake_list._waiting}, timeout=WAIT_S)
    assert not wake_list.take_wake(), "nobody pushed: the wait came to its end"
    await wake_list.close()


async def test_a_wake_list_that_lost_its_link_counts_as_woken(
    server: Server,
    keys: Keys,
    connect: Callable[..., Connection],
    make_proxy: Callable[[str], Proxy],
):
    proxy = make_proxy(server.url)
    wake_list = WakeList(connect(proxy.url), lambda: None)
    proxy.fail(Fault.CUT_AFTER, "BLPOP")
    wake_list.listen(keys.wake, 0.01)
    await asyncio.wait({wake_list._waiting}, timeout=WAIT_S)
    assert wake_list.take_wake()
    wake_list.listen(keys.wake, WAIT_S)
    assert wake_list._waiting is None, "it takes a rest before it tries again"
    await wake_list.close()


def str_url(connection: Connection) -> str:
    host, port = connection.endpoint.hosts[0]
    return f"redis://{host}:{port}"
