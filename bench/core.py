"""Measures the core and writes the table in README.md: `python -m bench.core`."""

import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from bench.contests import CONTESTS

HERE = Path(__file__).parent
README = HERE / "README.md"
MARKERS = ("<!-- begin bench.core -->", "<!-- end bench.core -->")
LIBRARIES = ("msgpack", "hiredis", "python-ulid")


def main() -> int:
    """Run every contest, write the table; fails where a target is missed."""
    timings = measure()
    rows = [
        "| work | core | Python | ratio | at least |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    missed = []
    for contest in CONTESTS:
        ours, theirs = timings[contest.name, "ours"], timings[contest.name, "theirs"]
        ratio = theirs / ours
        target = f"{contest.target:g}" if contest.target else ""
        rows.append(
            f"| {contest.name} | {ours:.0f} ns | {theirs:.0f} ns | {ratio:.1f} | {target} |"
        )
        if contest.target and ratio < contest.target:
            missed.append(f"{contest.name}: {ratio:.1f}, not {target}")
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    where = f"Python {platform.python_version()}, {libraries}, {processor()}."
    before, rest = README.read_text().split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    table = "\n".join([MARKERS[0], *rows, "", where, MARKERS[1]])
    README.write_text(before + table + after)
    print("\n".join(rows))
    if missed:
        print(*missed, sep="\n", file=sys.stderr)
    return 1 if missed else 0


def measure() -> dict[tuple[str, str], float]:
    """The best of each side, in ns per job or call: other processes' time is not theirs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--benchmark-enable", f"--benchmark-json={report}", "--benchmark-quiet"]
        options += ["--benchmark-warmup=on", "--benchmark-max-time=0.25", "-q", "--timeout=0"]
        if pytest.main([str(HERE / "test_core.py"), *options]):
            sys.exit("the two sides of a contest disagree: nothing was measured")
        found = json.loads(report.read_text())["benchmarks"]
    return {
        (run["group"], run["extra_info"]["side"]): run["stats"]["min"]
        * 1e9
        / run["extra_info"]["count"]
        for run in found
    }


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
