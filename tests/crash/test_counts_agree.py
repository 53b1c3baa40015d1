"""Events, sinks, Prometheus, handlers and the queue tell the same numbers while workers are killed.

What a kill -9 may do to the numbers, and nothing else:
- runs that had begun have no outcome, in no count: at most `concurrency` of them;
- runs whose ack was not sent are done again, and count again;
- the last events of the process, which it had not sent, are missing: an end of what it told, with
  no hole before it. `completed` goes with the acknowledgement, so it has an end of its own;
- a move (retry, dead-letter queue, promotion) that the server made and the process was not told of
  is in no count, and in its place. Who was buried is told all the same, by the move itself.
A process that is not killed counts everything. No job is told to be done twice, and no run to be
over, or dead, before it is told to have begun, or failed.
"""

import threading
from collections import Counter, defaultdict
from typing import Any

import pytest

from chasqui import QueueEvent, sync
from chasqui.consuming.acker import MAX_ACKS
from chasqui.model.keys import CONSUMER
from chasqui.timed.promoter import PromoterConfig
from tests.crash.conftest import Fleet, eventually
from tests.crash.counting import FAILS
from tests.events.test_counts_agree import entry
from tests.ledger import Fact
from tests.metrics.test_prometheus import parse
from tests.servers import Server

CONCURRENCY = 50
KILLS = 3
#: Acks wait for an answer only while a lease is certain. A link on which one was late is dropped,
#: with the events that are on their way: with a short lease a busy machine makes holes.
LEASE_MS = 15_000
#: Which of a run's facts is told by which event.
EVENTS = {"end": "completed", "fail": "failed", "died": "failed"}
#: Which event of a run another one comes after.
BEFORE = {
    "active": "",
    "completed": "active",
    "failed": "active",
    "retry-scheduled": "failed",
    "dlq": "failed",
}


