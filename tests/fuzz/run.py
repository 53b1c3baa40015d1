"""Runs workers side by side, watches them, and keeps the input of one that dies."""

import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import sanitized
from tests.fuzz.slot import Slot, State

NAMES = (
    *("reply", "entries", "columns", "maps", "typed", "envelope", "member", "payload"),
    *("url", "name"),
)
#: Where inputs are kept that made the core fail: the file's name begins with the target's.
KEPT = sanitized.ROOT / "build/fuzz"
#: A batch takes far less than a second.
HANG_S = 60.0

_POLL_S = 0.1


class Failure(NamedTuple):
    """The end of a worker that should not have ended."""

    target: str
    path: Path  # the input
    report: str  # what the worker or the sanitizer said


class Outcome(NamedTuple):
    """What became of the inputs of a run."""

    states: dict[str, State]  # all workers together; times are those of the slowest
    failure: Failure | None


def run(
    names: list[str],
    inputs: int,
    seed: int,
    jobs: int,
    watch: Callable[[dict[str, State]], None] = lambda states: None,
) -> Outcome:
    """Feed each target so many inputs. The same seed, inputs and jobs give the same inputs."""
    with tempfile.TemporaryDirectory() as scratch:
        workers: list[_Worker] = []
        try:
            for part in range(jobs):
                share = inputs // jobs + (part < inputs % jobs)
                workers.append(_Worker(Path(scratch, str(part)), names, share, f"{seed}.{part}"))
            while True:
                running = [worker for worker in workers if worker.is_running()]
                watch(_together(workers, names))
                failed = next((worker for worker in workers if worker.has_failed()), None)
                if failed or not running:
                    failure = failed.failure() if failed else None
                    return Outcome(_together(workers, names), failure)
                time.sleep(_POLL_S)
        finally:
            for worker in workers:
                worker.end()


def replay(path: Path) -> int:
    """Feed one kept input; the worker's exit status, its words go where ours go."""
    command = _command("--replay", str(path.resolve()), path.name.partition("-")[0])
    return subprocess.call(command, env=sanitized.environment(), cwd=sanitized.ROOT)


def _command(*arguments: str) -> list[str]:
    # -P: the folder that we are in must not come before the sanitized build.
    return [sys.executable, "-P", "-m", "tests.fuzz.worker", *arguments]


class _Worker:
    def __init__(self, path: Path, names: list[str], inputs: int, seed: str) -> None:
        self._names = names
        self._inputs = inputs
        self._slot = Slot(path.with_suffix(".slot"))
        self._output = path.with_suffix(".output")
        self._seen = (0.0, -1)  # when, and how many inputs there were then
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                _command(str(self._slot.path), seed, str(inputs), *names),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=sanitized.environment(),
                cwd=sanitized.ROOT,
            )

    def states(self) -> list[State]:
        return [self._slot.state(place) for place in range(len(self._names))]

    def is_running(self) -> bool:
        return self._process.poll() is None

    def has_failed(self) -> bool:
        if not self.is_running():
            done = all(state.inputs == self._inputs for state in self.states())
            return self._process.returncode != 0 or not done
        count, now = sum(state.inputs for state in self.states()), time.monotonic()
        if count != self._seen[1]:
            self._seen = (now, count)
        return now - self._seen[0] > HANG_S

    def failure(self) -> Failure:
        place, data = self._slot.input()
        target = self._names[place]
        report = self._output.read_text(errors="replace")
        if self.is_running():
            report += f"no progress for {HANG_S:.0f} s"
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = KEPT / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
        kept.write_bytes(data)
        return Failure(target, kept, report)

    def end(self) -> None:
        if self.is_running():
            self._process.kill()
        self._process.wait()


def _together(workers: list[_Worker], names: list[str]) -> dict[str, State]:
    together = {}
    for name, states in zip(names, zip(*(w.states() for w in workers), strict=True), strict=True):
        inputs, accepted, elapsed_ms, growth_kb = zip(*states, strict=True)
        together[name] = State(sum(inputs), sum(accepted), max(elapsed_ms), max(growth_kb))
    return together
