"""What the programs share that show one figure each: arguments, progress, result."""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.servers import KINDS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
#: What may differ from the commit: it is not measured, and a run before has written it.
_NOT_MEASURED = (":!tests/chaos/results", ":!tests/faults/results.json", ":!docs")
#: The shortest time between two lines of progress.
SAY_S = 5.0

#: Told how many are done.
Say = Callable[[int], None]


def silent(done: int) -> None:
    """Says nothing."""


def commit(root: Path = ROOT) -> str:
    """What is measured: the short hash of the commit, with a "+" if files differ from it; empty
    where there is no repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        is_changed = git("status", "--porcelain", "--", ".", *_NOT_MEASURED)
        return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


class Figure:
    """A program `python -m tests.chaos.WORD`, whose result goes to results/WORD.json, or to one
    file for each server. One that draws nothing has no seed."""

    def __init__(
        self,
        word: str,
        description: str | None,
        *,
        is_seeded: bool = True,
        is_by_server: bool = False,
    ) -> None:
        self.word = word
        self.parser = argparse.ArgumentParser(
            prog=f"python -m tests.chaos.{word}", description=description
        )
        self.parser.add_argument("--server", choices=list(KINDS), default="redis-8.6")
        if is_seeded:
            self.parser.add_argument("--seed", type=int, help="a random one unless given")
        self.parser.add_argument("--json", type=Path, help=f"results/{word}.json unless given")
        self._is_by_server = is_by_server
        self.command = self.commit = ""
        self._console = Console(highlight=False)
        self._began_s = self._said_s = time.monotonic()

    def arguments(self) -> argparse.Namespace:
        """What was asked for; how to repeat it is printed."""
        found = self.parser.parse_args()
        if "seed" in found and found.seed is None:
            found.seed = random.SystemRandom().randrange(1 << 32)
        if found.json is None:
            name = f"{self.word}-{found.server}" if self._is_by_server else self.word
            found.json = RESULTS / f"{name}.json"
        self.command, self.commit = self._repeat(found), commit()
        self._console.print(f"repeat with [bold]{self.command}[/]")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
        return found

    def say(self, done: int, of: str = "") -> None:
        """Print how many are done, now and then."""
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            # Not by rich, which keeps what it has measured: memory is among what is looked at here.
            print(f"{of}{done:,} after {now_s - self._began_s:.0f} s", flush=True)

    def end(self, path: Path, told: dict[str, Any], wrong: list[str]) -> int:
        """Keep the result and print it; the exit code."""
        told = {"command": self.command, "commit": self.commit, **told}
        path.write_text(json.dumps(told, indent=1) + "\n")
        self._console.print(told)
        for line in wrong:
            self._console.print(f"[red]✗ {line}[/]", soft_wrap=True)
        return 1 if wrong else 0

    def _repeat(self, asked: argparse.Namespace) -> str:
        """What makes the same run again."""
        values = {name: value for name, value in vars(asked).items() if name != "json"}
        chosen = {k: v for k, v in values.items() if v != self.parser.get_default(k)}
        return " ".join((self.parser.prog, *(f"--{k} {v}" for k, v in chosen.items())))
