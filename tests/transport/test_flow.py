"""Every order of requests, refusals, losses and deadlines that hypothesis can think of."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chasqui.transport.request import Effect
from tests.transport.flow_model import Clock, Process, Server, Wire

# They only compute: what takes seconds alone takes a minute where much else runs.
pytestmark = pytest.mark.timeout(300)

EVERYDAY = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
REFUSALS = (
    "BUSY Redis is busy running a script",
    "LOADING Redis is loading the dataset in memory",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MOVED 3999 one:7001",
    "MOVED 3999 two:7002",
    "ASK 3999 three:7003",
    "ASK 3999 four:7004",
    "ASK 3999 :7003",
    "READONLY You can't write against a read only replica.",
    "NOAUTH Authentication required.",
    "NOSCRIPT No matching script.",
    "OOM command not allowed when used memory > 'maxmemory'.",
)
NTH = st.integers(min_value=0, max_value=7)
#: Steps of time that meet the edges of pauses and deadlines.
SECONDS = st.sampled_from([0.01, 0.02, 0.1, 0.25, 0.7, 1.0, 5.0])
SELDOM = st.sampled_from([False, False, False, True])


class Interleavings(RuleBasedStateMachine):
    """Processes with a flow each, links to a server, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.server = Server()
        self.processes = [Process(self.clock, self.server)]

    def process(self, nth: int) -> Process:
        return self.processes[nth % len(self.processes)]

    def wire(self, nth: int) -> Wire:
        wires = self.wires()
        return wires[nth % len(wires)]

    def wires(self) -> list[Wire]:
        return [wire for process in self.processes for wire in process.open]

    # ── Callers ─────────────────────────────────────────────────────────────────────────────────

    @rule(
        nth=NTH,
        effect=st.sampled_from(Effect),
        size=st.sampled_from([1, 1, 2, 3]),
        is_script=st.booleans(),
        timeout_s=st.sampled_from([None, None, 0.1, 1.0, 20.0]),
        raises=st.booleans(),
        at_once=st.booleans(),
        is_never_done=st.booleans(),
    )
    def submit(self, nth: int, effect: Effect, **options: object) -> None:
        process = self.process(nth)
        if not process.flow.is_closed:
            process.submit(effect, **options)  # type: ignore[arg-type]

    @rule(nth=NTH, which=NTH)
    def cancel(self, nth: int, which: int) -> None:
        if told := self.process(nth).told:
            told[which % len(told)].is_cancelled = True

    @rule(nth=NTH)
    def send_more_when_told(self, nth: int) -> None:
        self.process(nth).chatty = 2

    # ── The driver ──────────────────────────────────────────────────────────────────────────────

    @rule(nth=NTH)
    def work(self, nth: int) -> None:
        self.process(nth).work()

    @rule(nth=NTH)
    def dial(self, nth: int) -> None:
        self.process(nth).dial()

    @rule(nth=NTH)
    def fail_to_dial(self, nth: int) -> None:
        process = self.process(nth)
        if process.flow.link is None:
            process.asks.clear()
            process.flow.give_up(LookupError("no such host"))

    @precondition(lambda self: any(process.asks for process in self.processes))
    @rule(nth=NTH, is_reached=st.booleans())
    def ask(self, nth: int, is_reached: bool) -> None:
        self.process(nth).ask(is_reached=is_reached)

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: float) -> None:
        """Drivers keep their timers meanwhile."""
        until_s = self.clock.now_s + seconds
        while True:
            next_s = min(process.flow.next_s for process in self.processes)
            self.clock.now_s = max(self.clock.now_s, min(until_s, next_s))
            for process in self.processes:
                process.work()
            if self.clock.now_s >= until_s:
                return

    @rule(seconds=SECONDS)
    def sleep(self, seconds: float) -> None:
        """The machine sleeps: no timer notices."""
        self.clock.slept_s += seconds

    # ── The server and the links ────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.wires())
    @rule(nth=NTH, commands=st.integers(1, 4))
    def serve(self, nth: int, commands: int) -> None:
        self.wire(nth).serve(self.server, commands)

    @precondition(lambda self: self.wires())
    @rule(
        nth=NTH,
        commands=st.integers(1, 3),
        refusal=st.sampled_from(REFUSALS),
        is_delivered=st.booleans(),
    )
    def refuse(self, nth: int, commands: int, refusal: str, is_delivered: bool) -> None:
        wire = self.wire(nth)
        self.server.refusals.append(refusal)
        wire.serve(self.server, commands)
        self.server.refusals.clear()
        if is_delivered:
            self.deliver_to(wire, 10_000)
            wire.process.work()

    @rule(nth=NTH)
    def go_on(self, nth: int) -> None:
        """One process does all that it can do at once, and its server too."""
        process = self.process(nth)
        process.dial()
        process.work()
        process.ask(is_reached=True)
        for wire in [*process.open]:
            wire.serve(self.server, 100)
            self.deliver_to(wire, 10_000)

    @rule()
    def flush_scripts(self) -> None:
        self.server.has_script = False

    @precondition(lambda self: self.wires())
    @rule(nth=NTH, size=st.sampled_from([1, 12, 40, 10_000]))
    def deliver(self, nth: int, size: int) -> None:
        self.deliver_to(self.wire(nth), size)

    def deliver_to(self, wire: Wire, size: int) -> None:
        wire.deliver(size)
        wire.process.hang_up_retired()

    @precondition(lambda self: self.wires())
    @rule(nth=NTH)
    def push(self, nth: int) -> None:
        self.wire(nth).from_server += b">2\r\n+invalidate\r\n*1\r\n+key\r\n"

    @precondition(lambda self: self.wires())
    @rule(nth=NTH, is_handled=st.booleans(), arrived=st.sampled_from([0, 12, 24]))
    def lose(self, nth: int, is_handled: bool, arrived: int) -> None:
        """Its server may have handled what was written, and some of its replies may arrive."""
        wire = self.wire(nth)
        if is_handled:
            wire.serve(self.server, 100)
            wire.deliver(arrived)
        wire.process.lose(wire)

    @precondition(lambda self: self.wires())
    @rule(nth=NTH)
    def clog_or_clear(self, nth: int) -> None:
        wire = self.wire(nth)
        wire.is_writable = not wire.is_writable
        if wire.is_writable:
            wire.process.write()

    # ── Processes ───────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.processes) < 3)
    @rule(nth=NTH)
    def fork(self, nth: int) -> None:
        """The child begins anew: what it does leaves its parent's requests where they are."""
        parent, child = self.process(nth), Process(self.clock, self.server)
        before = parent.places()
        child.submit(Effect.ONCE)
        child.submit(Effect.READ, timeout_s=0.1)
        child.dial()
        assert parent.places() == before
        self.processes.append(child)

    @rule(nth=NTH, is_wanted=SELDOM)
    def close(self, nth: int, is_wanted: bool) -> None:
        if is_wanted:
            self.process(nth).close()

    # ── What must hold ──────────────────────────────────────────────────────────────────────────

    @invariant()
    def holds(self) -> None:
        for process in self.processes:
            process.check()

    def teardown(self) -> None:
        """A server that is well ends it: everything settles before its deadline, or at it."""
        for _ in range(60):
            for process in self.processes:
                process.dial()
                process.ask(is_reached=True)
                for wire in [*process.open]:
                    if not wire.is_writable:
                        wire.is_writable = True
                        process.write()
                    wire.serve(self.server, 100)
                    wire.deliver(100_000)
                process.hang_up_retired()
            self.pass_time(0.5)
            self.holds()
        for process in self.processes:
            assert all(told.is_over for told in process.told)
            assert not process.flow.needs_link
            process.close()
            process.check()


