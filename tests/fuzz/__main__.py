"""`python -m tests.fuzz`: broken input for each decoder of the core, under the sanitizers."""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.fuzz import run, sanitized
from tests.fuzz.slot import State


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each target")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run")
    parser.add_argument("--only", action="append", choices=run.NAMES, help="this target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="feed one kept input")
    parser.add_argument("--json", type=Path, metavar="FILE", help="note what came of it there")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    if not options.replay:
        console.print(f"seed {seed}")
    try:
        sanitized.runtime()
    except sanitized.MissingSanitizerError as error:
        console.print(f"Nothing was run: {error}.")
        return 1
    with console.status("Compiling the core with the sanitizers"):
        sanitized.build()
    if options.replay:
        return run.replay(options.replay)
    names = options.only or list(run.NAMES)
    outcome = _run(console, names, options.inputs, seed, options.jobs)
    console.print(_table(outcome))
    if options.json:
        told = json.loads(options.json.read_text()) if options.json.exists() else {}
        told |= _told(outcome, options.inputs, seed, options.jobs)
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if not outcome.failure:
        return 0
    console.print(outcome.failure.report, markup=False)
    console.print(
        f"The input is kept. Feed it again: python -m tests.fuzz --replay "
        f"{os.path.relpath(outcome.failure.path)}\nRun it all again: python -m tests.fuzz "
        f"--inputs {options.inputs} --jobs {options.jobs} --seed {seed}"
    )
    return 1


def _run(console: Console, names: list[str], inputs: int, seed: int, jobs: int) -> run.Outcome:
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>7,.0f} inputs/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {
            name: progress.add_task(name, total=inputs, start=False, rate=0.0) for name in names
        }

        def watch(states: dict[str, State]) -> None:
            for name, state in states.items():
                if state.inputs:
                    progress.start_task(tasks[name])
                progress.update(tasks[name], completed=state.inputs, rate=_rate(state))
                if state.inputs == inputs:
                    progress.stop_task(tasks[name])

        return run.run(names, inputs, seed, jobs, watch)


def _table(outcome: run.Outcome) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("target", no_wrap=True)
    for title in ("inputs", "seconds", "per s", "accepted", "refused", "crashes", "grown MB"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, state in outcome.states.items():
        crashes = _crashes(outcome, name)
        table.add_row(
            name,
            f"{state.inputs:,}",
            f"{state.elapsed_ms / 1000:.1f}",
            f"{_rate(state):,.0f}",
            f"{state.accepted:,}",
            f"{state.inputs - state.accepted:,}",
            str(crashes),
            f"{state.growth_kb / 1024:.0f}",
        )
    return table


def _told(outcome: run.Outcome, inputs: int, seed: int, jobs: int) -> dict[str, Any]:
    """What came of each target, and what repeats it."""
    command = f"python -m tests.fuzz --inputs {inputs} --jobs {jobs} --seed {seed}"
    return {
        name: {
            "inputs": state.inputs, "accepted": state.accepted, "crashes": _crashes(outcome, name),
            "grown_mb": state.growth_kb // 1024, "seconds": state.elapsed_ms // 1000,
            "command": f"{command} --only {name}",
        }
        for name, state in outcome.states.items()
    }  # fmt: skip


def _crashes(outcome: run.Outcome, name: str) -> int:
    return int(outcome.failure is not None and outcome.failure.target == name)


def _rate(state: State) -> float:
    return 1000 * state.inputs / max(1, state.elapsed_ms)


if __name__ == "__main__":
    sys.exit(main())
