"""A queue in miniature under a clock that the test turns: the decisions and the leases are the real
ones; the server, the network and the rest of a worker are models, to be checked at a glance.

Messages are lost before or after they did their work, repeated and late; workers crash, sleep and
miss heartbeats; the server forgets what it delivered. What must hold all the same is asserted by
`Simulation.check`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from chasqui.consuming import held as held_module
from chasqui.consuming.fate import (
    Bury,
    Failure,
    Limits,
    Run,
    RunAgain,
    on_arrival,
    on_failure,
)
from chasqui.consuming.held import Held, Slot, number_of

LEASE_S = 15.0
BEAT_S = LEASE_S / 3
#: Every third job has a name of which there are fewer runs.
NAMES = ("any", "any", "brief")
LIMITS = Limits(max_attempts=3, max_deliveries=4, attempts_by_name={"brief": 2})


class Clock:
    """What `chasqui.consuming.held` takes for the module `clock`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def boot_s(self) -> float:
        return self.now_s

    def boot_ns(self) -> int:
        return int(self.now_s * 1e9)


@dataclass(frozen=True, slots=True)
class Arrived:
    """An entry as a reader gets it."""

    id: bytes
    n: int
    attempt: int
    deliveries: int
    #: 0 if it comes as new.
    idle_ms: int = 0
    fault: str | None = None
    detail: str | None = None
    max_attempts: int | None = None
    retry: None = None

    @property
    def name(self) -> str:
        return NAMES[self.n % len(NAMES)]


@dataclass(slots=True)
class Pending:
    owner: str
    since_s: float
    deliveries: int


@dataclass(slots=True)
class Server:
    """Redis: the stream, its group, the delayed set, the DLQ, and the scripts over them."""

    clock: Clock
    has_fence: bool = True
    #: Entry id → job, runs behind it.
    stream: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    unread: list[bytes] = field(default_factory=list)
    pending: dict[bytes, Pending] = field(default_factory=dict)
    delayed: list[tuple[int, int]] = field(default_factory=list)
    dlq: list[int] = field(default_factory=list)
    #: Jobs whose entry an acknowledgement took away.
    done: list[int] = field(default_factory=list)
    retried: Counter[int] = field(default_factory=Counter)
    #: Jobs of which a delivery was forgotten: who runs them may not own them.
    forgotten: set[int] = field(default_factory=set)
    _next: int = 0

    def add(self, n: int, attempt: int = 0) -> None:
        entry_id = b"%d-0" % self._next
        self._next += 1
        self.stream[entry_id] = (n, attempt)
        self.unread.append(entry_id)

    def read(self, owner: str, count: int) -> list[Arrived]:
        """XREADGROUP with CLAIM: what has been silent for a lease, anybody's, then what is new."""
        idle = [
            entry_id
            for entry_id, held in self.pending.items()
            if self.clock.now_s - held.since_s >= LEASE_S
        ]
        taken = [*idle, *self.unread][:count]
        self.unread = [entry_id for entry_id in self.unread if entry_id not in taken]
        return [self._deliver(entry_id, owner) for entry_id in taken]

    def recover(self, owner: str, in_hand: Iterable[bytes]) -> list[Arrived]:
        mine = [entry_id for entry_id, held in self.pending.items() if held.owner == owner]
        return [self._deliver(entry_id, owner, 0) for entry_id in mine if entry_id not in in_hand]

    def forget(self, entry_id: bytes) -> set[int]:
        """A replica takes over that never heard of the deliveries from this one on; their jobs."""
        again = [one for one in self.stream if number_of(one) >= number_of(entry_id)]
        jobs = {self.stream[one][0] for one in again if one not in self.unread}
        self.unread = again
        for one in again:
            self.pending.pop(one, None)
        self.forgotten |= jobs
        return jobs

    def renew(self, owner: str, entry_ids: Iterable[bytes]) -> list[bytes]:
        lost = []
        for entry_id in entry_ids:
            held = self.pending.get(entry_id)
            if held is None or (self.has_fence and held.owner != owner):
                lost.append(entry_id)
            else:
                held.owner, held.since_s = owner, self.clock.now_s
        return lost

    def ack(self, owner: str | None, entry_id: bytes) -> bool:
        """`owner` None: XACKDEL, which asks nobody."""
        if owner is not None and not self._is_of(owner, entry_id):
            return False
        if entry_id in self.stream:
            self.done.append(self.stream[entry_id][0])
        self._leave(entry_id)
        return True

    def retry(self, owner: str, entry: Arrived, attempt: int) -> bool:
        if not self._is_of(owner, entry.id):
            return False
        self.delayed.append((entry.n, attempt))
        self.retried[entry.n] += 1
        self._leave(entry.id)
        return True

    def bury(self, owner: str, entry: Arrived) -> bool:
        if not self._is_of(owner, entry.id):
            return False
        self.dlq.append(entry.n)
        self._leave(entry.id)
        return True

    def promote(self) -> None:
        for n, attempt in self.delayed:
            self.add(n, attempt)
        self.delayed.clear()

    def places(self, n: int) -> list[str]:
        """Everywhere that the job is."""
        places = ["stream"] * sum(job == n for job, _ in self.stream.values())
        places += ["delayed"] * sum(job == n for job, _ in self.delayed)
        places += ["dlq"] * self.dlq.count(n)
        return places + ["done"] * self.done.count(n)

    def _deliver(self, entry_id: bytes, owner: str, counts: int = 1) -> Arrived:
        n, attempt = self.stream[entry_id]
        is_new = entry_id not in self.pending
        before = 0 if is_new else self.pending[entry_id].deliveries
        self.pending[entry_id] = Pending(owner, self.clock.now_s, before + counts)
        return Arrived(entry_id, n, attempt, before + counts - 1, idle_ms=0 if is_new else 1)

    def _is_of(self, owner: str, entry_id: bytes) -> bool:
        held = self.pending.get(entry_id)
        return not self.has_fence or (held is not None and held.owner == owner)

    def _leave(self, entry_id: bytes) -> None:
        self.stream.pop(entry_id, None)
        self.pending.pop(entry_id, None)
        if entry_id in self.unread:
            self.unread.remove(entry_id)


