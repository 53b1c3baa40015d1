"""Servers that crash and links that break under load: nothing is lost, and work goes on."""

import time
from collections.abc import Callable

import pytest

from tests.crash.conftest import Fleet, eventually
from tests.crash.load import Load, Seed
from tests.servers import KINDS, Server

#: Work must go on this soon after the server is back. Measured: 0.3 s at most; machines are busy.
BACK_S = 5.0
#: Longer than any outage here, so that no lease lapses and every extra run is a fault.
LONG_LEASE_MS = 20_000

LONG = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.mark.fault(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("crashes", [4, pytest.param(20, marks=LONG)])
def test_a_server_that_crashes_and_comes_back(
    private_server: Callable[..., Server],
    make_fleet: Callable[[str], Fleet],
    kind: str,
    crashes: int,
) -> None:
    seed = Seed()
    server = private_server(kind, appendonly="yes", appendfsync="always")
    fleet = make_fleet(server.url)
    for who in ("one", "other"):
        fleet.start(who, claim_min_idle_ms=LONG_LEASE_MS)
    fleet.started("one", "other")
    gaps_s = []
    with Load(server.url, fleet.queue_name) as load:
        for _ in range(crashes):
            seed.sleep(0.05, 0.4)
            server.kill()
            server.start()
            back_s = time.monotonic()
            gaps_s.append(_next_end_s(fleet, back_s) - back_s)
    fleet.added, fleet.unknown = load.added, load.unknown
    fleet.ended(len(load.added))
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    print(f"{len(load.added)} jobs; back after {sorted(round(gap, 2) for gap in gaps_s)} s")
    audit = fleet.audit()
    print(f"{audit.extra_runs} extra runs, {len(load.unknown)} adds unknown")
    assert audit.faults == {}
    assert audit.extra_runs == 0
    assert max(gaps_s) < BACK_S


@pytest.mark.fault(14)
@pytest.mark.parametrize("cuts", [15, pytest.param(50, marks=LONG)])
def test_links_that_the_server_cuts(fleet: Fleet, cuts: int) -> None:
    """Only ours: the run's server has other clients."""
    seed = Seed()
    for who in ("one", "other"):
        fleet.start(who, claim_min_idle_ms=LONG_LEASE_MS)
    fleet.started("one", "other")
    with Load(fleet.url, fleet.queue_name) as load:
        for _ in range(cuts):
            seed.sleep(0.02, 0.15)
            _cut_links(fleet)
            _next_end_s(fleet, time.monotonic())
    fleet.added, fleet.unknown = load.added, load.unknown
    fleet.ended(len(load.added))
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    print(f"{len(load.added)} jobs")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0


def _next_end_s(fleet: Fleet, moment_s: float) -> float:
    """When the first job after this moment was done."""
    ends_s: list[float] = []

    def is_done() -> bool:
        ends_s[:] = [fact.at_s for fact in fleet.ledger.read("end") if fact.at_s > moment_s]
        return bool(ends_s)

    eventually(is_done, "jobs are done again")
    return ends_s[0]


def _cut_links(fleet: Fleet) -> None:
    """CLIENT KILL each link of this fleet's workers, as TYPE normal would."""
    name = f"chasqui-worker:{fleet.queue_name}"[:100]
    for client in fleet.client.client_list():
        if client["name"] == name:
            fleet.client.client_kill_filter(_id=client["id"])
