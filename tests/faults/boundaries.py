"""Every place where an operation can break off: before and after each of its Redis commands.

An operation runs as a process of its own behind a proxy. Once undisturbed, which teaches its
commands; then once for each of them and each fault. A process that was killed is followed by
another that does the same. The books, kept outside Redis, tell what is wrong afterwards.
"""

import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from chasqui.model.keys import Keys
from chasqui.scripts import adding, flowing, managing, settling, timing
from chasqui.transport.request import Script
from tests.ledger import Audit, Census, Ledger, audit
from tests.proxy import WAIT_S, Fault, Proxy

#: The links break, and the process goes on; or it dies there, its command unsent or unanswered.
CUTS = (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.CUT_BEHIND)
DEATHS = (Fault.HOLD_BEFORE, Fault.HOLD_AFTER)
#: What every link begins with: one operation stands for all.
HANDSHAKE = frozenset({"HELLO", "CLIENT", "COMMAND", "INFO", "SELECT", "AUTH", "PING", "CONFIG"})

_SCRIPTS = [
    one
    for module in (adding, flowing, managing, settling, timing)
    for one in vars(module).values()
    if isinstance(one, Script)
]
_BY_SHA = {one.sha: one.name for one in _SCRIPTS}
_BY_SOURCE = {one.source: one.name for one in _SCRIPTS}
#: Forks of a process that has imported everything cost milliseconds; and no thread of the tests
#: is forked along.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.faults.programs"])


def is_no_handshake(command: str) -> bool:
    return command.split()[0] not in HANDSHAKE


def is_any(command: str) -> bool:
    return True


class Boundary(NamedTuple):
    """A command of an operation: what it is, and the how manieth of its kind."""

    command: str
    nth: int

    def __str__(self) -> str:
        return f"{self.command} #{self.nth}"


@dataclass(frozen=True)
class Operation:
    """Something that must not lose or double a job, wherever it breaks off."""

    #: Takes the URL of the proxy, that of the server, the queue's name and the folder of the books.
    program: Callable[[str, str, str, str], None]
    #: What is there beforehand; the numbers of the jobs that are.
    prepare: Callable[["Scene"], range] = lambda scene: range(0)
    #: What must be there in the end, beyond that nothing is lost or doubled; complaints.
    check: Callable[["Scene"], list[str]] = lambda scene: []
    #: Commands that it surely has, or it is not what it says.
    core: tuple[str, ...] = ()
    #: Commands of which it is broken off at one at least; which, is up to the server.
    either: tuple[str, ...] = ()
    #: Commands at which it is broken off.
    own: Callable[[str], bool] = is_no_handshake
    #: Whether another process does the same after a death.
    is_repeated: bool = True
    #: Whether a job may be there several times: then `check` counts them.
    has_copies: bool = False


class Stage(Proxy):
    """A proxy that knows which command of an operation it sees, and breaks off at one of them."""

    def __init__(self, upstream: str, at: Boundary | None = None, fault: Fault | None = None):
        self.seen: list[Boundary] = []
        self.is_done = False
        self.at, self._fault = at, fault
        self._times: Counter[str] = Counter()
        super().__init__(upstream)

    def _fault_for(self, name: bytes, frame: bytes) -> Fault | None:
        command = describe(frame)
        self._times[command] += 1
        self.seen.append(Boundary(command, self._times[command]))
        if self.is_done or self.seen[-1] != self.at:
            return None
        self.is_done = True
        return self._fault


@dataclass
class Scene:
    """One run of an operation: its server, its queue and its books."""

    url: str
    queue_name: str
    folder: Path
    present: range = range(0)
    #: Jobs that a process had begun and not finished when it was killed.
    interrupted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keys = Keys(self.queue_name)
        self.ledger = Ledger(self.folder)
        self.client = redis.Redis.from_url(self.url)

    def census(self) -> Census:
        return Census.take(self.url, self.queue_name)

    def audit(self) -> Audit:
        """What the books say of the jobs that were there and of those that were added."""
        tried = {fact.n for fact in self.ledger.read("try")}
        added = {fact.n for fact in self.ledger.read("added")}
        gone = {fact.n for fact in self.ledger.read("gone")}
        sure = (set(self.present) | added) - gone
        refused = {fact.n for fact in self.ledger.read("refused")}
        unknown = (tried - refused) | set(self.present)
        return audit(sure, self.ledger.read(), self.census(), unknown=unknown)

    def interrupt(self, who: str) -> None:
        """A process has died: note what it was at."""
        self.ledger.write("dead", -1, who)
        begun = {fact.n for fact in self.ledger.read("start")}
        self.interrupted = begun & self.census().pending.keys()


