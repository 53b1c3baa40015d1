"""Conducts a run: starts everybody, lets faults strike, waits until all is done, has it judged."""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from tests.chaos.judge import Result, Tally, judge
from tests.chaos.scene import DEATH, Kind, Record, Scene, Skipped
from tests.chaos.schedule import Strike, redraw
from tests.chaos.stage import Member, Stage
from tests.chaos.stale import Stale, look

logger = logging.getLogger(__name__)

TICK_S = 0.05
#: Jobs come at a pace that leaves each fault this long, and something for the beginning.
PER_FAULT_S = 1.5
LEAD_S = 3.0
#: So many faults at once.
OVERLAP = 4
#: Producers wait when so many jobs are under way, or a tenth of all.
WINDOW = 5000
#: No job done for so long, with no fault at work: it will not go on.
HANG_S = 60.0
#: No job done for so long at the end: those that are left are stuck. What is left at its defaults
#: may need more to take over what lost workers had, but a run should not last an hour.
REST_S, DEFAULT_REST_S = 30.0, 120.0
#: A queue that is still busy then is not waited for.
MOST_REST_S = 240.0
#: How long a process may take to start, or to end.
START_S = 30.0
#: How long a service manager waits before it starts another one.
REVIVE_S = 0.2


@dataclass
class Usage:
    """What the processes use at one moment."""

    rss_mb: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    server_mb: float = 0.0

    @classmethod
    def of(cls, stage: Stage) -> "Usage":
        workers = [worker for worker in stage.workers if worker.is_running]
        memory = stage.ask(lambda client: client.info("memory")["used_memory"])
        return cls(
            [round(worker.rss_mb(), 1) for worker in workers],
            [worker.fds() for worker in workers],
            round(memory / 2**20, 1),
        )


