"""The targets: what each line owes, and whether a run shows it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.results import Results, Value

OTHERS_ON_VALKEY = ("taskiq", "arq", "saq", "streaq")


@dataclass(frozen=True)
class Check:
    """One number that is owed."""

    line: int
    scenario: str
    what: str
    target: float
    #: Whether less is better.
    is_most: bool
    unit: str
    value: Callable[[Results], Value | None]

    def verdict(self, results: Results) -> str:
        found = self.value(results)
        if found is None:
            return "not measured"
        is_kept = found.best <= self.target if self.is_most else found.best >= self.target
        return "PASS" if is_kept else "SHORT"


def rate_over(
    line: int, scenario: str, over: str, target: float, what: str, field: str = "rate"
) -> Check:
    def value(results: Results) -> Value | None:
        return results.ratio(scenario, field, over)

    return Check(line, scenario, what, target, False, "x", value)


def over_theirs(line: int, scenario: str, target: float, field: str = "rate") -> Check:
    what = "schedule rate" if field == "schedule_rate" else "rate"
    return rate_over(line, scenario, "chasquimq", target, f"{what} over chasquimq's", field)


def over_limit(line: int, scenario: str, target: float, what: str) -> Check:
    return rate_over(line, scenario, "limit", target, f"rate over {what}")


def below_theirs(line: int, scenario: str, field: str, target: float, what: str) -> Check:
    def value(results: Results) -> Value | None:
        return results.ratio(scenario, field, "chasquimq", lowest=True)

    return Check(line, scenario, f"{what} over chasquimq's", target, True, "x", value)


def at_most(line: int, scenario: str, field: str, target: float, what: str, unit: str) -> Check:
    def value(results: Results) -> Value | None:
        return results.value("chasqui", scenario, field, lowest=True)

    return Check(line, scenario, what, target, True, unit, value)


def cpu(line: int, scenario: str, target: float) -> Check:
    what = "client CPU per 100k jobs"
    return at_most(line, scenario, "client_cpu_per_100k", target, what, " s")


def of_server_cpu(results: Results) -> Value | None:
    """Our rate over the rate at which Redis would be busy all the time, run by run."""
    each = [
        row["rate"] * row["server_cpu_per_100k"] / 1e5
        for row in results.runs("chasqui", "drain_events", "rate")
    ]
    return Value(max(each), min(each), max(each)) if each else None


def more_memory(results: Results) -> Value | None:
    ours = results.value("chasqui", "memory", "rss_mb", lowest=True)
    theirs = results.value("chasquimq", "memory", "rss_mb", lowest=True)
    if ours is None or theirs is None:
        return None
    return Value(ours.best - theirs.best, ours.low - theirs.high, ours.high - theirs.low)


def memory_growth(results: Results) -> Value | None:
    """Memory at the end over memory at a tenth of the way."""
    each = [
        row["rss_mb_over_time"][-1] / row["rss_mb_over_time"][1]
        for row in results.runs("chasqui", "memory_1m", "rss_mb_over_time")
    ]
    return Value(min(each), min(each), max(each)) if each else None


def on_valkey(other: str, ways: tuple[str, ...]) -> Callable[[Results], Value | None]:
    """Our best of several ways over theirs."""

    def value(results: Results) -> Value | None:
        ours = [results.value("chasqui", way, "rate") for way in ways]
        theirs = [results.value(other, way, "rate") for way in ways]
        our, their = [v for v in ours if v], [v for v in theirs if v]
        if not our or not their:
            return None
        best, rival = max(our, key=lambda v: v.best), max(their, key=lambda v: v.best)
        return Value(best.best / rival.best, best.low / rival.high, best.high / rival.low)

    return value


def valkey_checks() -> Iterator[Check]:
    for other in OTHERS_ON_VALKEY:
        adds = on_valkey(other, ("valkey_bulk", "valkey_gather"))
        yield Check(14, "valkey_bulk", f"adding over {other}'s", 15, False, "x", adds)
        drains = on_valkey(other, ("valkey_drain",))
        yield Check(14, "valkey_drain", f"drain over {other}'s", 40, False, "x", drains)


def core_check(contest: str, target: float) -> Check:
    def value(results: Results) -> Value | None:
        return results.value(contest, "core", "ratio")

    return Check(15, "core", contest, target, False, "x", value)


PREBUILT = "the same bytes prebuilt"
CHECKS = [
    over_theirs(1, "single", 1.5),
    below_theirs(1, "single", "client_cpu_per_100k", 0.5, "client CPU"),
    over_theirs(2, "gather", 8),
    cpu(2, "gather", 1.2),
    over_theirs(3, "bulk50", 3),
    over_limit(3, "bulk50", 0.8, PREBUILT),
    over_limit(3, "bulk50_ready", 0.8, PREBUILT),
    cpu(3, "bulk50", 0.25),
    over_theirs(4, "bulk1000", 4.5),
    over_limit(4, "bulk1000", 0.85, PREBUILT),
    over_limit(4, "bulk1000_ready", 0.85, PREBUILT),
    cpu(4, "bulk1000", 0.15),
    over_theirs(5, "mixed", 15),
    cpu(5, "mixed", 0.3),
    over_theirs(6, "drain", 10),
    over_limit(6, "drain", 0.9, "parse-only"),
    cpu(6, "drain", 0.3),
    over_theirs(7, "drain_events", 8),
    Check(7, "drain_events", "rate over Redis's CPU limit", 0.8, False, "x", of_server_cpu),
    cpu(7, "drain_events", 0.6),
    over_theirs(8, "retry", 5),
    below_theirs(9, "latency", "p50_ms", 0.6, "p50"),
    below_theirs(9, "latency", "p99_ms", 0.6, "p99"),
    at_most(10, "lateness", "p99_ms", 5, "p99 of lateness", " ms"),
    over_theirs(11, "delayed", 3, "schedule_rate"),
    over_theirs(11, "delayed", 3),
    at_most(12, "idle", "cpu_percent", 1, "CPU of one core", " %"),
    at_most(12, "idle", "commands_per_s", 2, "commands a second", ""),
    Check(13, "memory", "RSS beyond chasquimq's", 10, True, " MB", more_memory),
    Check(13, "memory_1m", "RSS after 1M jobs over after 100k", 1.1, True, "x", memory_growth),
    *valkey_checks(),
]


def all_checks() -> list[Check]:
    """Every check; those of the core's contests are written with them."""
    from bench.contests import CONTESTS  # imports what only measuring the core needs

    cores = [core_check(each.name, each.target) for each in CONTESTS if each.target]
    return [*CHECKS, *cores]
