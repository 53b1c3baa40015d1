"""Keeps the names of tests that pass when they are judged again: `--passed-again FILE`.

`make test` runs what failed once more, alone. A race may be forgiven once, never hidden.
"""

from pathlib import Path

import pytest

_OPTION = "--passed-again"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, metavar="FILE", help="append the names of tests that pass")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(_OPTION)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PassedAgain(path))


class _PassedAgain:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes if its setup, its call and its teardown do."""
        has_passed = self._has_passed.get(report.nodeid, True)
        self._has_passed[report.nodeid] = has_passed and report.passed

    def pytest_sessionfinish(self) -> None:
        names = [name for name, has_passed in self._has_passed.items() if has_passed]
        with self._path.open("a") as file:
            file.writelines(f"{name}\n" for name in names)