class Listener(threading.Thread):
    """Counts the events of a queue, by name, and by job those that end a run or bury it."""

    def __init__(self, url: str, queue_name: str) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()
        self.runs: Counter[tuple[str, str]] = Counter()
        #: Events that came before the one that must come before them.
        self.early: list[QueueEvent] = []
        self._seen: set[tuple[str, str | None, int]] = set()
        self._events = sync.QueueEvents(queue_name, redis_url=url, last_event_id="0", count=1000)

    def run(self) -> None:
        with self._events:
            for event in self._events:
                if event.name == "last of all":
                    return
                self.told[event.name] += 1
                if event.name in ("completed", "failed", "dlq"):
                    self.runs[event.name, str(event.job_id)] += 1
                if event.name in BEFORE:
                    self._check(event)

    def _check(self, event: QueueEvent) -> None:
        attempt = event.fields["attempt"]
        if event.name == "retry-scheduled":  # which is of the run to come
            attempt -= 1
        before = BEFORE[event.name]
        if before and (before, event.job_id, attempt) not in self._seen:
            self.early.append(event)
        self._seen.add((event.name, event.job_id, attempt))


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4_000, marks=pytest.mark.timeout(120)),
        pytest.param(50_000, marks=pytest.mark.timeout(240)),
    ],
)
def test_counts_agree_while_workers_are_killed(
    make_fleet: Any, redis_86: Server, count: int
) -> None:
    fleet: Fleet = make_fleet(redis_86.url)
    listener = Listener(redis_86.url, fleet.queue_name)
    listener.start()
    job_ids: list[str] = []

    def ended() -> int:
        return len({fact.n for fact in fleet.ledger.read() if fact.kind in ("end", "died")})

    def start(number: int) -> str:
        who = f"worker-{number}"
        fleet.start(
            who,
            target="tests.crash.counting:make",
            concurrency=CONCURRENCY,
            claim_min_idle_ms=LEASE_MS,
        )
        return who

    try:
        start(0), start(1)
        for begin in range(0, count, 1000):
            entries = [entry(number) for number in range(begin, begin + 1000)]
            jobs = [{**one, "data": {"n": one["data"]}} for one in entries]
            job_ids += [job.id for job in fleet.queue.add_bulk(jobs)]
        for kill in range(KILLS):
            goal = count * (kill + 1) // (KILLS + 2)
            eventually(lambda goal=goal: ended() >= goal, f"{goal} jobs have ended")
            fleet.workers[kill].kill()
            start(kill + 2)
        eventually(lambda: ended() == count, "all jobs have ended", limit_s=120)
        eventually(
            lambda: not (rest := fleet.census()).stream and not rest.delayed, "nothing is left"
        )
        killed = {worker.who for worker in fleet.workers[:KILLS]}
        # One that has only just begun does not know yet how to end.
        fleet.started(*(worker.who for worker in fleet.workers[KILLS:]))
        for worker in fleet.workers[KILLS:]:
            worker.terminate()
            assert worker.wait() == 0
    finally:
        fleet.client.xadd(fleet.keys.events, {"e": "last of all"})
        listener.join()

    facts: defaultdict[str, list[Fact]] = defaultdict(list)
    for fact in fleet.ledger.read():
        facts[fact.who].append(fact)
    by_worker = {who: Counter(fact.kind for fact in done) for who, done in facts.items()}
    living = by_worker.keys() - killed
    assert len(living) == 2
    total = sum(by_worker.values(), Counter[str]())
    print(f"killed: { ({who: dict(by_worker[who]) for who in killed}) }")

    # Handler invocations = completed + failed, but for those that a kill cut off.
    for who, counted in by_worker.items():
        cut_off = counted["start"] - counted["completed"] - counted["failed"]
        assert 0 <= cut_off <= (CONCURRENCY if who in killed else 0)

    # The living do every job once, and never again; what is done twice was done by the killed.
    tenth = count // 10
    plan = {"end": 9 * tenth, "fail": sum(FAILS.values()) * tenth, "died": tenth}
    for kind, planned in plan.items():
        by_living = Counter(fact.n for who in living for fact in facts[who] if fact.kind == kind)
        most = {number: FAILS.get(entry(number)["name"], 1) for number in by_living}
        assert all(times <= most[number] for number, times in by_living.items())
        repeated = total[kind] - planned
        assert 0 <= repeated <= sum(by_worker[who][kind] for who in killed)

    # The dead-letter queue itself, which knows who filled it, and the retries.
    dead = fleet.client.xrange(fleet.keys.dlq)
    buried = Counter(fields[CONSUMER].decode() for _, fields in dead)
    assert len(dead) == tenth
    for who, counted in by_worker.items():
        assert counted["dlq"] <= buried[who] <= counted["died"]
        assert counted["retry"] <= counted["fail"]
        if who in living:
            assert counted["dlq"] == counted["died"]
            assert counted["retry"] == counted["fail"]
    assert total["retry"] <= plan["fail"]

    # Promotions, of delayed jobs and retries: at most one batch of a leader that was killed.
    batch = PromoterConfig().batch
    promoted = sum(fact.n for done in facts.values() for fact in done if fact.kind == "promoted")
    moves = plan["fail"] + count // 5
    assert 0 <= moves - promoted <= KILLS * batch

    # Events: what the sinks count, but for the last of those that were killed. The end of a job is
    # told by the step that makes it.
    told = listener.told
    assert told["gap"] == 0
    assert listener.early == []
    ends = {key: times for key, times in listener.runs.items() if key[0] != "failed"}
    assert set(ends.values()) == {1}
    assert told["dlq"] == len(dead)
    # A kill can split a write between an acknowledgement and its events.
    assert 0 <= plan["end"] - told["completed"] <= KILLS * MAX_ACKS
    unsent = _unsent(facts, killed, listener.runs, job_ids)
    assert told["completed"] == total["end"] - unsent["end"]
    assert told["failed"] == total["fail"] + total["died"] - unsent["fail"] - unsent["died"]
    assert 0 <= total["retry"] - told["retry-scheduled"] <= unsent["retry"]
    assert 0 <= moves - told["waiting"] <= 2 * KILLS * batch

    # Prometheus: what the sinks count, of every worker that was there to be asked.
    for who in living:
        samples = parse((fleet.folder / f"{who}.prom").read_text())
        scraped: Counter[str] = Counter()
        for (name, _), value in samples.items():
            scraped[name] += int(value)
        counted = by_worker[who]
        assert scraped["chasquimq_jobs_completed_total"] == counted["completed"]
        assert scraped["chasquimq_jobs_failed_total"] == counted["failed"]
        assert scraped["chasquimq_handler_duration_seconds_count"] == counted["start"]
        assert scraped["chasquimq_retries_scheduled_total"] == counted["retry"]
        assert scraped["chasquimq_dlq_routed_total"] == counted["dlq"] == buried[who]
        mine = sum(fact.n for fact in facts[who] if fact.kind == "promoted")
        assert scraped["chasquimq_promoter_promoted_total"] == mine


def _unsent(
    facts: dict[str, list[Fact]],
    killed: set[str],
    told: Counter[tuple[str, str]],
    job_ids: list[str],
) -> Counter[str]:
    """What killed workers did behind the last event of its kind that is there, by kind of fact.

    Fails if an event is missing before that, or of a worker that lived, or tells of no run.
    """
    missing: Counter[tuple[str, str]] = Counter()
    for done in facts.values():
        for fact in done:
            if fact.kind in EVENTS:
                missing[EVENTS[fact.kind], job_ids[fact.n]] += 1
    missing.subtract({key: times for key, times in told.items() if key[0] != "dlq"})
    assert not [key for key, number in missing.items() if number < 0], "events of no run"
    unsent: Counter[str] = Counter()
    for who in killed:
        # `retry-scheduled` goes the way of `failed`, and is written once the job has moved.
        for kinds in (("end",), ("fail", "died", "retry")):
            for fact in reversed(facts[who]):
                if fact.kind not in kinds:
                    continue
                if fact.kind in EVENTS:
                    key = EVENTS[fact.kind], job_ids[fact.n]
                    if missing[key] == 0:
                        break
                    missing[key] -= 1
                unsent[fact.kind] += 1
    assert missing.total() == 0, "an event is missing before others of its worker that are there"
    print(f"not sent: {dict(unsent)}")
    return unsent
