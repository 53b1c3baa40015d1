"""How the package logs: one logger per module under `chasqui`, and fields on every record."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import chasqui
from chasqui.cli.logs import JsonFormatter
from chasqui.consumer.complaints import Complaints

PACKAGE = Path(chasqui.__file__).parent
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
#: It logs for others, with their loggers.
FOR_OTHERS = PACKAGE / "consumer" / "complaints.py"


def calls(source: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a method of something, with the text of the function."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("source", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_every_record_carries_fields(source: Path) -> None:
    for name, call in calls(source):
        place = f"{source.relative_to(PACKAGE)}:{call.lineno}"
        owner, _, method = name.rpartition(".")
        if owner.endswith("logger") and method in LEVELS:
            assert source == FOR_OTHERS or owner == "logger", place
            assert "extra" in [one.arg for one in call.keywords], f"{place} says nothing of itself"
        if owner == "logging" and method in LEVELS:
            raise AssertionError(f"{place} logs to everybody's logger")
        if name == "logging.getLogger" and source.parent.name != "cli":
            assert [ast.unparse(one) for one in call.args] == ["__name__"], place


def test_complaints_tell_how_many_were_held_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("chasqui.consumer.complaints.time.monotonic", lambda: now_s)
    complaints = Complaints(logging.getLogger("chasqui.test"), "mails")
    complaints.warn("%d acks", 3, acks=3)  # at 0.0 the first one passes
    complaints.warn("%d acks", 4, acks=4)
    complaints.warn("%d acks", 5, acks=5)
    now_s = 1.0
    complaints.warn("%d acks", 6, acks=6)
    assert caplog.messages == ["3 acks", "6 acks (and 2 times more since the last of these)"]
    line = JsonFormatter().format(caplog.records[-1])
    assert '"queue": "mails", "acks": 6' in line


def test_complaints_may_come_in_bursts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 5.0
    monkeypatch.setattr("chasqui.consumer.complaints.time.monotonic", lambda: now_s)
    complaints = Complaints(logging.getLogger("chasqui.test"), "mails", burst=2)
    with caplog.at_level(logging.INFO, "chasqui"):
        for number in range(5):
            complaints.inform("job %d", number)
        now_s = 6.0
        for number in range(5, 8):
            complaints.warn("job %d", number)
    more = " (and 3 times more since the last of these)"
    assert caplog.messages == ["job 0", "job 1", f"job 5{more}", "job 6"]
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2 + ["WARNING"] * 2
