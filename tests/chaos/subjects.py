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
    setup: str = ""
    #: After how long others take over what a lost worker had, by its documents; None: the lease.
    recovers_s: float | None = None
    #: Left as its first example has it.
    is_default: bool = False

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


def _peer(name: str, title: str, library: str, packages: tuple[str, ...]) -> Subject:
    environment = LIBRARIES[library].environment
    if environment.is_node:
        program: tuple[str, ...] = ("node", str(ROOT / "tests/chaos/programs" / f"{name}.cjs"))
    else:
        program = (str(python_of(environment)), "-m", f"{PROGRAMS}.{name}")
    return Subject(name, title, program, program, environment, packages)


def _safe(name: str, setup: str, recovers_s: float | None = None) -> Subject:
    """At what its documentation has for production, with times as short as the lease."""
    return replace(SUBJECTS[name], is_mixed=False, setup=setup, recovers_s=recovers_s)


def _default(name: str, recovers_s: float, setup: str) -> Subject:
    """As its first example has it, but for the pace."""
    return replace(
        SUBJECTS[name], is_mixed=False, setup=setup, recovers_s=recovers_s, is_default=True
    )


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        _ours(),
        _broken(),
        _peer("chasquimq", "chasquimq", "chasquimq", ("chasquimq",)),
        _peer("arq", "arq", "arq", ("arq",)),
        _peer("saq", "SAQ", "saq", ("saq",)),
        _peer("taskiq", "taskiq-redis", "taskiq", ("taskiq", "taskiq-redis")),
        _peer("bullmq", "BullMQ", "bullmq_node", ("bullmq",)),
    )
}
#: For a comparison: all with immediate jobs only, and under faults that any queue can meet.
PEERS: dict[str, dict[str, Subject]] = {
    "safe": {
        subject.name: subject
        for subject in (
            _safe("chasqui", "claim_min_idle_ms = lease, max_deliveries without limit"),
            _safe("chasquimq", "claim_min_idle_ms = lease, add_unique"),
            _safe("arq", "job_timeout = 10 s, to which it adds 10, max_tries = 1000, "
                         "job_completion_wait = 15 s", 20),
            _safe("saq", "timeout, heartbeat and sweep = lease, retries = 1000, "
                         "shutdown_grace_period_s = 15", 6),
            _safe("taskiq", "idle_timeout and unacknowledged_lock_timeout = lease, "
                            "consumer_id = 0, acknowledged when the result is saved"),
            _safe("bullmq", "lockDuration and stalledInterval = lease, maxStalledCount = 1000, "
                            "maxRetriesPerRequest = null for workers, enableOfflineQueue = false "
                            "for producers, removeOnComplete", 6),
        )
    },
    "default": {
        subject.name: subject
        for subject in (
            _default("chasqui", 15, "claim_min_idle_ms is 15 s"),
            _default("chasquimq", 30, "claim_min_idle_ms is 30 s"),
            _default("arq", 310, "job_timeout is 300 s, to which it adds 10, max_tries is 5"),
            _default("saq", 70, "timeout is 10 s, there is no heartbeat, sweep is 60 s, and "
                                "retries is 1: what a lost worker had is given up"),
            _default("taskiq", 600, "idle_timeout is 600 s"),
            _default("bullmq", 60, "lockDuration and stalledInterval are 30 s, maxStalledCount "
                                   "is 1"),
        )
    },
}  # fmt: skip

__all__ = ["PEERS", "ROOT", "SUBJECTS", "InstallError", "Subject", "folder_of"]
