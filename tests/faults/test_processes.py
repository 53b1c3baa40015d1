"""Workers that are killed or told to stop: what the rest of the suite shows, and its controls."""

import signal
import subprocess
from typing import Any

import pytest

from chasqui.model.keys import DEFAULT_GROUP
from tests.crash.conftest import WAIT_S, Fleet, eventually
from tests.crash.load import Seed

#: How long the control waits for a process that does not end.
HANG_S = 4.0


def replace(fleet: Fleet, **options: Any) -> tuple[dict[str, set[int]], int]:
    """A deploy: a worker is told to stop while another one is there; what is wrong when all is
    done, and how many runs too many there were."""
    fleet.add("hold", 5)
    old = fleet.start("old", **options)
    eventually(lambda: fleet.ledger.count("start") == 5, "they run")
    new = fleet.start("new")
    new.open_gate()
    fleet.started("new")
    old.terminate()
    eventually(lambda: "draining" in old.log, "it drains")
    old.open_gate()
    assert old.wait() == 0
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    audit = fleet.audit()
    return audit.faults, audit.extra_runs


@pytest.mark.fault(3)
def test_a_worker_that_is_replaced(fleet: Fleet) -> None:
    assert replace(fleet) == ({}, 0)


@pytest.mark.fault(3, control=True)
def test_without_a_drain_its_jobs_run_again(fleet: Fleet) -> None:
    assert replace(fleet, target="tests.faults.workers:abrupt") == ({}, 5)


def stop_twice(fleet: Fleet, limit_s: float = WAIT_S, **options: Any) -> dict[str, set[int]]:
    """A second signal ends a worker in its drain; what is wrong then."""
    fleet.add("hold", 5)
    worker = fleet.start("worker", claim_min_idle_ms=60_000, **options)
    eventually(lambda: fleet.ledger.count("start") == 5, "they run")
    worker.terminate()
    eventually(lambda: "draining" in worker.log, "it drains")
    worker.terminate()
    assert worker.wait(limit_s) == 128 + signal.SIGTERM
    return fleet.audit().faults


@pytest.mark.fault(4)
def test_a_worker_that_is_told_twice(fleet: Fleet) -> None:
    assert stop_twice(fleet) == {}


@pytest.mark.fault(4, control=True)
def test_one_that_ignores_the_second_signal_is_caught(fleet: Fleet) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        stop_twice(fleet, HANG_S, target="tests.faults.workers:deaf")


@pytest.mark.fault(4, control=True)
def test_one_that_acknowledges_what_it_cut_short_is_caught(fleet: Fleet) -> None:
    wrong = stop_twice(fleet, target="tests.faults.workers:hasty")
    assert wrong == {"lost": set(fleet.added)}


@pytest.mark.fault(1)
def test_workers_killed_at_any_moment(fleet: Fleet) -> None:
    """Between two kills the jobs have come so far as they come: the seed decides when."""
    seed = Seed()
    fleet.add("work", 300)
    allowed = 0
    for round_ in range(3):
        worker = fleet.start(f"worker-{round_}")
        wanted = len(fleet.ledger.read("end")) + seed.random.randint(1, 60)
        eventually(
            lambda wanted=wanted: (
                len(fleet.ledger.read("end")) >= wanted or fleet.census().is_empty
            ),
            "some more are done",
        )
        worker.kill()
        allowed += fleet.consumers().get(worker.who, 0)  # of none if all was done before it read
    fleet.start("last")
    eventually(lambda: fleet.census().is_empty, "all is done")
    audit = fleet.audit()
    print(f"{audit.extra_runs} extra runs, {allowed} allowed")
    assert audit.faults == {}
    assert audit.overlapping == set()
    assert audit.extra_runs <= allowed


@pytest.mark.fault(26)
def test_a_worker_removes_its_own_consumer_only_and_only_empty(fleet: Fleet) -> None:
    """Not that of a worker that died a moment ago."""
    fleet.add("hold", 10)
    doomed = fleet.start(
        "doomed", concurrency=2, read_count=10, target="tests.crash.workers:make_hoarding"
    )
    eventually(lambda: fleet.consumers().get("doomed") == 10, "it has them all")
    doomed.kill()
    heir = fleet.start("heir")
    heir.open_gate()
    eventually(lambda: fleet.census().is_empty, "the heir has done them")
    heir.terminate()
    assert heir.wait() == 0
    assert fleet.consumers() == {"doomed": 0}


def leave_with_jobs(fleet: Fleet, **options: Any) -> dict[str, set[int]]:
    """A worker ends before its handlers do; what is wrong then."""
    fleet.add("hold", 5)
    worker = fleet.start("worker", shutdown_deadline_s=0.1, **options)
    eventually(lambda: fleet.ledger.count("start") == 5, "they run")
    worker.terminate()
    assert worker.wait() == 1
    return fleet.audit().faults


@pytest.mark.fault(26)
def test_a_worker_that_leaves_jobs_behind_leaves_its_consumer(fleet: Fleet) -> None:
    assert leave_with_jobs(fleet) == {}
    assert fleet.consumers() == {"worker": 5}


@pytest.mark.fault(26, control=True)
def test_one_that_takes_its_consumer_along_is_caught(fleet: Fleet) -> None:
    wrong = leave_with_jobs(fleet, target="tests.faults.workers:tidy")
    assert wrong == {"stuck": set(fleet.added)}


@pytest.mark.fault(26)
def test_a_consumer_that_an_operator_deletes(fleet: Fleet) -> None:
    """Its jobs are in the stream, and nobody's. A worker that lives makes them its own again;
    without one a census shows them, and XCLAIM brings them back."""
    fleet.add("hold", 5)
    target = "tests.crash.workers:make_hoarding"
    worker = fleet.start("worker", concurrency=2, read_count=5, target=target)
    eventually(lambda: fleet.consumers().get("worker") == 5, "it has them all")
    eventually(lambda: fleet.ledger.count("start") == 2, "two run")
    stream = fleet.keys.stream
    fleet.client.xgroup_delconsumer(stream, DEFAULT_GROUP, "worker")
    eventually(lambda: fleet.consumers().get("worker") == 5, "it has them again")
    assert fleet.audit().faults == {}
    worker.kill()
    fleet.client.xgroup_delconsumer(stream, DEFAULT_GROUP, "worker")
    assert fleet.audit().stuck == set(fleet.added)
    ids = [entry_id for entry_id, _ in fleet.client.xrange(stream)]
    fleet.client.xclaim(stream, DEFAULT_GROUP, "operator", 0, ids, idle=60_000, force=True)
    assert fleet.audit().faults == {}
    heir = fleet.start("heir")
    heir.open_gate()
    eventually(lambda: fleet.census().is_empty, "all is done")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 2
