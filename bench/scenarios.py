"""What is measured: each scenario, the line of the targets that it belongs to, and its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.libraries import Library
from bench.stage import Data, Stage, wait_until

#: Runs one measurement with so many jobs; its result.
Run = Callable[[Stage, Library, int], Data]


@dataclass(frozen=True)
class Scenario:
    """One kind of measurement."""

    name: str
    title: str
    #: The target that it serves; None: it shows how cost grows.
    line: int | None
    run: Run
    #: Which number of jobs of a library it takes.
    jobs: str
    #: Where it fits no library's own number: this one.
    fixed: int | None = None
    server: str = "redis-8.6"
    #: Only these libraries; None: all.
    libraries: frozenset[str] | None = None
    #: What varies in a growth scenario, and its value.
    varies: str | None = None
    at: int = 0
    #: Whether one round is enough.
    is_once: bool = False

    def takes(self, library: Library) -> bool:
        """Whether the library takes part."""
        if library.scenarios is not None and self.name not in library.scenarios:
            return False
        return self.libraries is None or library.name in self.libraries


def adding(kind: str, **options: Any) -> Run:
    def run(stage: Stage, library: Library, n: int) -> Data:
        stage.measured()
        return stage.call(library, kind, n=n, **options)

    return run


def draining(*, body_bytes: int = 0, **options: Any) -> Run:
    def run(stage: Stage, library: Library, n: int) -> Data:
        retries = {"retries": True} if options.get("retries") else {}
        filled = stage.call(library, "fill", n=n, body_bytes=body_bytes, **retries)
        if filled.get("n") != n:
            return filled
        stage.measured()
        return stage.call(library, "drain", n=n, **options)

    return run


def latency(stage: Stage, library: Library, n: int) -> Data:
    stage.measured()
    worker = stage.start(library, "delays", n=n, field="t", limit_s=n / 200 + 20)
    worker.wait_until_ready()
    told = stage.call(library, "paced", n=n, per_s=200)
    result = worker.result()
    return result if "n" in told else told


def lateness(stage: Stage, library: Library, n: int) -> Data:
    stage.measured()
    lead_s, over_s = 2.0, n / 100
    worker = stage.start(library, "delays", n=n, field="due", limit_s=lead_s + over_s + 15)
    worker.wait_until_ready()
    told = stage.call(library, "spread", n=n, lead_s=lead_s, over_s=over_s)
    if told.get("in_time") is False:
        told = {"error": "the jobs were not scheduled in time"}
    result = worker.result()
    return result if "in_time" in told else told


def delayed(stage: Stage, library: Library, n: int) -> Data:
    """Schedules, and then drains what fell due: two rates."""
    lead_s = 3 + n / 6000
    stage.measured()
    told = stage.call(library, "schedule", n=n, lead_s=lead_s)
    if not told.get("in_time"):
        return told if "rate" not in told else {"error": "not scheduled in time", **told}
    wait_until(told["due_s"] - 2)
    due = stage.call(library, "due", n=n, due_s=told["due_s"])
    keys = ("rate", "client_cpu_per_100k", "server_cpu_per_100k")
    return {**due, **{f"schedule_{key}": told[key] for key in keys}}


def idling(stage: Stage, library: Library, n: int) -> Data:
    stage.measured()
    return stage.call(library, "idle", seconds=n)


def memory(stage: Stage, library: Library, n: int) -> Data:
    filled = stage.call(library, "fill", n=n)
    if filled.get("n") != n:
        return filled
    stage.measured()
    return stage.call(library, "drain", n=n, memory=True)


FOR_VALKEY = frozenset({"chasqui", "arq", "saq", "streaq", "taskiq"})
MIXED = adding("mixed", size=1000)
#: Whose bulk add takes the caller's list as it is.
OF_LISTS = frozenset({"chasqui", "chasquimq", "limit"})

SCENARIOS = [
    Scenario("single", "add, one at a time", 1, adding("single"), "single"),
    Scenario("gather", "add, 100 tasks at once", 2, adding("gather"), "gather"),
    Scenario("bulk50", "bulk add, 50 a call", 3, adding("bulk", size=50), "bulk"),
    Scenario("bulk50_ready", "bulk add, 50 a call, of a list that is there", 3,
             adding("bulk", size=50, ready=True), "bulk", libraries=OF_LISTS),
    Scenario("bulk1000", "bulk add, 1000 a call", 4, adding("bulk", size=1000), "bulk"),
    Scenario("bulk1000_ready", "bulk add, 1000 a call, of a list that is there", 4,
             adding("bulk", size=1000, ready=True), "bulk", libraries=OF_LISTS),
    Scenario("mixed", "bulk 1000 with options per job", 5, MIXED, "mixed"),
    Scenario("drain", "drain, 100 slots, no events", 6, draining(), "drain"),
    Scenario("drain_events", "drain, 100 slots, events", 7, draining(events=True), "drain",
             libraries=frozenset({"chasqui", "chasquimq", "bullmq_node"})),
    Scenario("retry", "drain, all fail once", 8, draining(retries=True), "retry"),
    Scenario("latency", "add to handler, 200 a second", 9, latency, "", 2000),
    Scenario("lateness", "due to handler, 100 a second", 10, lateness, "", 1000),
    Scenario("delayed", "delayed jobs, due at once", 11, delayed, "delayed"),
    Scenario("idle", "an idle worker", 12, idling, "", 10, is_once=True),
    Scenario("memory", "a worker's memory", 13, memory, "drain", 100_000, is_once=True,
             libraries=frozenset({"chasqui", "chasquimq", "bullmq_node"})),
    Scenario("memory_1m", "a worker's memory, 1M jobs", 13, memory, "", 1_000_000, is_once=True,
             libraries=frozenset({"chasqui"})),
    Scenario("valkey_gather", "Valkey: add, 100 tasks at once", 14, adding("gather"), "gather",
             server="valkey-9", libraries=FOR_VALKEY),
    Scenario("valkey_bulk", "Valkey: bulk add, 1000 a call", 14, adding("bulk", size=1000), "bulk",
             server="valkey-9", libraries=FOR_VALKEY),
    Scenario("valkey_drain", "Valkey: drain, 100 slots", 14, draining(), "drain",
             server="valkey-9", libraries=FOR_VALKEY),
]  # fmt: skip


def growth(most_jobs: int) -> list[Scenario]:
    """How our cost grows with the number of jobs and with their size."""
    found = []
    ways: dict[str, Callable[[int], Run]] = {
        "gather": lambda size: adding("gather", body_bytes=size),
        "bulk1000": lambda size: adding("bulk", size=1000 if size < 10_000 else 100,
                                        body_bytes=size),
        "drain": lambda size: draining(body_bytes=size),
        "drain_events": lambda size: draining(body_bytes=size, events=True),
    }  # fmt: skip
    for way, run_of in ways.items():
        for n in (1_000, 10_000, 100_000, 1_000_000):
            if n <= most_jobs:
                found.append(_grown(way, run_of(0), n, "jobs", n))
        for size, n in ((100, 50_000), (1_000, 50_000), (10_000, 10_000), (100_000, 1_000)):
            found.append(_grown(way, run_of(size), min(n, most_jobs), "bytes", size))
    return found


def _grown(way: str, run: Run, n: int, varies: str, at: int) -> Scenario:
    ours = frozenset({"chasqui"})
    name = f"{way} {varies}={at}"
    return Scenario(name, name, None, run, "", n, libraries=ours, varies=varies, at=at)
