"""Several processes of one worker: started, restarted, recycled, drained, and never left behind.

Each process has a line to the supervisor. It asks over the line for the drain and for the end; when
the supervisor dies the line breaks, and the process drains by itself. Signals would not do: a
terminal or a service manager sends them to the whole group, and a process would get each one twice.
"""

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Final

from chasqui import runner
from chasqui.errors import ChasquiError
from chasqui.running.process import DRAINED, FAILED, FORCED, USAGE, Recycle, Stop, TargetError

logger = logging.getLogger(__name__)

RESTART_MIN_S, RESTART_MAX_S = 0.5, 30.0
#: A process that lived this long is not to blame for the deaths before it.
HEALTHY_S: Final = 30.0
#: How much longer than it must a process may take to stop at once, before it is killed.
KILL_SLACK_S: Final = 1.0
#: Recycling is spread over this share of the limit, so that not all processes go at once.
SPREAD: Final = 0.1

_LOADED, _DRAIN, _NOW = b"loaded ", b"drain", b"now "


@dataclass(slots=True)
class Place:
    """One of the processes, and its successors."""

    process: SpawnProcess | None = None
    line: Connection | None = None
    #: Its consumer, once it has said so.
    consumer_id: str | None = None
    started_s: float = 0.0
    start_at_s: float = 0.0
    deaths: int = 0


