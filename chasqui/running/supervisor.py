"""Several processes of one worker: started, restarted, recycled, drained, and never left behind.

Each process has a line to the supervisor, which asks over it for the drain or for the end. When the
supervisor dies the line breaks, and the process drains. Signals would not do: a terminal or a
service manager sends them to the whole group, so that a process would get each one twice.
"""

import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Final

from chasqui.errors import ChasquiError
from chasqui.running.process import (
    DRAINED,
    FAILED,
    FORCED,
    NEVER,
    STOP_NOW_S,
    USAGE,
    Recycle,
    Stop,
    run_until,
)
from chasqui.running.runnable import Runnable
from chasqui.running.target import Target, TargetError, load_or_log
from chasqui.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

RESTART_MIN_S, RESTART_MAX_S = 0.5, 30.0
#: A process that lived this long is not to blame for the deaths before it.
HEALTHY_S: Final = 30.0
#: How much longer than it must a process may take to stop at once, before it is killed.
KILL_SLACK_S: Final = 1.0
#: Recycling is spread over this share of the limit, so that not all processes go at once.
SPREAD: Final = 0.1

#: What a process and its supervisor tell each other.
LOADED, DRAIN, NOW, DONE = b"loaded ", b"drain", b"now ", b"done"
BROKEN: Final = b"broken"


@dataclass(slots=True)
class Child:
    """One of the processes, and those that replace it when it ends."""

    process: SpawnProcess | None = None
    line: Connection | None = None
    #: The names of its consumers, once it has sent them.
    consumer_ids: tuple[str, ...] = ()
    started_s: float = 0.0
    start_at_s: float = 0.0
    deaths: int = 0
    #: It ran until nothing was left, and is not started again.
    is_done: bool = False
    #: The program itself is at fault: its module cannot be imported, or its lifespan raised.
    is_broken: bool = False
    #: It was ended while it imported the program.
    is_called_off: bool = False


