"""Did a hot path get slower? `make bench-check`; `python -m bench.check --write` sets the baseline.

Each path's CPU time is divided by that of a calibration loop in the same run, so that the baseline
holds on any machine. What is beyond the tolerance is measured again before it counts.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"
CALIBRATION = "calibration"
TOLERANCE = 0.20
TRIES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make this run the baseline")
    if parser.parse_args().write:
        return write()
    baseline = json.loads(BASELINE.read_text())
    here = python()
    if baseline["python"] != here:
        sys.exit(f"the baseline is of Python {baseline['python']}, not {here}")
    found: dict[str, float] = {}
    for _ in range(TRIES):
        for name, ratio in measure().items():
            found[name] = min(ratio, found.get(name, ratio))
        if not slower(found, baseline["ratios"]):
            break
    missing = sorted(set(found) ^ set(baseline["ratios"]))
    if missing:
        sys.exit(f"the baseline needs `python -m bench.check --write`: {', '.join(missing)}")
    table = tell(found, baseline["ratios"])
    print(table)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as page:
            page.write(f"## Hot paths\n\n{table}\n")
    worse = slower(found, baseline["ratios"])
    if worse:
        print(f"more than {TOLERANCE:.0%} slower: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


def write() -> int:
    """Measure a few times and keep the best of each."""
    found: dict[str, float] = {}
    for _ in range(TRIES):
        for name, ratio in measure().items():
            found[name] = min(ratio, found.get(name, ratio))
    ratios = {name: round(ratio, 4) for name, ratio in sorted(found.items())}
    BASELINE.write_text(json.dumps({"python": python(), "ratios": ratios}, indent=2) + "\n")
    print(BASELINE.read_text())
    return 0


def measure() -> dict[str, float]:
    """The CPU time of each path, in calibration loops; the best of its rounds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--benchmark-enable", f"--benchmark-json={report}", "--benchmark-quiet"]
        options += ["--benchmark-timer=time.process_time"]
        options += ["--benchmark-max-time=1", "--benchmark-min-rounds=7", "-q", "--timeout=0"]
        options += ["-p", "no:cacheprovider"]
        # A process of its own each time: what one run left behind is not timed by the next.
        argv = [sys.executable, "-m", "pytest", str(HERE / "test_hot_paths.py"), *options]
        done = subprocess.run(argv, cwd=HERE.parent, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"a hot path does not work, nothing was measured:\n{done.stdout[-3000:]}")
        runs = json.loads(report.read_text())["benchmarks"]
    times = {run["name"].removeprefix("test_"): run["stats"]["min"] for run in runs}
    loop_s = min(time for name, time in times.items() if name.startswith(CALIBRATION))
    return {name: time / loop_s for name, time in times.items() if not name.startswith(CALIBRATION)}


def slower(found: dict[str, float], baseline: dict[str, float]) -> list[str]:
    return [
        name
        for name, ratio in found.items()
        if name in baseline and ratio > baseline[name] * (1 + TOLERANCE)
    ]


def tell(found: dict[str, float], baseline: dict[str, float]) -> str:
    rows = ["| hot path | now | baseline | change |", "| --- | ---: | ---: | ---: |"]
    for name, ratio in found.items():
        change = ratio / baseline[name] - 1
        rows.append(f"| {name} | {ratio:.3f} | {baseline[name]:.3f} | {change:+.0%} |")
    return "\n".join(rows)


def python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


if __name__ == "__main__":
    sys.exit(main())
