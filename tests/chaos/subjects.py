"""Whom the harness harms: how to start its workers and producers, and what can be asked of it."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.environments import InstallError, ensure, folder_of, is_ready, python_of
from bench.libraries import LIBRARIES, Environment
from chasqui._version import VERSION

ROOT = Path(__file__).parents[2]
PROGRAMS = "tests.chaos.programs"


@dataclass(frozen=True)
class Subject:
    """One queue library, or a broken one that the judge must catch."""

    name: str
    title: str
    worker: tuple[str, ...]
    producer: tuple[str, ...]
    environment: Environment | None = None
    #: The distributions whose versions make the result.
    packages: tuple[str, ...] = ()
    #: Keys, group and census are chasqui's, so all faults and all checks apply.
    is_ours: bool = False
    #: Jobs with delays, retries and failures, not only immediate ones.
    is_mixed: bool = False
    #: How it was set up, where that differs from its defaults.
    settings: str = ""

    def versions(self) -> dict[str, str]:
        """The versions of its packages, as they are installed."""
        if self.environment is None:
            return {"chasqui": VERSION}
        folder = folder_of(self.environment)
        found = {}
        for name in self.packages:
            if self.environment.is_node:
                told = json.loads((folder / "node_modules" / name / "package.json").read_text())
                found[name] = str(told["version"])
            else:
                pattern = f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
                found[name] = next(folder.glob(pattern)).stem.rpartition("-")[2]
        return found

    def prepare(self, report: Callable[[str], None]) -> None:
        """Install what it needs unless it is there; InstallError if that fails."""
        if self.environment is not None and not is_ready(self.environment):
            ensure(self.environment, report)


def _ours() -> Subject:
    worker = (sys.executable, "-m", "chasqui", "worker", f"{PROGRAMS}.chasqui:make")
    producer = (sys.executable, "-m", f"{PROGRAMS}.chasqui")
    return Subject("chasqui", "chasqui", worker, producer, is_ours=True, is_mixed=True)


def _broken() -> Subject:
    worker = (sys.executable, "-m", f"{PROGRAMS}.broken")
    producer = (sys.executable, "-m", f"{PROGRAMS}.chasqui")
    return Subject("broken", "acknowledges first", worker, producer, is_ours=True)


def _peer(name: str, title: str, library: str, packages: tuple[str, ...], settings: str) -> Subject:
    environment = LIBRARIES[library].environment
    if environment.is_node:
        program: tuple[str, ...] = ("node", str(ROOT / "tests/chaos/programs" / f"{name}.cjs"))
    else:
        program = (str(python_of(environment)), "-m", f"{PROGRAMS}.{name}")
    return Subject(name, title, program, program, environment, packages, settings=settings)


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        _ours(),
        _broken(),
        _peer("chasquimq", "chasquimq", "chasquimq", ("chasquimq",), "claim_min_idle_ms = lease"),
        _peer("arq", "arq", "arq", ("arq",), "job_timeout = 10 s, max_tries = 1000"),
        _peer("saq", "SAQ", "saq", ("saq",), "timeout, heartbeat, sweep = lease, retries = 1000"),
        _peer("taskiq", "taskiq-redis", "taskiq", ("taskiq", "taskiq-redis"),
              "idle_timeout and unacknowledged_lock_timeout = lease"),
        _peer("bullmq", "BullMQ", "bullmq_node", ("bullmq",),
              "lockDuration and stalledInterval = lease, maxStalledCount = 1000"),
    )
}  # fmt: skip
#: For a comparison: all with immediate jobs only, and under faults that any queue can meet.
PEERS = {
    "chasqui": replace(SUBJECTS["chasqui"], is_mixed=False, settings="claim_min_idle_ms = lease"),
    **{name: subject for name, subject in SUBJECTS.items() if subject.environment is not None},
}

__all__ = ["PEERS", "ROOT", "SUBJECTS", "InstallError", "Subject", "folder_of"]
