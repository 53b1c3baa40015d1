"""How the package logs: one logger per module under `chasqui`, and fields on every record."""

import ast
import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

import chasqui
from chasqui.cli.logs import JsonFormatter
from chasqui.consuming.throttled_log import MOST_KINDS, ThrottledLog
from chasqui.model.config import Endpoint
from chasqui.transport.recovery import DialPacing, SharedDialPacing

PACKAGE = Path(chasqui.__file__).parent
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
#: It logs for others, with their loggers.
FOR_OTHERS = PACKAGE / "consuming" / "throttled_log.py"
#: Loggers that the docs name keep their names wherever the module is.
DOCUMENTED = {PACKAGE / "spark" / "writing" / "backlog.py": "chasqui.spark.backlog"}


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
            expected = repr(DOCUMENTED[source]) if source in DOCUMENTED else "__name__"
            assert [ast.unparse(one) for one in call.args] == [expected], place


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a throttled log sees."""
    now_s = [0.0]
    monkeypatch.setattr("chasqui.consuming.throttled_log.time.monotonic", lambda: now_s[0])
    return now_s


def test_throttled_log_tells_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    log = ThrottledLog(logging.getLogger("chasqui.test"), "mails")
    log.warning("%d acks", 3, acks=3)
    log.warning("%d acks", 4, acks=4)
    log.warning("%d acks", 5, acks=5)
    clock[0] = 10.0
    log.warning("%d acks", 6, acks=6)
    assert caplog.messages == ["3 acks", "5 acks (the last of 2 more like this)", "6 acks"]
    line = JsonFormatter().format(caplog.records[1])
    assert '"queue": "mails", "acks": 5, "left_out": 2' in line


def test_throttled_records_may_come_in_bursts_of_each_kind(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    log = ThrottledLog(logging.getLogger("chasqui.test"), "mails", burst=2)
    for number in range(5):
        log.warning("job %d", number, kind=ValueError)
    log.error("job %d", 9, kind=KeyError)
    assert caplog.messages == ["job 0", "job 1", "job 9"]
    log.close()
    assert caplog.messages[3:] == ["job 4 (the last of 3 more like this)"]
    assert [record.levelname for record in caplog.records[2:]] == ["ERROR", "WARNING"]


async def test_throttled_log_tells_it_also_when_none_follows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chasqui.consuming.throttled_log.EVERY_S", 0.01)
    log = ThrottledLog(logging.getLogger("chasqui.test"), "mails")
    log.warning("job %d", 1)
    log.warning("job %d", 2)
    async with asyncio.timeout(30):
        while len(caplog.messages) < 2:  # noqa: ASYNC110 - a timer of the loop logs it
            await asyncio.sleep(0.01)
    assert caplog.messages == ["job 1", "job 2 (the last of 1 more like this)"]


def test_throttled_records_of_any_number_of_kinds_take_no_more_memory(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    log = ThrottledLog(logging.getLogger("chasqui.test"), "mails")
    for number in range(1000):
        log.warning("job %d", number, kind=number)
    assert len(log._kinds) == MOST_KINDS


# ── A lost server ───────────────────────────────────────────────────────────────────────────────

SOMEWHERE = Endpoint.parse("redis://:canary@somewhere:7000/3")


def test_a_lost_server_is_told_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedDialPacing()
    links = [DialPacing(SOMEWHERE, shared) for _ in range(4)]
    for number, link in enumerate(links):
        link.missed(ConnectionRefusedError(111, "Connect call failed"), 100.0 + number)
    for number, link in enumerate(links):
        link.link_up(112.3 + number)
    assert caplog.messages == [
        "lost the server at somewhere:7000: Connection refused",
        "the server at somewhere:7000 is back after 12.3 s",
    ]
    assert [record.away_s for record in caplog.records[1:]] == [12.3]


def test_a_server_that_comes_and_goes_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = DialPacing(SOMEWHERE, SharedDialPacing())
    for tenth in range(300):
        link.missed(TimeoutError("it has not answered in time"), tenth / 10)
        link.link_up(tenth / 10 + 0.05)
    lost = "lost the server at somewhere:7000: it has not answered in time"
    assert caplog.messages == [lost, "the server at somewhere:7000 is back after 0.1 s"] * 3


def test_a_loss_that_came_too_soon_to_be_told_is_told_if_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = DialPacing(SOMEWHERE, SharedDialPacing())
    for at_s in (0.0, 1.0, 9.0, 11.0):
        link.missed(TimeoutError("no"), at_s)
        if at_s == 0.0:
            link.link_up(0.5)
    link.link_up(21.0)
    assert len(caplog.messages) == 4
    assert caplog.messages[-1] == "the server at somewhere:7000 is back after 20.0 s"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "certificate verify failed"), "certificate verify failed"),
        (ConnectionResetError("the server hung up"), "the server hung up"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_the_reason_is_told_in_words(
    caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    DialPacing(SOMEWHERE, SharedDialPacing()).missed(error, 0.0)
    (message,) = caplog.messages
    assert message.startswith("lost the server at somewhere:7000: ")
    assert told in message