@dataclass(slots=True, eq=False)
class Command:
    """What a worker wants done with an entry. It is sent until an answer has come."""

    entry: Arrived
    verdict: Bury | RunAgain | None
    is_fenced: bool
    was_sent: bool = False


@dataclass(slots=True)
class Outbox:
    """What a worker settles, as `Held` wants to know of it."""

    commands: list[Command]

    @property
    def waiting(self) -> int:
        return len(self.commands)

    def ids(self) -> list[bytes]:
        return [command.entry.id for command in self.commands]


class Worker:
    """One consumer: what it holds, runs and has asked for."""

    #: Switched off by controls: ask whether an entry is in hand before it is run; let one that was
    #: lost and came back run.
    minds_its_hands: ClassVar[bool] = True
    replaces_lost_copies: ClassVar[bool] = True

    def __init__(self, name: str, server: Server, clock: Clock) -> None:
        self.name = name
        self.server = server
        self.clock = clock
        self.held = Held("simulated", LEASE_S)
        self.outbox: list[Command] = []
        self.held.settlers.append(Outbox(self.outbox))
        #: A reply that came while it slept.
        self.mail: list[Arrived] | None = None
        self.is_asleep = False
        self.is_crashed = False
        self.must_recover = False
        self.beat_s = clock.now_s
        #: Its lease was over at some time: others may have declared it dead.
        self.has_lapsed = False
        self.refused: list[int] = []

    @property
    def is_up(self) -> bool:
        return not self.is_asleep and not self.is_crashed

    @property
    def running(self) -> list[Arrived]:
        return [slot.entry for slot in self.held.slots if slot.entry is not None]  # type: ignore[misc]

    def take(self, entries: list[Arrived]) -> None:
        """Entries have been delivered."""
        held = self.held
        are_above = held.are_above(entries)  # type: ignore[arg-type]
        for entry in entries:
            is_sure = are_above and not entry.idle_ms
            if self.replaces_lost_copies and not is_sure and entry.id in held.lost:
                held.replace_lost_copy(entry.id)
            is_in_hand = self.minds_its_hands and not is_sure and entry.id in held.ids()
            verdict = on_arrival(entry, LIMITS, is_in_hand=is_in_hand)
            if isinstance(verdict, Run):
                self.held.waiting.append(entry)  # type: ignore[arg-type]
            elif isinstance(verdict, Bury):
                self.outbox.append(Command(entry, verdict, is_fenced=True))
        for entry in entries:
            is_left = entry.id in held.lost and entry.id not in held.busy_ids()
            assert not is_left, f"job {entry.n} was delivered and would not run"  # I7

    def start(self) -> Arrived | None:
        """Begin the next run; None if there is nothing, or nothing that is surely its own."""
        if not self.held.waiting or not self.held.is_alive:
            return None
        entry: Arrived = self.held.waiting.popleft()  # type: ignore[assignment]
        if self._is_let_go(entry):
            return None
        slot = Slot()
        slot.entry = entry  # type: ignore[assignment]
        self.held.slots.append(slot)
        return entry

    def finish(self, entry: Arrived, failure: Failure | None) -> None:
        """A run is over."""
        self.held.slots = [slot for slot in self.held.slots if slot.entry is not entry]
        if self._is_let_go(entry):
            return
        if failure is None:
            self.outbox.append(Command(entry, None, is_fenced=False))
        else:
            verdict = on_failure(entry, failure, LIMITS, 0.5)
            assert isinstance(verdict, Bury | RunAgain)
            self.outbox.append(Command(entry, verdict, is_fenced=True))

    def ask(self, entry: Arrived) -> None:
        """A handler asks whether its job is lost, and stops if it is."""
        if self.held.is_lost(entry):
            self.finish(entry, None)
            sent = [command.entry.n for command in self.outbox]
            assert entry.n not in sent, f"job {entry.n} is acknowledged and was not done"  # I1

    def _is_let_go(self, entry: Arrived) -> bool:
        if entry.id not in self.held.lost:
            return False
        self.held.lost.discard(entry.id)
        self.must_recover = True
        return True

    def send(self, command: Command, *, reply_is_lost: bool = False) -> None:
        """The command reaches the server. Without an answer it stays, to be sent again."""
        entry, verdict, server = command.entry, command.verdict, self.server
        is_repeated, command.was_sent = command.was_sent, True
        if verdict is None:
            is_sure = self.held.sure_for_s >= LEASE_S / 6
            if command.is_fenced or not is_sure or entry.id in self.held.missing:
                ok = server.ack(self.name, entry.id)
            else:
                held = server.pending.get(entry.id)
                is_ours = held is None or held.owner == self.name or entry.n in server.forgotten
                assert is_ours or not server.has_fence, f"job {entry.n} is taken from its owner"
                ok = server.ack(None, entry.id)
        elif isinstance(verdict, RunAgain):
            ok = server.retry(self.name, entry, verdict.attempt)
        else:
            ok = server.bury(self.name, entry)
        if reply_is_lost:
            command.is_fenced = True
            return
        self.outbox.remove(command)
        if not ok and not is_repeated:
            self.refused.append(entry.n)

    def beat(self) -> None:
        started_s = self.clock.now_s
        self.held.take_away(self.server.renew(self.name, self.held.ids()))
        self.held.renewed(started_s)
        self.beat_s = started_s