class Conductor:
    """One run on one stage. `kinds` may strike instead of a fault that finds nothing to strike."""

    def __init__(
        self,
        stage: Stage,
        schedule: list[Strike],
        kinds: list[Kind],
        report: Callable[[Tally, int, str], None],
        per_fault_s: float = PER_FAULT_S,
    ) -> None:
        self._stage = stage
        self._per_fault_s = per_fault_s
        self._schedule = schedule
        self._kinds = kinds
        self._report = report
        self._tally = Tally(stage.ledger)
        self._records: list[Record] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._stale: list[Stale] = []
        self._looked_s = 0.0
        self._next = 0
        self._last_count = 0
        self._last_s = time.monotonic()

    def run(self) -> Result:
        """The whole run."""
        stage = self._stage
        start_s = time.monotonic()
        for member in stage.members:
            member.start()
        per_s = stage.jobs / (len(self._schedule) * self._per_fault_s + LEAD_S)
        before = None
        while not self._is_over():
            self._step(time.monotonic() - start_s, per_s)
            if before is None and {w.who for w in stage.workers} <= self._tally.finishers:
                before = Usage.of(stage)
        hang = self._settle()
        for worker in stage.workers:
            worker.wait_until_up(START_S)
        self._stop.set()
        for thread in self._threads:
            thread.join()
        after = Usage.of(stage)
        seconds = time.monotonic() - start_s
        codes = self._end()
        self._tally.read()
        return judge(
            stage, self._tally, self._records, before or after, after, seconds=seconds,
            hang=hang, exit_codes=codes, stale=self._stale,
        )  # fmt: skip

    def _step(self, passed_s: float, per_s: float) -> None:
        time.sleep(TICK_S)
        tally, stage = self._tally, self._stage
        tally.read()
        gone = tally.settled + len(tally.by_outcome["unknown"])
        window = min(WINDOW, stage.jobs // 10)
        stage.gate.allowed = int(min(passed_s * per_s, gone + window)) + 1
        while (
            self._next < len(self._schedule)
            and self._schedule[self._next].at * stage.jobs <= tally.settled
            and self._active() < OVERLAP
        ):
            self._strike(self._schedule[self._next])
            self._next += 1
        self._revive()
        self._look()
        self._report(tally, self._next, ", ".join(self._names()))

    def _look(self) -> None:
        """See what is left alone, once a lease, while no fault keeps the server from answering."""
        is_due = time.monotonic() - self._looked_s > self._stage.lease_s
        if is_due and self._stage.subject.is_ours and not self._active():
            self._stale += look(self._stage)
            self._looked_s = time.monotonic()

    def _is_over(self) -> bool:
        """Whether all jobs were tried and all faults struck, or nothing goes on."""
        if self._tally.settled != self._last_count or self._active():
            self._last_count, self._last_s = self._tally.settled, time.monotonic()
        if time.monotonic() - self._last_s > max(HANG_S, self._patience_s()):
            return True
        producing = any(producer.is_running for producer in self._stage.producers)
        # In this order: the last act of a fault may be to have another one drawn.
        return not producing and not self._active() and self._next == len(self._schedule)

    def _settle(self) -> bool:
        """Wait until the queue is at rest; True if it never was."""
        start_s = self._last_s = time.monotonic()
        while (
            time.monotonic() - self._last_s < self._patience_s()
            and time.monotonic() - start_s < max(MOST_REST_S, 2 * self._patience_s())
        ):
            time.sleep(TICK_S)
            self._tally.read()
            self._revive()
            self._look()
            self._report(self._tally, self._next, "settling")
            if self._is_at_rest():
                return False
            if self._tally.settled != self._last_count:
                self._last_count, self._last_s = self._tally.settled, time.monotonic()
        return True

    def _patience_s(self) -> float:
        subject = self._stage.subject
        if subject.is_default:
            return DEFAULT_REST_S
        return max(REST_S, self._stage.lease_s * 6) if subject.is_ours else REST_S

    def _is_at_rest(self) -> bool:
        if not self._stage.subject.is_ours:
            return not self._tally.unfinished()
        keys = self._stage.keys

        def count(client: redis.Redis) -> int:
            return int(client.xlen(keys.stream)) + int(client.zcard(keys.delayed))

        return self._stage.ask(count) == 0

    # ── Faults ──────────────────────────────────────────────────────────────────────────────────

    def _strike(self, strike: Strike) -> None:
        record = Record(strike.kind.name)
        scene = Scene(self._stage, record, random.Random(strike.seed), self._stop)
        self._records.append(record)

        def run() -> None:
            record.at_s = time.monotonic()
            try:
                strike.kind.strike(scene)
            except Skipped:
                record.was_skipped = True
                if not self._stop.is_set() and (other := redraw(strike, self._kinds)):
                    self._schedule.append(other)
            except Exception as error:
                logger.exception("the fault %r failed", record.kind)
                record.error = repr(error)
            record.over_s = time.monotonic()

        thread = threading.Thread(target=run, name=record.kind, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _active(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _names(self) -> list[str]:
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _revive(self) -> None:
        """Start workers that ended by themselves, as a service manager does. None may, but one that
        found no server when it began."""
        for worker in self._stage.workers:
            if not worker.is_running and worker.lock.acquire(blocking=False):
                try:
                    if not worker.is_running:
                        self._note_death(worker)
                        self._stop.wait(REVIVE_S)
                        worker.start()
                finally:
                    worker.lock.release()

    def _note_death(self, worker: Member) -> None:
        code = worker.wait(1)
        if worker.who not in self._tally.finishers and worker.age_s < START_S:
            return
        now_s = time.monotonic()
        error = f"{worker.who} ended with {code}: {worker.last_words()}"
        self._records.append(
            Record(DEATH, now_s, now_s, worker.who, lost=(worker.who,), error=error)
        )

    def _end(self) -> list[int | None]:
        """Drain the workers; their exit codes."""
        for worker in self._stage.workers:
            if worker.is_running:
                worker.signal(signal.SIGTERM)
        return [worker.wait(START_S) for worker in self._stage.workers]