class Trial:
    """Runs one operation on one server, as often as there are places to break it off."""

    def __init__(self, operation: Operation, url: str, queue_name: str, folder: Path) -> None:
        self._operation = operation
        self._url = url
        self._queue_name = queue_name
        self._folder = folder
        self._runs = 0

    def learn(self) -> list[Boundary]:
        """The commands of the operation, from a run that nothing disturbs."""
        scene = self._scene()
        with Stage(self._url) as stage:
            complaints = self._finish(scene, stage)
            seen = list(stage.seen)
        missing = set(self._operation.core) - {boundary.command for boundary in seen}
        assert not complaints, complaints
        assert not missing, f"{missing} are not among {[str(one) for one in seen]}"
        return [boundary for boundary in seen if self._operation.own(boundary.command)]

    def break_off(self, at: Boundary, fault: Fault) -> list[str] | None:
        """What is wrong after a run with a fault; None if it never came to that command."""
        scene = self._scene()
        with Stage(self._url, at, fault) as stage:
            if fault in DEATHS:
                reached = self._die(scene, stage)
                if reached and self._operation.is_repeated:
                    with Stage(self._url) as next_stage:
                        return self._finish(scene, next_stage)
                return self._judge(scene) if reached else None
            complaints = self._finish(scene, stage)
            return complaints if stage.is_done else None

    def _scene(self) -> Scene:
        """A queue of its own, on a server that knows no script."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        scene = Scene(self._url, f"{self._queue_name}-{self._runs}", folder)
        scene.present = self._operation.prepare(scene)
        scene.client.script_flush()
        return scene

    def _start(self, scene: Scene, stage: Stage) -> Any:
        arguments = (stage.url, scene.url, scene.queue_name, str(scene.folder))
        process = _PROCESSES.Process(target=_run, args=(self._operation.program, *arguments))
        process.start()
        return process

    def _finish(self, scene: Scene, stage: Stage) -> list[str]:
        """Let a process do it to the end."""
        process = self._start(scene, stage)
        process.join(WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return [f"the process hangs; it sent {[str(one) for one in stage.seen[-8:]]}"]
        if process.exitcode:
            return [f"the process ended with {process.exitcode}"]
        if not scene.ledger.count("refused"):
            return self._judge(scene) + self._operation.check(scene)
        # Only the first link of all may be given up.
        met = next((one.command.split()[0] for one in stage.seen if one == stage.at), "nothing")
        complaints = [] if met in HANDSHAKE else [f"refused for a fault at {met}"]
        return self._judge(scene) + complaints

    def _die(self, scene: Scene, stage: Stage) -> bool:
        """Kill a process at the fault; False if it ended before."""
        process = self._start(scene, stage)
        while not stage.is_held and process.is_alive():
            process.join(0.005)
        if not stage.is_held:
            process.join()
            return False
        process.kill()
        process.join()
        stage.cut()
        stage.resume()
        scene.interrupt(str(process.pid))
        return True

    def _judge(self, scene: Scene) -> list[str]:
        found = scene.audit()
        faults = found.faults
        if self._operation.has_copies:
            faults.pop("doubled", None)
        complaints = [f"{name}: {sorted(jobs)}" for name, jobs in faults.items()]
        if beyond := found.extra.keys() - scene.interrupted:
            complaints.append(f"ran again without need: {sorted(beyond)}")
        if found.overlapping:
            complaints.append(f"ran in two places at once: {sorted(found.overlapping)}")
        return complaints


def describe(frame: bytes) -> str:
    """What a command is: its name, and its script or subcommand if it has one."""
    words = _words(frame)
    name = words[0].upper().decode()
    if name == "EVALSHA":
        return f"EVALSHA {_BY_SHA[words[1]]}"
    if name == "EVAL":
        return f"EVAL {_BY_SOURCE[words[1]]}"
    if name in ("XGROUP", "CLIENT", "COMMAND", "SCRIPT", "XINFO"):
        return f"{name} {words[1].upper().decode()}"
    return name


def _words(frame: bytes) -> list[bytes]:
    """The first two arguments of a command's frame; an argument may hold any bytes."""
    words, start = [], frame.index(b"$")
    while len(words) < 2 and start < len(frame):
        line_end = frame.index(b"\r\n", start)
        length = int(frame[start + 1 : line_end])
        words.append(frame[line_end + 2 : line_end + 2 + length])
        start = line_end + 2 + length + 2
    return words


def _run(program: Callable[[str, str, str, str], None], *arguments: str) -> None:
    logging.disable()  # what a worker says about broken links is no news here
    program(*arguments)