class Supervisor:
    """Keeps `count` processes of a worker running."""

    def __init__(
        self,
        target: str,
        count: int,
        recycle: Recycle = runner.NEVER,
        around_load: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`around_load` is entered in each process around the import of the target; it must be
        importable itself."""
        self._target = target
        self._recycle = recycle
        self._around_load = around_load
        self._places = [Place() for _ in range(count)]
        self._spawn = multiprocessing.get_context("spawn")
        self._signals: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_stopping = False
        self._code = DRAINED

    @property
    def count(self) -> int:
        """How many processes there should be."""
        return len(self._places)

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end. From any thread."""
        return self._is_stopping

    @property
    def running(self) -> int:
        """How many there are that have their worker. From any thread."""
        places = self._places
        return sum(place.process is not None and bool(place.consumer_id) for place in places)

    def run(self) -> int:
        """Until SIGTERM or SIGINT, or until a process says that what was asked makes no sense."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # By Python itself, at once: a handler that is due as we begin to wait does not run before
        # something else happens, nor does one whose signal another thread was given.
        before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while not self._is_stopping or any(place.process for place in self._places):
                self.run_once()
        finally:
            self._end_all()
            signal.set_wakeup_fd(before)
        return self._code

    def run_once(self) -> None:
        """Start who is due, then wait for something to happen and see to it."""
        idle_s = None if self._is_stopping else self._start_due()
        sentinels = {place.process.sentinel: place for place in self._places if place.process}
        lines = {place.line: place for place in self._places if place.line}
        for ready in wait([*sentinels, *lines, self._wake_read], idle_s):
            if ready == self._wake_read:
                os.read(self._wake_read, 64)
            elif isinstance(ready, Connection):
                if not ready.closed:  # else its process has just been buried
                    self._hear(lines[ready])
            elif isinstance(ready, int):
                self._bury(sentinels[ready])
        while self._signals:
            self._obey(self._signals.pop(0))

    # ── Processes ───────────────────────────────────────────────────────────────────────────────

    def _start_due(self) -> float | None:
        """How long until the next start is due; None if there is none to wait for."""
        idle_s: list[float] = []
        for place in self._places:
            if place.process is None:
                if place.start_at_s <= time.monotonic():
                    self._start(place)
                if place.process is None:
                    idle_s.append(max(0.0, place.start_at_s - time.monotonic()))
            if place.consumer_id is None:
                break  # a mistake shows with the first: the others would only repeat it
        return min(idle_s, default=None)

    def _start(self, place: Place) -> None:
        """Start a process; where the system has none to give, later: the others live on."""
        taken = [other.consumer_id for other in self._places if other.process is not None]
        place.started_s = time.monotonic()
        try:
            ours, theirs = self._spawn.Pipe()
            try:
                process = self._spawn.Process(
                    target=_work,
                    args=(self._target, self._spread(), self._around_load, theirs, taken),
                    name=f"chasqui-worker-{self._places.index(place)}",
                )
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        except OSError as error:
            delay_s = self._put_off(place)
            logger.warning(
                "no process can be started: %s; the next try is in %.1f s",
                error,
                delay_s,
                extra={"error": str(error)},
            )
        else:
            place.process, place.line, place.consumer_id = process, ours, None

    def _put_off(self, place: Place) -> float:
        """How long until the next start, the longer the more of them failed one after the other."""
        lived_s = time.monotonic() - place.started_s
        place.deaths = 1 if lived_s >= HEALTHY_S else place.deaths + 1
        delay_s = min(RESTART_MAX_S, RESTART_MIN_S * 2.0 ** min(place.deaths - 1, 10))
        place.start_at_s = time.monotonic() + delay_s
        return delay_s

    def _spread(self) -> Recycle:
        most = self._recycle.max_jobs
        if most is None:
            return self._recycle
        return replace(self._recycle, max_jobs=most + random.randrange(int(most * SPREAD) + 1))

    def _hear(self, place: Place) -> None:
        assert place.line is not None
        try:
            said = place.line.recv_bytes()
        except (EOFError, OSError):
            place.line.close()
            place.line = None
            return
        if said.startswith(_LOADED):
            place.consumer_id = said.removeprefix(_LOADED).decode()

    def _bury(self, place: Place) -> None:
        """A process ended: say how, and when the next one comes."""
        process = place.process
        assert process is not None
        process.join()
        code = process.exitcode
        self._forget(place)
        if code == USAGE:
            self._code = USAGE
            self._drain()
        elif self._is_stopping:
            if code != DRAINED and self._code == DRAINED:
                self._code = FAILED
        elif code == DRAINED:
            place.deaths, place.start_at_s = 0, 0.0
        else:
            delay_s = self._put_off(place)
            logger.warning(
                "process %d ended with %s; another one starts in %.1f s",
                process.pid,
                f"code {code}" if code is not None and code >= 0 else f"signal {-(code or 0)}",
                delay_s,
                extra={"ended_pid": process.pid, "code": code},
            )
        process.close()

    def _forget(self, place: Place) -> None:
        if place.line is not None:
            place.line.close()
        place.process, place.line = None, None

    # ── The end ─────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _obey(self, number: int) -> None:
        if not self._is_stopping:
            count = self.count
            text = "draining %d processes; a second signal stops them at once"
            logger.info(text, count, extra={"processes": count})
            self._drain()
        else:
            self._code = FORCED + number
            self._tell(_NOW + str(self._code).encode())
            self._end_all()

    def _drain(self) -> None:
        self._is_stopping = True
        self._tell(_DRAIN)

    def _tell(self, message: bytes) -> None:
        for place in self._places:
            if place.line is not None:
                try:
                    place.line.send_bytes(message)
                except OSError:
                    fields = {"said": message.decode(errors="replace")}
                    logger.debug("a process ended before it was told %r", message, extra=fields)

    def _end_all(self) -> None:
        """Wait as long as stopping at once may take, then kill."""
        self._is_stopping = True
        deadline_s = time.monotonic() + runner.STOP_NOW_S + KILL_SLACK_S
        for place in self._places:
            if place.process is not None:
                place.process.join(max(0.0, deadline_s - time.monotonic()))
                if place.process.exitcode is None:
                    place.process.kill()
                    place.process.join()
                self._forget(place)


def _work(
    target: str,
    recycle: Recycle,
    around_load: Callable[[], AbstractContextManager[None]],
    line: Connection,
    taken: list[str | None],
) -> None:
    """A process of the supervisor, from its start to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the supervisor speaks for it
    try:
        worker = runner.load_or_tell(target, around_load())
        if worker is not None and worker.consumer_id in taken:
            raise TargetError(
                f"{target} gives every process the consumer_id {worker.consumer_id!r}: "
                "leave it out, so that each gets its own"
            )
    except TargetError as error:
        logger.error("%s", error, extra={"target": target})
        raise SystemExit(USAGE) from None
    if worker is None:
        raise SystemExit(FAILED)
    line.send_bytes(_LOADED + worker.consumer_id.encode())
    with Stop(worker) as stop:
        signal.signal(signal.SIGTERM, lambda number, frame: stop.drain())
        listener = threading.Thread(target=_listen, args=(line, stop), daemon=True)
        listener.start()
        try:
            code = runner.run_until(worker, stop, recycle)
        except (ChasquiError, OSError) as error:
            logger.error("%s", error, extra={"queue": worker.name})
            code = FAILED
    raise SystemExit(code)


def _listen(line: Connection, stop: Stop) -> None:
    """In a thread: do what the supervisor says. Once it is gone, drain, and be gone as well."""
    while True:
        try:
            said = line.recv_bytes()
        except (EOFError, OSError):
            stop.drain()
            return
        if said == _DRAIN:
            stop.drain()
        elif said.startswith(_NOW):
            stop.now(int(said.removeprefix(_NOW)))
