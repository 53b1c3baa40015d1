"""Workers that are killed, stopped or late: every job is done, and by one of them."""

import signal

import pytest

from tests.crash.conftest import LEASE_MS, Fleet, eventually

LEASE_S = LEASE_MS / 1000
#: How long after the lease every job of a dead worker must have begun elsewhere.
TAKE_OVER_S = 2.0


@pytest.mark.fault(1)
def test_jobs_of_a_killed_worker_run_elsewhere(fleet: Fleet) -> None:
    inherit(fleet)


@pytest.mark.fault(1, control=True)
def test_an_heir_that_takes_nothing_over_leaves_them_stuck(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="are stuck"):
        inherit(fleet, target="tests.crash.workers:make_without_reclaiming")


def inherit(fleet: Fleet, **heirs: str) -> None:
    """Jobs run and wait in a worker that is killed, beside another one."""
    fleet.add("hold", 300)
    doomed = fleet.start(
        "doomed", concurrency=100, read_count=200, target="tests.crash.workers:make_hoarding"
    )
    eventually(lambda: fleet.ledger.count("start") == 100, "100 jobs run")
    eventually(lambda: fleet.consumers().get("doomed") == 300, "200 more are prefetched")
    heir = fleet.start("heir", concurrency=100, **heirs)
    heir.open_gate()
    fleet.started("heir")
    assert fleet.ledger.count("start") == 100

    doomed.kill()
    eventually(lambda: fleet.census().is_empty or fleet.audit().stuck, "all is done, or is not")

    audit = fleet.audit()
    assert not audit.stuck, f"{len(audit.stuck)} are stuck"
    assert audit.faults == {}
    assert audit.overlapping == set()
    assert audit.extra_runs == 100
    (killed,) = fleet.ledger.read("dead")
    late_s = max(fact.at_s for fact in fleet.ledger.read("start")) - killed.at_s - LEASE_S
    print(f"the last job began {late_s:.2f} s after the lease")
    assert late_s <= TAKE_OVER_S


def test_jobs_of_a_killed_group_run_elsewhere(fleet: Fleet) -> None:
    """Its two queues share slots, and so do those of the group that takes them over."""
    target = "tests.crash.workers:make_sharing"
    fleet.add("hold", 30)
    doomed = fleet.start("doomed", target=target)
    eventually(lambda: fleet.ledger.count("start") == 5, "all shared slots are taken")
    heir = fleet.start("heir", target=target)
    heir.open_gate()
    fleet.ended(25)
    doomed.kill()
    fleet.ended(30)
    heir.terminate()
    assert heir.wait() == 0
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.overlapping == set()
    assert audit.extra_runs == 5
    assert fleet.census().is_empty


@pytest.mark.fault(2)
def test_acks_that_were_not_sent_are_one_more_run_each(fleet: Fleet) -> None:
    lose_acks(fleet)


@pytest.mark.fault(2, control=True)
def test_acks_that_are_never_sent_are_more_runs_than_that(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="more runs than acks that were not sent"):
        lose_acks(fleet, target="tests.crash.workers:make_without_acks")


def lose_acks(fleet: Fleet, **doomed_ones: str) -> None:
    """A worker dies when it is about to send acks, and another one does the rest."""
    fleet.add("quick", 200)
    doomed = fleet.start("doomed", dies_before_flush=2, **doomed_ones)
    assert doomed.wait() == 71
    (unflushed,) = fleet.ledger.read("unflushed")
    ended = {fact.n for fact in fleet.ledger.read("end")}
    fleet.start("heir")
    eventually(lambda: fleet.census().is_empty, "all is done")
    audit = fleet.audit()
    assert audit.faults == {}
    assert set(audit.extra) <= ended
    assert audit.extra_runs > 0
    # Some of them may have been on their way.
    assert audit.extra_runs <= unflushed.n, "more runs than acks that were not sent"


@pytest.mark.fault(5)
def test_a_zombie_is_refused_and_reported(fleet: Fleet) -> None:
    jobs = [*fleet.add("hold", 10), *fleet.add("hold, retry", 10), *fleet.add("hold, bury", 10)]
    zombie = fleet.start("zombie", fails=True, concurrency=30)
    eventually(lambda: fleet.ledger.count("start") == 30, "all run")
    zombie.signal(signal.SIGSTOP)
    heir = fleet.start("heir", concurrency=30)
    heir.open_gate()
    fleet.ended(30)
    eventually(lambda: fleet.census().is_empty, "the heir has acknowledged them")

    zombie.open_gate()
    zombie.signal(signal.SIGCONT)
    eventually(lambda: len(fleet.ledger.read("fail")) == 20, "the zombie finishes its runs")
    eventually(lambda: "were taken over by another worker" in zombie.log, "it is told")
    zombie.terminate()
    assert zombie.wait() == 0

    assert fleet.census().is_empty
    audit = fleet.audit()
    assert audit.faults == {}
    assert set(audit.extra) == set(jobs)
    assert audit.extra_runs == 30


@pytest.mark.fault(5)
def test_a_zombie_takes_nothing_from_an_owner_that_still_runs_it(fleet: Fleet) -> None:
    """The acks and moves come back to life while the entries are pending elsewhere."""
    for name in ("hold", "hold, retry", "hold, bury"):
        fleet.add(name, 5)
    zombie = fleet.start("zombie", fails=True)
    eventually(lambda: fleet.ledger.count("start") == 15, "all run")
    zombie.signal(signal.SIGSTOP)
    heir = fleet.start("heir")
    eventually(lambda: fleet.ledger.count("start") == 30, "all run again")
    zombie.open_gate()
    zombie.signal(signal.SIGCONT)
    eventually(lambda: len(fleet.ledger.read("fail")) == 10, "the zombie finishes its runs")
    zombie.terminate()
    assert zombie.wait() == 0
    assert len(fleet.census().pending) == 15, "all still belong to the heir"
    heir.open_gate()
    eventually(lambda: fleet.census().is_empty, "the heir finishes")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 15


def test_slow_handlers_run_once(fleet: Fleet) -> None:
    """Longer than the lease, and even with the loop blocked for so long; another worker waits."""
    fleet.start("one", concurrency=2)
    fleet.start("other", concurrency=2)
    fleet.started("one", "other")
    fleet.add("long", 2, s=3 * LEASE_S)
    fleet.add("block", 2, s=2 * LEASE_S)
    fleet.ended(4)
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0
