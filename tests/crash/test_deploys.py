"""Workers that are told to stop under load: nothing runs twice, nothing is left behind."""

import signal

import pytest

from tests.crash.conftest import Fleet, eventually
from tests.crash.load import Load, Seed


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    "restarts", [4, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(120)])]
)
def test_rolling_restarts_repeat_and_lose_nothing(fleet: Fleet, restarts: int) -> None:
    seed = Seed()
    old = fleet.start("worker-0")
    with Load(fleet.url, fleet.queue_name) as load:
        fleet.started("worker-0")
        for i in range(1, restarts + 1):
            new = fleet.start(f"worker-{i}")
            fleet.started(new.who)
            seed.sleep(0, 0.1)
            old.terminate()
            assert old.wait() == 0, old.log
            old = new
    fleet.added = load.added
    fleet.ended(len(load.added))
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    print(f"{len(load.added)} jobs in {restarts} restarts")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0
    assert load.unknown == []


@pytest.mark.fault(3)
def test_the_drain_hands_back_what_has_not_begun(fleet: Fleet) -> None:
    fleet.add("hold", 50)
    old = fleet.start(
        "old",
        concurrency=5,
        read_count=50,
        claim_min_idle_ms=60_000,
        target="tests.crash.workers:make_hoarding",
    )
    eventually(lambda: fleet.consumers().get("old") == 50, "it holds them all")
    new = fleet.start("new", concurrency=50, claim_min_idle_ms=60_000)
    new.open_gate()
    fleet.started("new")
    old.terminate()
    fleet.ended(45)  # long before the lease is over
    old.open_gate()
    assert old.wait() == 0
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0


@pytest.mark.fault(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(fleet: Fleet, number: signal.Signals) -> None:
    fleet.add("hold", 5)
    old = fleet.start("old", claim_min_idle_ms=60_000)
    eventually(lambda: fleet.ledger.count("start") == 5, "they run")
    old.signal(number)
    eventually(lambda: "draining" in old.log, "it drains")
    old.signal(number)
    assert old.wait() == 128 + number
    assert sorted(fleet.census().stream) == fleet.added, "nothing unfinished was acknowledged"
    new = fleet.start("new", claim_min_idle_ms=60_000)
    new.open_gate()
    fleet.ended(5)  # handed back: nobody waits for the lease
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 5


@pytest.mark.fault(4)
def test_a_blocked_loop_does_not_outlive_the_second_signal(fleet: Fleet) -> None:
    fleet.add("block", 1, s=600)
    worker = fleet.start("blocked")
    eventually(lambda: fleet.ledger.count("start") == 1, "it runs")
    worker.terminate()
    eventually(lambda: "draining" in worker.log, "it would drain")
    worker.terminate()
    assert worker.wait() == 143
    assert fleet.census().stream == [0]


@pytest.mark.fault(3)
def test_handlers_that_outlast_the_drain_are_told_apart(fleet: Fleet) -> None:
    """Also those in threads, which nothing can end but the end of the process."""
    fleet.add("hold", 1)
    fleet.add("thread", 1, s=600)
    fleet.add("loop_thread", 1, s=600)
    worker = fleet.start("slow", shutdown_deadline_s=0.2, claim_min_idle_ms=60_000)
    eventually(lambda: fleet.ledger.count("start") == 3, "they run")
    worker.terminate()
    assert worker.wait() == 1
    assert "3 jobs were cut short by the end of the worker" in worker.log
    assert sorted(fleet.census().stream) == [0, 1, 2]


def test_a_handler_that_ignores_its_end_does_not_keep_the_process(fleet: Fleet) -> None:
    fleet.add("ignore", 3)
    worker = fleet.start("worker", claim_min_idle_ms=60_000, shutdown_deadline_s=0.1)
    eventually(lambda: fleet.ledger.count("start") == 3, "they run")
    worker.terminate()
    assert worker.wait() == 1
    assert "3 tasks" in worker.log
    assert "3 jobs were cut short" in worker.log
    assert sorted(fleet.census().stream) == fleet.added


def test_a_blocked_loop_does_not_outlive_the_drain(fleet: Fleet) -> None:
    fleet.add("block", 1, s=3600)
    target = "tests.crash.workers:make_and_end_soon"
    worker = fleet.start("worker", target=target, shutdown_deadline_s=0.1)
    eventually(lambda: fleet.ledger.count("start") == 1, "it blocks the loop")
    worker.terminate()
    assert worker.wait() == 1
    assert "has not ended in time" in worker.log
    assert sorted(fleet.census().stream) == fleet.added


def test_a_worker_without_threads_ends_in_order(fleet: Fleet) -> None:
    worker = fleet.start("worker", target="tests.crash.workers:make_without_threads")
    fleet.add("quick", 1)
    fleet.ended(1)
    worker.terminate()
    assert worker.wait() == 0
    assert "Traceback" not in worker.log
    assert fleet.census().is_empty