class Simulation:
    """Workers at one server, and what has happened to each job."""

    def __init__(self, *, has_fence: bool = True) -> None:
        self.clock = Clock()
        self._real_clock = held_module.clock
        held_module.clock = self.clock  # type: ignore[assignment]
        self.server = Server(self.clock, has_fence)
        self.workers: list[Worker] = []
        self.jobs = 0
        self.starts: Counter[int] = Counter()
        #: Per job, how often a run or a delivery was lost with its worker.
        self.excuses: Counter[int] = Counter()
        self.start_worker()

    def close(self) -> None:
        held_module.clock = self._real_clock

    def start_worker(self) -> None:
        self.workers.append(Worker(f"w{len(self.workers)}", self.server, self.clock))

    def up(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_up]

    def read(self, worker: Worker, count: int, *, reply_is_lost: bool = False) -> None:
        if worker.must_recover:
            worker.must_recover = False
            worker.take(self.server.recover(worker.name, worker.held.ids()))
        entries = self.server.read(worker.name, count)
        if reply_is_lost:
            worker.must_recover = True
        else:
            worker.take(entries)

    def read_asleep(self, worker: Worker, count: int) -> None:
        """A read that it had sent before it fell asleep is answered now."""
        if worker.mail is None:
            worker.mail = self.server.read(worker.name, count)

    def start(self, worker: Worker) -> None:
        entry = worker.start()
        if entry is not None:
            self.starts[entry.n] += 1
            self._check_overlap(entry, worker)

    def crash(self, worker: Worker) -> None:
        worker.is_crashed = True
        self._excuse(worker)

    def forget(self, entry_id: bytes) -> None:
        self.excuses.update(self.server.forget(entry_id))

    def open_mail(self, worker: Worker) -> None:
        """The reply may be as old as its sleep was long: it asks what is still its own."""
        if worker.mail is not None:
            entries, worker.mail = worker.mail, None
            lost = self.server.renew(worker.name, [entry.id for entry in entries])
            worker.take([entry for entry in entries if entry.id not in lost])

    def advance(self, seconds: float, *, deaf: Worker | None = None) -> None:
        """Time passes. Workers that are up beat when it is due, but for the deaf one, and read."""
        self.clock.now_s += seconds
        for worker in self.workers:
            is_due = self.clock.now_s - worker.beat_s >= BEAT_S
            if worker.is_up and worker is not deaf and is_due:
                worker.beat()
            if not worker.is_crashed and not worker.has_lapsed and not self._is_leased(worker):
                worker.has_lapsed = True
                self._excuse(worker)
            elif worker.has_lapsed and self._is_leased(worker):
                worker.has_lapsed = False
        for worker in self.up():
            self.read(worker, 100)

    def settle(self) -> None:
        """The faults are over: everybody who can does what is left to do."""
        for worker in self.workers:
            worker.is_asleep = False
            if worker.is_up:
                self.open_mail(worker)
        self.start_worker()
        for _ in range(200):
            for worker in self.up():
                for command in list(worker.outbox):
                    worker.send(command)
                while worker.held.waiting and worker.held.is_alive:
                    self.start(worker)
                for entry in worker.running:
                    worker.finish(entry, None)
            self.server.promote()
            self.advance(BEAT_S)
            self.check()
            if not self.server.stream and not self.server.delayed:
                return
        raise AssertionError(f"never at rest: {self.server}")

    # ── What must hold ──────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        server = self.server
        for n in range(self.jobs):
            places = server.places(n)
            assert places, f"job {n} is lost"  # I1
            assert len(places) == 1, f"job {n} is in {places}"  # I2, I5
            allowed = 1 + server.retried[n] + self.excuses[n]
            assert self.starts[n] <= allowed, f"job {n} ran {self.starts[n]} times"  # I3
            most = 2 if NAMES[n % len(NAMES)] == "brief" else 3
            assert server.retried[n] < most, f"job {n} ran more often than its name may"  # I8
        everywhere = {n for n, _ in server.stream.values()} | set(server.dlq) | set(server.done)
        assert everywhere <= set(range(self.jobs)), "jobs that nobody added"  # I2
        if any(self._is_leased(worker) for worker in self.up()):
            for entry_id, held in server.pending.items():
                idle_s = self.clock.now_s - held.since_s
                assert idle_s <= 3 * LEASE_S, f"entry {entry_id!r} is stuck"  # I6

    def _check_overlap(self, entry: Arrived, worker: Worker) -> None:
        """I4: two run a job at the same time only if one of them had been silent for a lease."""
        for other in self.up():
            if other is worker:
                same = sum(mine.n == entry.n for mine in worker.running)
                assert same == 1, f"job {entry.n} runs {same} times in one worker"
            elif any(theirs.n == entry.n for theirs in other.running):
                assert self.excuses[entry.n], f"job {entry.n} was taken from a living worker"

    def _is_leased(self, worker: Worker) -> bool:
        return self.clock.now_s - worker.beat_s < LEASE_S

    def _excuse(self, worker: Worker) -> None:
        mine = {entry.n for entry in worker.running}
        mine |= {
            self.server.stream[entry_id][0]
            for entry_id, held in self.server.pending.items()
            if held.owner == worker.name and entry_id in self.server.stream
        }
        self.excuses.update(mine)
