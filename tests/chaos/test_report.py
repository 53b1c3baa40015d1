"""The page about reliability: its generated parts come from the results, and from nothing else."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import (
    cancels,
    durability,
    failovers,
    garbage,
    hostile,
    idle,
    leases,
    report,
    restarts,
    slots,
    soak,
)
from tests.chaos.figure import commit

RUN = {
    "subject": "chasqui", "title": "chasqui", "settings": "safe", "setup": "as it comes",
    "recovers_s": 3.0, "rest_s": 30.0, "server": "redis-8.6",
    "seed": 7, "lease_ms": 3000, "command": "python -m tests.chaos --seed 7", "jobs": 1000,
    "confirmed": 990, "refused": 4, "unknown": 6, "recovered": 1, "lost": 0, "unexpected": 0,
    "stuck": 0, "uncaused": 0, "extra_runs": 12, "extra_bound": 40, "overlapping": 3, "deaths": 2,
    "faults": {"worker killed": 2, "link cut": 1}, "taken_over_s": {},
    "resumed_s": {"count": 3, "p50": 0.1, "p99": 0.25, "max": 0.25},
    "before": {"rss_mb": [40.0], "fds": [17]}, "after": {"rss_mb": [41.0], "fds": [18]},
    "seconds": 9.0, "versions": {"chasqui": "1.0", "server": "8.6.4"},
}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results, empty, in place of ours."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "FAULTS", tmp_path / "faults.json")
    return tmp_path


def test_the_page_says_what_the_results_say() -> None:
    """If it fails: `python -m tests.chaos --report`."""
    page = report.PAGE.read_text()
    assert report.render(page) == page


def test_every_section_of_the_page_is_known_and_every_known_one_is_there() -> None:
    names = re.findall(r"<!-- (\w+): generated -->", report.PAGE.read_text())
    assert sorted(names) == sorted(report.SECTIONS)


def test_what_is_written_by_hand_stays_and_what_is_generated_is_replaced(results: Path) -> None:
    (results / "chaos-a.json").write_text(json.dumps(RUN))
    page = "Before.\n<!-- chaos: generated -->\nold\n<!-- end -->\nAfter.\n"
    new = report.render(page)
    assert new.startswith("Before.\n<!-- chaos: generated -->\n")
    assert new.endswith("<!-- end -->\nAfter.\n")
    assert "old" not in new
    assert (
        "| redis-8.6 (8.6.4) | 7 | 1,000 | 3 of 2 kinds | 0 | 0 | 0 | 0 | 12 of 40 | 3 | 4 | 6, 1 |"
        in new
    )
    assert report.render(new) == new


def test_a_queue_that_could_not_be_set_up_is_told(results: Path) -> None:
    (results / "peer-arq.json").write_text(json.dumps({"subject": "arq", "title": "arq",
                                                       "settings": "safe",
                                                       "missing": "no index"}))  # fmt: skip
    (results / "peer-chasqui.json").write_text(json.dumps(RUN))
    ours, theirs = [row for row in report.peers().splitlines() if row.startswith("| ")][2:4]
    assert ours == (
        "| chasqui 1.0 | safe | 3 s | 990 | 10 | 3 of 2 kinds | 0 | 0 | 0 | 12 | 3 | 2 | none | "
        "0.10 / 0.25 / 0.25 s | 40 → 41 MB, 17 → 18 files | 9 s |"
    )
    assert theirs.startswith("| arq | safe | not measured: no index |")
    assert theirs.count("|") == ours.count("|")


def test_a_queue_at_its_defaults_comes_after_what_is_safe_and_may_still_wait(results: Path) -> None:
    arq = RUN | {"subject": "arq", "title": "arq", "stuck": 5}
    default = {"settings": "default", "setup": "job_timeout is 300 s", "rest_s": 120.0}
    (results / "peer-arq.json").write_text(json.dumps(arq))
    (results / "peer-arq-default.json").write_text(json.dumps(arq | default | {"recovers_s": 310}))
    (results / "peer-chasqui-default.json").write_text(json.dumps(RUN | default))
    (results / "peer-chasqui.json").write_text(json.dumps(RUN))
    found = report.peers()
    rows = [row.split(" | ") for row in found.splitlines() if row.startswith("| ")][2:]
    assert [(row[0], row[1], row[8]) for row in rows] == [
        ("| chasqui 1.0", "safe", "0"),
        ("| chasqui 1.0", "default", "0"),
        ("| arq 1.0", "safe", "5"),
        ("| arq 1.0", "default", "5, still waiting"),
    ]
    assert found.endswith("- arq, default: job_timeout is 300 s\n\n")


def test_a_run_tells_its_commit_where_it_is_known(results: Path) -> None:
    (results / "chaos-a.json").write_text(json.dumps(RUN))
    assert report.commands() == "\n    python -m tests.chaos --seed 7\n\n"
    (results / "chaos-a.json").write_text(json.dumps(RUN | {"commit": "0123abc+"}))
    assert report.commands() == "\n    python -m tests.chaos --seed 7  # at 0123abc+\n\n"


def test_what_is_kept_by_server_has_a_command_for_each(results: Path) -> None:
    idle_ones = {"valkey-9": {"queues": 9, "seconds": 30.2, "commit": "0123abc"}}
    cells = {
        "always": {"kill -9": {"trials": 2, "commit": "0123abc"}, "power cut": {"missing": ""}}
    }
    (results / "idle.json").write_text(json.dumps(idle_ones))
    (results / "durability.json").write_text(json.dumps({"redis-6.2": cells}))
    assert [line.strip() for line in report.commands().split("\n") if line] == [
        "python -m tests.chaos.idle --queues 9 --seconds 30 --server valkey-9  # at 0123abc",
        "python -m tests.chaos.durability --trials 2 --server redis-6.2  # at 0123abc",
    ]


def test_a_commit_with_changes_is_marked(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "docs").mkdir()
    for name in ("code", "docs/page"):
        (tmp_path / name).write_text("1")
    assert commit(tmp_path) == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (tmp_path / "docs/page").write_text("2")
    assert commit(tmp_path) == clean
    (tmp_path / "code").write_text("2")
    assert commit(tmp_path) == f"{clean}+"


def test_faults_are_shown_by_server(results: Path) -> None:
    assert "has not been run" in report.faults()
    told = {"valkey-9": {"1": "passed"}, "any server": {"2": "skipped: no disk"}}
    (results / "faults.json").write_text(json.dumps(told))
    rows = report.faults().splitlines()
    assert rows[1].endswith("| valkey-9 | any server |")
    assert rows[3].endswith("| passed |  |")
    assert rows[4].endswith("|  | skipped |")
    assert "was not kept" in report.faults()
    (results / "faults.json").write_text(json.dumps({"commit": "0123abc", **told}))
    assert report.faults().splitlines()[:-2] == rows[:-2]
    assert report.faults().endswith("\nRun at 0123abc.\n\n")
    assert report.FOUND["G2"]() == "1 of 55 pass, 0 fail, 54 did not run"


def test_a_fault_counts_as_passed_if_it_did_in_full_wherever_it_ran(results: Path) -> None:
    told = {
        "valkey-9": {"1": "passed", "2": "passed in part", "3": "passed in part", "4": "skipped"},
        "redis-8.6": {"1": "failed", "2": "passed in part", "3": "passed", "5": "skipped"},
        "redis-6.2": {"5": "passed", "6": "passed"},
    }
    (results / "faults.json").write_text(json.dumps(told))
    assert report.faults().splitlines()[4].endswith("| passed in part |  | passed in part |")
    assert report.FOUND["G2"]() == "1 of 55 pass, 3 in part, 1 fail, 50 did not run"


def test_every_figure_has_something_to_tell() -> None:
    ids = [figure["id"] for figure in json.loads((report.RESULTS / "figures.json").read_text())]
    assert ids == [f"G{i}" for i in range(1, 18)]


def _kept() -> Iterator[tuple[str, list[str]]]:
    """What is kept for the figures, each with what its own program says is wrong with it."""
    for word, program in PROGRAMS.items():
        for path in sorted(report.RESULTS.glob(f"{word}*.json")):
            told = json.loads(path.read_text())
            for name, one in PARTS.get(word, lambda told: {"": told})(told).items():
                yield f"{path.name} {name}".strip(), program.wrong(one)
    for path in sorted(report.RESULTS.glob("chaos-*.json")):
        yield path.name, json.loads(path.read_text())["violations"]


PROGRAMS: dict[str, Any] = {
    "leases": leases, "restarts": restarts, "failovers": failovers, "cancels": cancels,
    "soak-": soak, "idle": idle, "slots": slots, "hostile": hostile, "garbage": garbage,
    "durability": durability,
}  # fmt: skip
#: Of a result that holds several, each that its program judges.
PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "failovers": lambda told: {"": {name: told[name] for name in failovers.GROUPS}},
    "garbage": lambda told: told["connections"],
    "idle": lambda told: told,
}


def test_no_program_finds_anything_wrong_with_what_it_kept() -> None:
    kept = dict(_kept())
    assert len(kept) >= len(PROGRAMS)
    assert {name: found for name, found in kept.items() if found} == {}


def test_what_a_run_of_the_chaos_shows_for_a_figure_is_within_it() -> None:
    deploys, taken_over = (report._measured(figure) for figure in ("G4", "G5"))
    assert deploys["violations"] == taken_over["violations"] == []
    assert deploys["extra_runs"] == 0
    assert taken_over["taken_over_s"]["p99"] <= taken_over["lease_ms"] / 1000 + 2