class BlockingInterleavings(Interleavings):
    """The same; the driver writes one at a time, and looks at deadlines whenever they pass."""

    @initialize()
    def write_one_by_one(self) -> None:
        self.processes[0].is_one_by_one = True
        self.processes[0].flow._look_every_s = 0.0


@pytest.mark.parametrize("machine", [Interleavings, BlockingInterleavings])
def test_no_interleaving_breaks_a_promise(machine: type[Interleavings]) -> None:
    run_state_machine_as_test(machine, settings=EVERYDAY)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_cancelled_request_that_is_held_wants_no_link(is_asked: bool) -> None:
    process = Process(Clock(), Server())
    told = process.submit(Effect.READ, timeout_s=20.0)
    process.submit(Effect.READ, timeout_s=1.0)
    process.dial()
    process.server.refusals += ["ASK 3999 three:7003" if is_asked else "BUSY"] * 2
    process.open[0].serve(process.server, 2)
    process.open[0].deliver(1000)
    process.work()
    assert len(process.flow.held) == 2
    told.is_cancelled = True
    if is_asked:
        process.ask(is_reached=False)
        process.ask(is_reached=False)
    else:
        process.clock.now_s += 1.0
        process.flow.held.update(dict.fromkeys(process.flow.held, 2000.0))
        process.work()
    assert told.request not in process.flow.held
