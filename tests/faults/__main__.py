"""Prints which tests show each fault, and which are its controls: `python -m tests.faults`."""

import contextlib
import io
import json
import sys

import pytest

from tests.faults.catalogue import CATALOGUE, marks_of


class _Collector:
    """The names of the tests of each fault, as pytest finds them; parameters left out."""

    def __init__(self) -> None:
        empty = {number: {"tests": set[str](), "controls": set[str]()} for number in CATALOGUE}
        self.found: dict[int, dict[str, set[str]]] = empty

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in marks_of(item):
                role = "controls" if mark.control else "tests"
                self.found[mark.number][role].add(item.nodeid.partition("[")[0])


def main() -> int:
    """Collect the whole suite; JSON with `--json`, a list for people without."""
    collector = _Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        arguments = ["--collect-only", "-q", "-m", "fault or long", "-p", "no:cacheprovider"]
        code = pytest.main(arguments, plugins=[collector])
    if code != pytest.ExitCode.OK:
        print(said.getvalue(), file=sys.stderr)
        return int(code)
    if "--json" in sys.argv:
        sets = {n: {role: sorted(names) for role, names in f.items()} for n, f in _all(collector)}
        print(json.dumps(sets))
        return 0
    for number, found in _all(collector):
        print(f"{number:2} {CATALOGUE[number].title}: {CATALOGUE[number].right}")
        for role, names in found.items():
            print(*(f"     {role[:-1]} {name}" for name in sorted(names) or ["none"]), sep="\n")
    return 0


def _all(collector: _Collector) -> list[tuple[int, dict[str, set[str]]]]:
    return sorted(collector.found.items())


if __name__ == "__main__":
    sys.exit(main())