class Supervisor:
    """Keeps `count` processes of a worker running."""

    def __init__(
        self,
        target: Target | str,
        count: int,
        recycle: Recycle = NEVER,
        around_load: Callable[[], AbstractContextManager[None]] = nullcontext,
        show: Callable[[Runnable], None] | None = None,
    ) -> None:
        """Each process enters `around_load` while it imports the target. The first one calls `show`
        with what it has loaded. Both must be importable too."""
        self._target = Target(target) if isinstance(target, str) else target
        self._recycle = recycle
        self._around_load = around_load
        self._show = show
        self._children = [Child() for _ in range(count)]
        self._spawn = multiprocessing.get_context("spawn")
        self._signals: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_stopping = False
        self._code = DRAINED

    @property
    def count(self) -> int:
        """How many processes there should be."""
        return len(self._children)

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end. Safe from any thread."""
        return self._is_stopping

    @property
    def running(self) -> int:
        """How many processes have loaded their worker. Safe from any thread."""
        children = self._children
        return sum(child.process is not None and bool(child.consumer_ids) for child in children)

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a process finds that the target is no worker.
        Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Python writes to this at once. The handler alone would not end our wait if the signal
        # comes as the wait begins, or if the kernel gives it to another thread.
        before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while not self._is_over():
                self.run_once()
        finally:
            self._end_all()
            signal.set_wakeup_fd(before)
        return self._code

    def _is_over(self) -> bool:
        if any(child.process for child in self._children):
            return False
        # Without children there is nothing to be done either: a signal ends it.
        are_done = bool(self._children) and all(child.is_done for child in self._children)
        return self._is_stopping or are_done

    def run_once(self) -> None:
        """Start processes that are due, then wait for something to happen and handle it."""
        idle_s = None if self._is_stopping else self._start_due()
        sentinels = {child.process.sentinel: child for child in self._children if child.process}
        lines = {child.line: child for child in self._children if child.line}
        for ready in wait([*sentinels, *lines, self._wake_read], idle_s):
            if ready == self._wake_read:
                os.read(self._wake_read, 64)
            elif isinstance(ready, Connection):
                if not ready.closed:  # its process may have ended in this round
                    self._receive(lines[ready])
            elif isinstance(ready, int):
                self._ended(sentinels[ready])
        while self._signals:
            self._handle_signal(self._signals.pop(0))

    # ── Processes ───────────────────────────────────────────────────────────────────────────────

    def _start_due(self) -> float | None:
        """Start processes that are due; how long until the next is, or None if none will be."""
        idle_s: list[float] = []
        for child in self._children:
            if child.is_done:
                continue
            if child.process is None:
                if child.start_at_s <= time.monotonic():
                    self._start(child)
                if child.process is None:
                    idle_s.append(max(0.0, child.start_at_s - time.monotonic()))
            if not child.consumer_ids:
                break  # wait for the first: if it fails to load, so would the others
        return min(idle_s, default=None)

    def _start(self, child: Child) -> None:
        """Start a process, or try again later if the system refuses: the others live on."""
        living = [other for other in self._children if other.process is not None]
        taken = [name for other in living for name in other.consumer_ids]
        child.started_s = time.monotonic()
        try:
            ours, theirs = self._spawn.Pipe()
            try:
                index = self._children.index(child)
                show = self._show if index == 0 and not child.deaths else None
                process = self._spawn.Process(
                    target=_work,
                    args=(self._target, self._spread(), self._around_load, theirs, taken, show),
                    name=f"chasqui-worker-{index}",
                )
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        except OSError as error:
            delay_s = self._put_off(child)
            logger.warning(
                "no process can be started: %s; the next try is in %.1f s",
                error,
                delay_s,
                extra={"error": str(error)},
            )
        else:
            child.process, child.line, child.consumer_ids = process, ours, ()
            child.is_broken = child.is_called_off = False

    def _put_off(self, child: Child) -> float:
        """How long until the next start: longer with each failure in a row."""
        lived_s = time.monotonic() - child.started_s
        child.deaths = 1 if lived_s >= HEALTHY_S else child.deaths + 1
        delay_s = min(RESTART_MAX_S, RESTART_MIN_S * 2.0 ** min(child.deaths - 1, 10))
        child.start_at_s = time.monotonic() + delay_s
        return delay_s

    def _spread(self) -> Recycle:
        most = self._recycle.max_jobs
        if most is None:
            return self._recycle
        return replace(self._recycle, max_jobs=most + random.randrange(int(most * SPREAD) + 1))

    def _receive(self, child: Child) -> None:
        assert child.line is not None
        try:
            said = child.line.recv_bytes()
        except (EOFError, OSError):
            child.line.close()
            child.line = None
            return
        if said.startswith(LOADED):
            child.consumer_ids = tuple(json.loads(said.removeprefix(LOADED)))
        elif said == DONE:
            child.is_done = True
        elif said == BROKEN:
            child.is_broken = True

    def _ended(self, child: Child) -> None:
        """See to a process that has ended."""
        process = child.process
        assert process is not None
        process.join()
        code = process.exitcode
        while child.line is not None and child.line.poll():  # its last words
            self._receive(child)
        self._forget(child)
        self._plan_next(child, process, code)
        process.close()

    def _plan_next(self, child: Child, process: SpawnProcess, code: int | None) -> None:
        """Decide when the next process of a child starts, after one that ended with this code."""
        if code == USAGE:
            self._code = USAGE
            self._drain()
        elif self._is_stopping:
            if code != DRAINED and self._code == DRAINED and not child.is_called_off:
                self._code = FAILED
        elif code == DRAINED:
            child.deaths, child.start_at_s = 0, 0.0
        else:
            delay_s = self._put_off(child)
            logger.warning(
                "process %d ended with %s; another one starts in %.1f s",
                process.pid,
                f"code {code}" if code is not None and code >= 0 else f"signal {-(code or 0)}",
                delay_s,
                extra={"ended_pid": process.pid, "code": code},
            )

    def _forget(self, child: Child) -> None:
        if child.line is not None:
            child.line.close()
        child.process, child.line = None, None

    # ── The end ─────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _handle_signal(self, number: int) -> None:
        if not self._is_stopping:
            text = "draining %d %s; a second signal stops at once"
            what = "process" if self.count == 1 else "processes"
            logger.info(text, self.count, what, extra={"processes": self.count})
            self._drain()
        else:
            self._code = FORCED + number
            self._send(NOW + str(self._code).encode(), self._children)
            self._end_all()

    def _drain(self) -> None:
        self._is_stopping = True
        self._ask_to_drain(self._children)

    def _ask_to_drain(self, children: Sequence[Child]) -> None:
        """Ask these processes to drain. One that still imports the program cannot hear it, perhaps
        for ever, and has no jobs: it is ended."""
        for child in children:
            if child.process is not None and not child.consumer_ids:
                child.is_called_off = True
                child.process.terminate()
        self._send(DRAIN, children)

    def _send(self, message: bytes, children: Sequence[Child]) -> None:
        for child in children:
            if child.line is not None:
                try:
                    child.line.send_bytes(message)
                except OSError:
                    fields = {"said": message.decode(errors="replace")}
                    logger.debug("a process ended before it was told %r", message, extra=fields)

    def _end_all(self) -> None:
        """Wait as long as it may take to stop at once, then kill."""
        self._is_stopping = True
        deadline_s = time.monotonic() + STOP_NOW_S + KILL_SLACK_S
        for child in self._children:
            if child.process is not None:
                child.process.join(max(0.0, deadline_s - time.monotonic()))
                if child.process.exitcode is None:
                    child.process.kill()
                    child.process.join()
                self._forget(child)


def _work(
    target: Target,
    recycle: Recycle,
    around_load: Callable[[], AbstractContextManager[None]],
    line: Connection,
    taken: list[str],
    show: Callable[[Runnable], None] | None,
) -> None:
    """A process of the supervisor, from its start to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the supervisor passes it on
    try:
        worker = load_or_log(target, around_load())
        for name in () if worker is None else worker.consumer_ids:
            if name in taken:
                raise TargetError(
                    f"{target} gives every process the consumer_id {name!r}: "
                    "leave it out, so that each gets its own"
                )
    except TargetError as error:
        logger.error("%s", error, extra={"target": str(target)})
        raise SystemExit(USAGE) from None
    if worker is None:
        line.send_bytes(BROKEN)
        raise SystemExit(FAILED)
    if show is not None:
        show(worker)
    line.send_bytes(LOADED + json.dumps(worker.consumer_ids).encode())
    with Stop(worker) as stop:
        signal.signal(signal.SIGTERM, lambda number, frame: stop.drain())
        listener = threading.Thread(target=_listen, args=(line, stop), daemon=True)
        listener.start()
        try:
            code = run_until(worker, stop, recycle)
            if code == DRAINED and target.burst and not stop.is_recycled:
                line.send_bytes(DONE)
            if isinstance(worker, WorkerGroup) and worker.program_error is not None:
                line.send_bytes(BROKEN)
        except (ChasquiError, OSError) as error:
            logger.error("%s", error, extra={"queue": worker.name})
            code = FAILED
    raise SystemExit(code)


def _listen(line: Connection, stop: Stop) -> None:
    """In a thread: obey the supervisor. When it is gone, drain and end."""
    while True:
        try:
            said = line.recv_bytes()
        except (EOFError, OSError):
            stop.drain()
            return
        if said == DRAIN:
            stop.drain()
        elif said.startswith(NOW):
            stop.now(int(said.removeprefix(NOW)))
