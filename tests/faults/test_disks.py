"""Servers that lose their memory, and some of what they wrote: what was confirmed is there.

An add is confirmed by its return; where the AOF is synced once a second, by that of a queue with
`durable="disk"`. What is not confirmed may be lost, is counted apart, and nothing else is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chasqui import sync
from chasqui.model.keys import Keys
from tests.crash.conftest import Fleet, eventually
from tests.faults.disk import DiskServer, build_shim
from tests.ledger import audit
from tests.servers import KINDS, Server

#: These say truly when something is on the disk. Valkey says so at once with everysec.
CONFIRMING = ("redis-8.6",)
COUNT = 30


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def disk_server(shim: Path, kind: str) -> Iterator[Callable[..., DiskServer]]:
    started: list[DiskServer] = []

    def start(**settings: str) -> DiskServer:
        started.append(DiskServer(kind, shim, appendfsync="everysec", **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


def add(fleet: Fleet, **options: Any) -> list[int]:
    """Add jobs through a queue of its own; their numbers."""
    first = len(fleet.added)
    numbers = list(range(first, first + COUNT))
    with sync.Queue(fleet.queue_name, redis_url=fleet.url, **options) as queue:
        queue.add_bulk([{"name": "quick", "data": {"n": n}} for n in numbers])
    fleet.added += numbers
    return numbers


def stall_under_load(fleet: Fleet, server: DiskServer) -> None:
    """Stall the disk while the server is syncing: from now on it does not even write."""
    server.stall()
    begun = server.syncs_begun
    with sync.Queue(fleet.queue_name, redis_url=fleet.url) as queue:

        def is_stuck() -> bool:
            fleet.added.append(len(fleet.added))
            queue.add("quick", {"n": fleet.added[-1]})
            return server.syncs_begun > begun

        eventually(is_stuck, "the server waits for its disk")


def settle(fleet: Fleet, server: DiskServer, confirms: bool) -> list[int]:
    """Add jobs that are on the disk for certain."""
    if confirms:
        return add(fleet, durable="disk")
    added = add(fleet)

    def is_written() -> bool:
        told = fleet.client.info("persistence")
        return not told["aof_buffer_length"] and not told["aof_pending_bio_fsync"]

    eventually(lambda: is_written() and server.has_settled, "the AOF is written and synced")
    return added


def check(fleet: Fleet, confirmed: list[int]) -> None:
    """All that was confirmed is there, and nothing that was never added."""
    unknown = set(fleet.added) - set(confirmed)
    found = audit(confirmed, fleet.ledger.read(), fleet.census(), unknown=unknown)
    there = fleet.census().stream
    print(f"{len(unknown - set(there))} of {len(unknown)} unconfirmed jobs are lost")
    assert found.faults == {}


def run_what_is_left(fleet: Fleet) -> None:
    """A worker finds the queue as it is now, and does it all."""
    left = set(fleet.census().stream)
    worker = fleet.start("after")
    eventually(lambda: fleet.census().is_empty, "all is done")
    assert {fact.n for fact in fleet.ledger.read("end") if fact.who == "after"} == left
    worker.kill()


@pytest.mark.fault(6, control=True)
@pytest.mark.parametrize("kind", KINDS)
def test_without_an_aof_a_crash_loses_jobs(
    kind: str, private_server: Callable[..., Server], make_fleet: Callable[[str], Fleet]
) -> None:
    server = private_server(kind)
    fleet = make_fleet(server.url)
    add(fleet)
    server.kill()
    server.start()
    with pytest.raises(AssertionError, match="lost"):
        check(fleet, fleet.added)


@pytest.mark.fault(7)
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_while_the_disk_is_slow(
    kind: str, disk_server: Callable[..., DiskServer], make_fleet: Callable[[str], Fleet]
) -> None:
    server = disk_server()
    fleet = make_fleet(server.url)
    confirmed = settle(fleet, server, kind in CONFIRMING)
    stall_under_load(fleet, server)
    add(fleet)
    server.kill()
    server.start()
    check(fleet, confirmed)
    run_what_is_left(fleet)


@pytest.mark.fault(7)
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_while_a_rewrite_keeps_the_disk_busy(
    kind: str, disk_server: Callable[..., DiskServer], make_fleet: Callable[[str], Fleet]
) -> None:
    """The server does not sync meanwhile, and so confirms nothing until the rewrite is over."""
    server = disk_server(no_appendfsync_on_rewrite="yes", rdb_key_save_delay="20000")
    fleet = make_fleet(server.url)
    fleet.client.mset({f"ballast-{i}": i for i in range(50)})
    fleet.client.bgrewriteaof()
    confirmed = settle(fleet, server, kind in CONFIRMING)
    add(fleet)
    print(f"{server.cut_power()} bytes are gone")
    server.start()
    check(fleet, confirmed)


@pytest.mark.fault(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut(
    kind: str, disk_server: Callable[..., DiskServer], make_fleet: Callable[[str], Fleet]
) -> None:
    """Lost acks are runs again, and no more than those."""
    server = disk_server()
    fleet = make_fleet(server.url)
    confirmed = settle(fleet, server, kind in CONFIRMING)
    server.stall()
    first = fleet.start("first", claim_min_idle_ms=30_000)
    fleet.ended(len(confirmed))
    eventually(lambda: not fleet.census().pending, "all is acknowledged")
    add(fleet)
    first.kill()
    print(f"{server.cut_power()} bytes are gone")
    server.start()
    check(fleet, confirmed)
    back = set(fleet.census().stream)
    run_what_is_left(fleet)
    assert fleet.client.xlen(Keys(fleet.queue_name).stream) == 0
    assert set(fleet.audit().extra) <= back


@pytest.mark.fault(7, control=True)
@pytest.mark.fault(8, control=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_power_cut", [False, True], ids=["crash", "power cut"])
def test_what_was_not_confirmed_may_be_lost(
    kind: str,
    is_power_cut: bool,
    disk_server: Callable[..., DiskServer],
    make_fleet: Callable[[str], Fleet],
) -> None:
    server = disk_server()
    fleet = make_fleet(server.url)
    stall_under_load(fleet, server)
    taken_for_confirmed = add(fleet)
    if is_power_cut:
        server.cut_power()
    else:
        server.kill()
    server.start()
    with pytest.raises(AssertionError, match="lost"):
        check(fleet, taken_for_confirmed)
