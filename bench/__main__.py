"""Measures chasqui beside other job queues: `make bench`, or `python -m bench --help`.

Writes bench/out/: raw.jsonl (a line a measurement), report.md, report.html and plots.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench.document import markdown, page
from bench.libraries import LIBRARIES
from bench.report import blocks
from bench.results import Results
from bench.runner import Options, Runner
from bench.scenarios import SCENARIOS, Scenario, growth

OUT = Path(__file__).parent / "out"
#: Who is measured in a quick run, unless told.
QUICK = ("chasqui", "chasquimq", "limit", "redis_benchmark", "bullmq_node", "taskiq")
#: What --only may name beside the numbers of targets.
GROWTH = "growth"
CORE = 15


def main() -> int:
    asked = parse()
    console = Console()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not asked.report:
        measure(asked, out, console)
    elif not (out / "raw.jsonl").exists():
        sys.exit(f"{out} holds no results yet: measure first, without --report")
    results = Results.load(out / "raw.jsonl")
    images = draw(results, out, console)
    written = blocks(results, images)
    (out / "report.md").write_text(markdown(written))
    (out / "report.html").write_text(page("chasqui: benchmark", written))
    console.print(f"{out}/report.md, report.html and raw.jsonl tell what was found.")
    if asked.publish:
        from bench.flames import record
        from bench.publish import publish

        record(out)
        console.print(f"{publish(results, out, images)} tells the world.")
    return summary(results, console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").strip())
    parser.add_argument("--only", help="numbers of targets, scenarios, or growth: 1,2,drain,growth")
    parser.add_argument("--peers", help=f"of {','.join(LIBRARIES)}; chasqui and limit always are")
    parser.add_argument("--rounds", type=int, help="measurements of each (3; quick 1; full 5)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="few jobs, few peers: under 5 minutes")
    how.add_argument("--full", action="store_true", help="more rounds, and growth up to 1M jobs")
    parser.add_argument("--seed", type=int, default=1, help="decides who goes first in a round")
    parser.add_argument("--out", type=Path, default=OUT, help="where to write (bench/out)")
    parser.add_argument("--add", action="store_true", help="keep what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing, report again")
    parser.add_argument("--publish", action="store_true", help="also write docs/performance.md")
    return parser.parse_args()


def measure(asked: argparse.Namespace, out: Path, console: Console) -> None:
    """Run what was asked for, and write raw.jsonl."""
    raw = out / "raw.jsonl"
    if raw.exists() and not asked.add:
        raw.rename(out / "raw.before.jsonl")
    rounds = asked.rounds or (1 if asked.quick else 5 if asked.full else 3)
    if asked.quick:
        options = Options(rounds, fraction=10, quiet_limit_s=1, repeats=0, seed=asked.seed)
    else:
        options = Options(rounds, seed=asked.seed)
    names = asked.peers.split(",") if asked.peers else QUICK if asked.quick else tuple(LIBRARIES)
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        sys.exit(f"no such peer: {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    names = tuple(dict.fromkeys(("chasqui", *names, "limit")))
    scenarios, with_core = chosen(asked)
    runner = Runner(out, console, options)
    runner.run(scenarios, [LIBRARIES[name] for name in names])
    if with_core:
        runner.write_core()


def chosen(asked: argparse.Namespace) -> tuple[list[Scenario], bool]:
    """The scenarios that were asked for, and whether the core is among them."""
    growing = growth(1_000_000 if asked.full else 100_000)
    quick_out = {"memory_1m"} if asked.quick else set()
    if not asked.only:
        usual = [each for each in SCENARIOS if each.name not in quick_out]
        return usual + ([] if asked.quick else growing), True
    words = asked.only.split(",")
    found = [each for each in SCENARIOS if each.name in words or str(each.line) in words]
    if GROWTH in words:
        found += growing
    if not found and str(CORE) not in words:
        sys.exit(f"--only {asked.only}: numbers from 1 to {CORE}, names of scenarios, or {GROWTH}")
    return found, str(CORE) in words


def draw(results: Results, out: Path, console: Console) -> dict[str, str]:
    """The plots, by name; none without matplotlib."""
    try:
        from bench import plots
    except ImportError:
        console.print("no plots: matplotlib is missing (pip install 'chasqui[bench]')")
        return {}
    return {name: path.name for name, path in plots.draw(results, out).items()}


def summary(results: Results, console: Console) -> int:
    """Print the verdicts; 0 whatever they are: short is no failure of the benchmark."""
    from bench.lines import all_checks
    from bench.report import amount, spread

    for check in all_checks():
        found = check.value(results)
        if found is None:
            continue
        verdict = check.verdict(results)
        colour = "green" if verdict == "PASS" else "red"
        sign = "≤" if check.is_most else "≥"
        console.print(
            f"{check.line:>3} [{colour}]{verdict:<5}[/] {check.scenario:<13} {check.what:<36} "
            f"{amount(found.best):>8}{check.unit}  ({sign} {check.target:g}; {spread(found)})",
            highlight=False,
            soft_wrap=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
