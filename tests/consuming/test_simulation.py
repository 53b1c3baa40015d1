"""Every order of faults that hypothesis can think of, and what must hold after each step."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chasqui.consuming.fate import Failure
from tests.consuming.simulation import BEAT_S, LEASE_S, Simulation, Worker

# They only compute: what takes seconds alone takes a minute where much else runs.
pytestmark = pytest.mark.timeout(300)

QUICK = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
OUTCOMES = st.sampled_from([None, None, Failure(), Failure(delay_ms=0), Failure(is_final=True)])
#: Steps of time that meet the edges of beats and leases.
SECONDS = st.sampled_from([0.1, 1.0, BEAT_S - 0.1, BEAT_S])
#: Which of those there are.
NTH = st.integers(min_value=0, max_value=7)
OFTEN = st.sampled_from([False, False, False, True])


class Faults(RuleBasedStateMachine):
    """Workers at a server, with everything that may go wrong."""

    has_fence = True

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation(has_fence=self.has_fence)

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.sim.server.add(self.sim.jobs)
            self.sim.jobs += 1

    @precondition(lambda self: self.sim.up())
    @rule(nth=NTH, count=st.integers(1, 4), is_lost=OFTEN)
    def read(self, nth: int, count: int, is_lost: bool) -> None:
        self.sim.read(self._up(nth), count, reply_is_lost=is_lost)

    @precondition(lambda self: any(worker.held.waiting for worker in self.sim.up()))
    @rule(nth=NTH)
    def start(self, nth: int) -> None:
        self.sim.start(self._up(nth, lambda worker: worker.held.waiting))

    @precondition(lambda self: any(worker.running for worker in self.sim.up()))
    @rule(nth=NTH, which=NTH, failure=OUTCOMES)
    def finish(self, nth: int, which: int, failure: Failure | None) -> None:
        worker = self._up(nth, lambda worker: worker.running)
        worker.finish(worker.running[which % len(worker.running)], failure)

    @precondition(lambda self: any(worker.running for worker in self.sim.up()))
    @rule(nth=NTH, which=NTH)
    def ask(self, nth: int, which: int) -> None:
        worker = self._up(nth, lambda worker: worker.running)
        worker.ask(worker.running[which % len(worker.running)])

    @precondition(lambda self: any(worker.outbox for worker in self.sim.up()))
    @rule(nth=NTH, which=NTH, is_lost=OFTEN)
    def send(self, nth: int, which: int, is_lost: bool) -> None:
        worker = self._up(nth, lambda worker: worker.outbox)
        worker.send(worker.outbox[which % len(worker.outbox)], reply_is_lost=is_lost)

    @rule()
    def promote(self) -> None:
        self.sim.server.promote()

    @precondition(lambda self: self.sim.server.pending)
    @rule(nth=NTH)
    def forget(self, nth: int) -> None:
        pending = list(self.sim.server.pending)
        self.sim.forget(pending[nth % len(pending)])

    @rule(seconds=SECONDS)
    def advance(self, seconds: float) -> None:
        self.sim.advance(seconds)

    @precondition(lambda self: self.sim.up())
    @rule(nth=NTH, beats=st.integers(1, 4))
    def miss_heartbeats(self, nth: int, beats: int) -> None:
        deaf = self._up(nth)
        for _ in range(beats):
            self.sim.advance(BEAT_S, deaf=deaf)

    @precondition(lambda self: len(self.sim.workers) < 5)
    @rule()
    def start_worker(self) -> None:
        self.sim.start_worker()

    @precondition(lambda self: self.sim.up())
    @rule(nth=NTH)
    def crash(self, nth: int) -> None:
        self.sim.crash(self._up(nth))

    @precondition(lambda self: self.sim.up())
    @rule(nth=NTH)
    def fall_asleep(self, nth: int) -> None:
        self._up(nth).is_asleep = True

    @precondition(lambda self: any(worker.is_asleep for worker in self.sim.workers))
    @rule(nth=NTH, count=st.integers(1, 4))
    def answer_a_sleeper(self, nth: int, count: int) -> None:
        self.sim.read_asleep(self._asleep(nth), count)

    @precondition(lambda self: any(worker.is_asleep for worker in self.sim.workers))
    @rule(nth=NTH)
    def wake(self, nth: int) -> None:
        self._asleep(nth).is_asleep = False

    @precondition(lambda self: any(worker.mail for worker in self.sim.up()))
    @rule(nth=NTH)
    def open_mail(self, nth: int) -> None:
        self.sim.open_mail(self._up(nth, lambda worker: worker.mail))

    @invariant()
    def holds(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        try:
            self.sim.settle()
        finally:
            self.sim.close()

    def _up(self, nth: int, has: Callable[[Worker], object] = lambda worker: True) -> Worker:
        fitting = [worker for worker in self.sim.up() if has(worker)]
        return fitting[nth % len(fitting)]

    def _asleep(self, nth: int) -> Worker:
        sleepers = [worker for worker in self.sim.workers if worker.is_asleep]
        return sleepers[nth % len(sleepers)]


class WithoutFence(Faults):
    """A control: commands ask nobody whose the entry is."""

    has_fence = False


def test_every_job_is_in_one_place_and_runs_no_more_than_faults_excuse() -> None:
    run_state_machine_as_test(Faults, settings=QUICK)


@pytest.mark.slow
def test_the_same_for_many_more_orders() -> None:
    more = settings(QUICK, max_examples=800, stateful_step_count=60)
    run_state_machine_as_test(Faults, settings=more)


def test_without_the_fence_it_does_not_hold() -> None:
    with pytest.raises(AssertionError, match=r"is in|is lost|ran"):
        run_state_machine_as_test(WithoutFence, settings=control())


def test_without_minding_its_hands_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "minds_its_hands", False)
    with pytest.raises(AssertionError, match=r"ran|runs|is in"):
        run_state_machine_as_test(Faults, settings=control())


def test_without_making_way_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "replaces_lost_copies", False)
    with pytest.raises(AssertionError, match="job 0 was delivered and would not run"):
        come_back()


def test_what_was_lost_and_came_back_runs_once() -> None:
    sim = come_back()
    sim.check()
    assert sim.starts[0] == 1
    assert sim.server.places(0) == ["done"]


@pytest.mark.fault(5)
def test_a_zombie_is_refused() -> None:
    """One order of faults, step by step."""
    sim = zombie(has_fence=True)
    sim.check()
    assert sim.workers[0].refused == [0]
    assert sim.server.places(0) == ["done"]


@pytest.mark.fault(5, control=True)
def test_without_the_fence_a_zombie_is_caught() -> None:
    sim = zombie(has_fence=False)
    with pytest.raises(AssertionError, match=r"job 0 is in \['dlq', 'done'\]"):
        sim.check()


def test_what_a_handler_was_told_to_be_lost_is_not_acknowledged() -> None:
    """Its beats are missed for a lease, and nobody is there to take the job over."""
    sim = Simulation()
    try:
        worker = sim.workers[0]
        sim.server.add(0)
        sim.jobs = 1
        sim.read(worker, 1)
        sim.start(worker)
        while worker.held.is_alive:
            sim.advance(BEAT_S, deaf=worker)
        worker.ask(worker.running[0])
        assert not worker.running
        assert sim.server.places(0) == ["stream"]
        sim.settle()
        assert sim.starts[0] == 2
    finally:
        sim.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_what_the_server_forgot_and_delivers_as_new_does_not_run_beside_itself(
    is_known: bool,
) -> None:
    """`is_known`: a beat has marked the run as lost before the entry comes again."""
    sim = Simulation()
    try:
        worker = sim.workers[0]
        sim.server.add(0)
        sim.jobs = 1
        sim.read(worker, 1)
        sim.start(worker)
        sim.forget(next(iter(sim.server.pending)))
        if is_known:
            worker.beat()
        sim.read(worker, 1)
        assert not worker.held.waiting
        worker.finish(worker.running[0], None)
        sim.settle()
        assert sim.starts[0] == 1 + is_known
    finally:
        sim.close()


def zombie(*, has_fence: bool) -> Simulation:
    """It runs a job, sleeps through its lease, and wants to bury what its heir has completed."""
    sim = Simulation(has_fence=has_fence)
    try:
        sleeper = sim.workers[0]
        sim.server.add(0)
        sim.jobs = 1
        sim.read(sleeper, 1)
        sim.start(sleeper)
        sleeper.is_asleep = True
        sim.start_worker()
        heir = sim.workers[1]
        while not heir.held.waiting:
            sim.advance(BEAT_S)
        assert sim.clock.now_s - sleeper.beat_s >= LEASE_S
        sim.start(heir)
        heir.finish(heir.running[0], None)
        heir.send(heir.outbox[0])
        sleeper.is_asleep = False
        sleeper.finish(sleeper.running[0], Failure(is_final=True))
        sleeper.send(sleeper.outbox[0])
    finally:
        sim.close()
    return sim


def come_back() -> Simulation:
    """It sleeps through its lease with a job that waits; the heir takes that over and crashes."""
    sim = Simulation()
    try:
        sleeper = sim.workers[0]
        sim.server.add(0)
        sim.jobs = 1
        sim.read(sleeper, 1)
        (entry_id,) = sim.server.pending
        sleeper.is_asleep = True
        sim.start_worker()
        heir = sim.workers[1]
        while not heir.held.waiting:
            sim.advance(BEAT_S)
        sleeper.is_asleep = False
        sleeper.beat()
        assert entry_id in sleeper.held.lost
        sim.crash(heir)
        while sim.server.pending[entry_id].owner != sleeper.name:
            sim.advance(BEAT_S)
        while sleeper.held.waiting:
            sim.start(sleeper)
        sleeper.finish(sleeper.running[0], None)
        sleeper.send(sleeper.outbox[0])
    finally:
        sim.close()
    return sim


def control() -> settings:
    """The first failure will do. What Hypothesis draws depends on the modules that are imported, so
    it may take long to come."""
    return settings(
        QUICK, max_examples=10_000, phases=[Phase.generate], database=None, derandomize=True
    )
