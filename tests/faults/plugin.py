"""The marks `fault` and `long`, and the table of results that `--fault-results` writes."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.catalogue import marks_of
from tests.servers import KINDS, remote_servers

#: Where the result of a test stands that needs no server.
ANY_SERVER = "any server"
_OPTION = "--fault-results"
#: Fixtures that give a server of one kind.
_FIXTURES = {"valkey_9": "valkey-9", "redis_62": "redis-6.2", "redis_86": "redis-8.6"}
_KINDS = [*KINDS, *(server.name for server in remote_servers())]
#: Parameters that name a kind of server.
_PARAMETERS = ("server", "kind", "cluster", "watched")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, metavar="FILE", help="write how each fault went, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(_OPTION)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long unless it is asked for; let each test carry its faults."""
    if "long" not in (config.option.markexpr or ""):
        long = [item for item in items if item.get_closest_marker("long")]
        if long:
            config.hook.pytest_deselected(items=long)
            items[:] = [item for item in items if item not in long]
    for item in items:
        item.user_properties += [("fault", (mark.number, mark.control)) for mark in marks_of(item)]
        item.user_properties += [("server", kind) for kind in _servers_of(item)]


def _servers_of(item: pytest.Item) -> Iterable[str]:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    chosen = (parameters.get(name) for name in _PARAMETERS)
    yield from (kind for kind in chosen if kind in _KINDS)
    yield from (
        kind for name, kind in _FIXTURES.items() if name in getattr(item, "fixturenames", ())
    )


class _Results:
    """Gathers the outcome of each fault on each server: the worst of its tests, and "passed in
    part" if not all of them ran.

    A control counts only when it does not pass: that it does shows that a check works, not the
    product. Where a process of tests died, or all was broken off, nothing is written: what did not
    come to be told would be missing.
    """

    def __init__(self, path: Path) -> None:
        from tests.chaos.figure import commit  # not all that run tests have what it needs

        self._path = path
        self._commit = commit()
        self._outcomes: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._was_lost = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call", "teardown"):  # of a process that died
            self._was_lost = True
        if report.when != "call" and report.passed:
            return
        told: list[tuple[str, Any]] = report.user_properties
        servers = {value for name, value in told if name == "server"} or {ANY_SERVER}
        for number, control in (value for name, value in told if name == "fault"):
            for server in servers:
                if not (control and report.passed):
                    self._outcomes[server][number].add(report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._was_lost or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        table: dict[str, Any] = {"commit": self._commit}
        table |= {
            server: {str(number): _worst(found) for number, found in sorted(faults.items())}
            for server, faults in sorted(self._outcomes.items())
        }
        self._path.write_text(json.dumps(table, indent=1) + "\n")


def _worst(outcomes: set[str]) -> str:
    if outcomes == {"passed", "skipped"}:
        return "passed in part"
    return next(outcome for outcome in ("failed", "passed", "skipped") if outcome in outcomes)
