"""Runs the scenarios: rounds, libraries taking turns within each, one row per measurement."""

import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.core import processor
from bench.environments import ROOT, InstallError, ensure
from bench.libraries import Library
from bench.results import Row
from bench.scenarios import Scenario
from bench.stage import Stage
from tests.servers import Server

#: How often a measurement that others spoiled is repeated.
REPEATS = 2


@dataclass(frozen=True)
class Options:
    """How thorough a run is."""

    rounds: int
    #: What the numbers of jobs are divided by.
    fraction: int = 1
    #: How long to wait for a quiet machine, each time.
    quiet_limit_s: float = 20.0
    repeats: int = REPEATS
    seed: int = 1


@dataclass(frozen=True)
class Turn:
    """One measurement to make."""

    round: int
    scenario: Scenario
    library: Library


class Runner:
    """Measures, shows how far it is, and writes each row as it comes."""

    def __init__(self, out: Path, console: Console, options: Options) -> None:
        self._out = out
        self._console = console
        self._options = options
        self._took_s: dict[tuple[str, str], float] = {}
        #: What a library cannot do, or failed at: not asked again.
        self._hopeless: set[tuple[str, str]] = set()

    def run(self, scenarios: list[Scenario], libraries: list[Library]) -> None:
        self._write({"run": about(self._options)})
        usable = self._install(libraries)
        turns = list(self._turns(scenarios, usable))
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"), console=self._console,
        )  # fmt: skip
        with ExitStack() as stack, progress:
            task = progress.add_task("", total=len(turns), left="")
            stages: dict[str, Stage] = {}
            for i, turn in enumerate(turns):
                left = f"{self._left_s(turns[i:]) / 60:.0f} min left"
                title = f"{turn.scenario.name}: {turn.library.title}"
                progress.update(task, description=f"{title:<34}", left=left)
                kind = turn.scenario.server
                if kind not in stages:
                    server = stack.enter_context(Server(kind))
                    stages[kind] = Stage(server, self._options.quiet_limit_s)
                    stack.callback(stages[kind].close)
                self._measure(stages[kind], turn)
                progress.advance(task)

    def write_core(self) -> None:
        """Measure the compiled core against the same work in Python."""
        from bench import core  # needs what measuring it needs

        timings = core.measure()
        for name in dict.fromkeys(name for name, _ in timings):
            ours, theirs = timings[name, "ours"], timings[name, "theirs"]
            row = {"scenario": "core", "library": name, "round": 0, "n": 1}
            self._write({**row, "ours_ns": ours, "theirs_ns": theirs, "ratio": theirs / ours})

    def _install(self, libraries: list[Library]) -> list[Library]:
        broken: dict[str, str] = {}
        for environment in dict.fromkeys(library.environment for library in libraries):
            try:
                ensure(environment, lambda line: self._console.print(f"[dim]{line}[/]"))
            except InstallError as error:
                broken[environment.name] = str(error)
        for library in libraries:
            if library.environment.name in broken:
                reason = broken[library.environment.name]
                self._console.print(f"[red]{library.title} does not install:[/] {reason}")
                self._write({"install_error": reason, "library": library.name})
        return [each for each in libraries if each.environment.name not in broken]

    def _turns(self, scenarios: list[Scenario], libraries: list[Library]) -> Iterator[Turn]:
        order = random.Random(self._options.seed)
        for round in range(self._options.rounds):
            for scenario in scenarios:
                if scenario.is_once and round:
                    continue
                # Who comes first may gain or lose by it: each round decides anew.
                for library in order.sample(libraries, len(libraries)):
                    if scenario.takes(library):
                        yield Turn(round, scenario, library)

    def _measure(self, stage: Stage, turn: Turn) -> None:
        key = turn.scenario.name, turn.library.name
        if key in self._hopeless:
            return
        for attempt in range(1 + self._options.repeats):
            stage.clear()
            start_s = time.monotonic()
            n = self._jobs(turn)
            told = turn.scenario.run(stage, turn.library, n)
            took_s = time.monotonic() - start_s
            self._took_s[key] = took_s
            row = {
                "scenario": turn.scenario.name,
                "library": turn.library.name,
                "round": turn.round,
                "attempt": attempt,
                "asked": n,
                "server": stage.version,
                "took_s": took_s,
                **({"varies": turn.scenario.varies, "at": turn.scenario.at}
                   if turn.scenario.varies else {}),
                **told,
                **stage.noise(),
            }  # fmt: skip
            self._write(row)
            if "unsupported" in told or "error" in told:
                self._hopeless.add(key)
            if "error" in told:
                name = f"{turn.scenario.name}: {turn.library.title}"
                self._console.print(f"[yellow]{name}:[/] {told['error']}")
            if not row.get("spoiled") or "rate" not in told:
                return

    def _jobs(self, turn: Turn) -> int:
        scenario, fraction = turn.scenario, self._options.fraction
        n = turn.library.jobs[scenario.jobs] if scenario.fixed is None else scenario.fixed
        if fraction == 1 or scenario.varies:
            return n
        floor = 3 if scenario.name == "idle" else 500
        return max(min(n, floor), n // fraction // 1000 * 1000)

    def _left_s(self, turns: list[Turn]) -> float:
        seen = self._took_s
        usual = sum(seen.values()) / len(seen) if seen else 6.0
        keys = ((turn.scenario.name, turn.library.name) for turn in turns)
        return sum(seen.get(key, usual) for key in keys)

    def _write(self, row: Row) -> None:
        with open(self._out / "raw.jsonl", "a") as raw:
            raw.write(json.dumps(row) + "\n")


def about(options: Options) -> Row:
    """What a result needs to be judged: the code, the machine, the settings."""
    memory = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal"):
                memory = int(line.split()[1]) // 2**20
    except OSError:
        pass
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "chasqui", "bench")),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "node": _output("node", "--version"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "options": asdict(options),
    }


def _git(*words: str) -> str:
    return _output("git", *words)


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""
