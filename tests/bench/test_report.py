"""What a run is said to have found follows from its rows, and from nothing else."""

from typing import Any

import pytest

from bench.check import slower
from bench.document import Heading, Table, Text, markdown, page
from bench.lines import CHECKS, Check
from bench.results import Results


def row(library: str, round: int = 0, scenario: str = "drain", **found: Any) -> dict[str, Any]:
    return {"library": library, "scenario": scenario, "round": round, "n": 1, **found}


def check(line: int, what: str) -> Check:
    (found,) = [each for each in CHECKS if each.line == line and each.what == what]
    return found


OVER_THEIRS = check(6, "rate over chasquimq's")


def test_the_best_round_of_each_is_compared():
    results = Results(
        [
            row("chasqui", rate=900.0),
            row("chasquimq", rate=90.0),
            row("chasqui", 1, rate=1000.0),
            row("chasquimq", 1, rate=80.0),
        ]
    )
    found = results.ratio("drain", "rate", "chasquimq")
    assert found is not None
    assert found.best == pytest.approx(1000 / 90)
    assert (found.low, found.high) == (pytest.approx(10), pytest.approx(12.5))


@pytest.mark.parametrize(("theirs", "verdict"), [(100.0, "PASS"), (100.1, "SHORT")])
def test_a_target_is_met_from_exactly_its_number(theirs: float, verdict: str):
    results = Results([row("chasqui", rate=1000.0), row("chasquimq", rate=theirs)])
    assert OVER_THEIRS.verdict(results) == verdict


def test_without_both_sides_nothing_was_measured():
    assert OVER_THEIRS.verdict(Results([row("chasqui", rate=1.0)])) == "not measured"
    failed = row("chasquimq", rate=1.0, error="it crashed")
    assert OVER_THEIRS.verdict(Results([row("chasqui", rate=1.0), failed])) == "not measured"


def test_spoiled_runs_count_only_where_there_is_no_other():
    spoiled = [row("chasqui", rate=5.0, spoiled=True), row("chasqui", 1, rate=3.0)]
    clean = Results(spoiled).value("chasqui", "drain", "rate")
    only = Results(spoiled[:1]).value("chasqui", "drain", "rate")
    assert clean is not None
    assert only is not None
    assert (clean.best, only.best) == (3.0, 5.0)


def test_less_is_better_where_a_target_says_at_most():
    cpu = check(6, "client CPU per 100k jobs")
    results = Results(
        [row("chasqui", client_cpu_per_100k=0.5), row("chasqui", 1, client_cpu_per_100k=0.3)]
    )
    assert cpu.verdict(results) == "PASS"


def test_redis_limit_is_the_rate_at_which_the_server_would_be_busy_all_the_time():
    limit = check(7, "rate over Redis's CPU limit")
    # 1 s of its CPU for 100k jobs: it cannot do more than 100k a second.
    busy = row("chasqui", scenario="drain_events", rate=80_000.0, server_cpu_per_100k=1.0)
    found = limit.value(Results([busy]))
    assert found is not None
    assert found.best == pytest.approx(0.8)


def test_a_document_reads_the_same_as_markdown_and_as_html():
    blocks = [Heading("A < B"), Text("`x` is **y**"), Table(["a", "b"], [["1", "PASS"]])]
    assert markdown(blocks) == (
        "## A < B\n\n`x` is **y**\n\n| a | b |\n| --- | ---: |\n| 1 | PASS |\n"
    )
    made = page("t", blocks)
    assert "<h2>A &lt; B</h2>" in made
    assert "<code>x</code> is <strong>y</strong>" in made
    assert '<td class="PASS">PASS</td>' in made


def test_a_hot_path_is_slower_only_beyond_the_tolerance():
    baseline = {"add": 10.0, "dispatch": 5.0}
    assert slower({"add": 12.0, "dispatch": 6.1, "new": 99.0}, baseline) == ["dispatch"]
