"""Running a `Worker` as a process: which one, on which loop, until when, with what exit code."""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import math
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from chasqui.consuming.handlers import THREAD_NAME
from chasqui.model.words import count
from chasqui.worker import Worker

logger = logging.getLogger(__name__)

DRAINED: Final = 0
FAILED: Final = 1
USAGE: Final = 2
#: Stopped at once by a signal: this and its number.
FORCED: Final = 128

#: How often the limits of a process are looked at.
CHECK_S: Final = 0.2
#: A process that was told to stop at once is ended after this, come what may.
STOP_NOW_S: Final = 2.0
#: How much longer than its deadline a drain may take before the process is ended, come what may: a
#: handler may block the loop.
DRAIN_SLACK_S: Final = 8.0
#: How long the thread that watches over the end sleeps at most.
WATCH_S: Final = 3600.0
#: How long tasks of handlers may take to notice that they are cancelled.
TASKS_END_S: Final = 0.5
#: How long threads that have nothing more to do may take to notice it.
HANDLER_END_S: Final = 0.5
#: The threads that handlers get from `asyncio.to_thread`.
LOOP_THREAD_NAME: Final = f"{THREAD_NAME}-of-loop"

_STATM: Final = Path("/proc/self/statm")


class TargetError(ValueError):
    """What was named is no worker; the text says why."""


@dataclass(frozen=True, slots=True)
class Recycle:
    """When a process has had its time. None: never."""

    max_jobs: int | None = None
    max_rss_bytes: int | None = None

    def is_due(self, worker: Worker) -> bool:
        health = worker.health()
        if self.max_jobs is not None and health is not None and health.finished >= self.max_jobs:
            return True
        return self.max_rss_bytes is not None and rss_bytes() >= self.max_rss_bytes


NEVER: Final = Recycle()


def load(target: str) -> Worker:
    """The worker that `module:attribute` names: the thing itself, or what a factory makes.

    Raises TargetError for a name that leads nowhere. What the module itself raises goes through.
    """
    module_name, separator, path = target.partition(":")
    if not module_name or not separator or not path:
        raise TargetError(f"{target!r} is no worker: write it as module:attribute")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and the console script does not
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise TargetError(f"there is no module {error.name!r} in {here} or on the path") from None
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise TargetError(f"module {module_name!r} has no {path!r}") from None
    if not isinstance(found, Worker) and callable(found) and not isinstance(found, type):
        found = found()
    if not isinstance(found, Worker):
        kind = _with_article(type(found).__name__)
        raise TargetError(f"{target} is {kind}, not a Worker or a function that makes one")
    return found


def load_or_tell(target: str, around: AbstractContextManager[None]) -> Worker | None:
    """The worker; None if the module raised, which has then been shown without our own frames."""
    try:
        with around:
            return load(target)
    except TargetError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and _is_machinery(trace.tb_frame):
            trace = trace.tb_next
        logger.error(
            "%s cannot be loaded",
            target,
            exc_info=(type(error), error, trace),
            extra={"target": target},
        )
        return None


def run(worker: Worker, recycle: Recycle = NEVER) -> int:
    """Run until SIGTERM or SIGINT and drain; the second signal stops at once. The exit code."""
    with Stop(worker) as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop.on_signal)
        return run_until(worker, stop, recycle)


def run_until(worker: Worker, stop: "Stop", recycle: Recycle = NEVER) -> int:
    """Run on a loop of its own until `stop` is asked for; the exit code."""
    # The runner would wait for the loop's threads without a limit, and a handler may block in one.
    threads = ThreadPoolExecutor(thread_name_prefix=LOOP_THREAD_NAME)
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        runner.get_loop().set_default_executor(threads)
        runner.run(_run(worker, stop, recycle))
    finally:
        runner.get_loop().set_default_executor(ThreadPoolExecutor())
        threads.shutdown(wait=False)
        if not stop.has_tasks_left:  # else it would wait for them without a limit, too
            with contextlib.suppress(RuntimeError):  # it wants a thread, and there may be none
                runner.close()
    if stop.code == DRAINED:
        health = worker.health()
        finished = 0 if health is None else health.finished
        logger.info(
            "queue %s: worker ended after %s",
            worker.name,
            count(finished, "run"),
            extra={"queue": worker.name, "finished": finished},
        )
        if health is not None and (health.cut_short or health.is_incomplete):
            stop.code = FAILED
        else:
            # What a handler began there and did not wait for.
            _has_handlers_left(stop.left_s, LOOP_THREAD_NAME)
    return stop.code


class Stop:
    """The end of a worker, asked for from signal handlers and other threads."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = 0
        #: When the process must have ended, and with what code. Signal handlers may put into it.
        self._limits: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()
        self._deadline_s = math.inf
        self.code = DRAINED
        #: Whether there are tasks that ignore that they were cancelled.
        self.has_tasks_left = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._asked:
            self.drain()
        if self._asked > 1:
            self._call(self._worker.stop_now)

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """The first asks for the drain, the second cuts it short, the third waits for nothing."""
        self._asked += 1
        if self._asked == 1:
            _tell_drain(self._worker)
            self.drain()
        elif self._asked == 2:
            self.now(FORCED + number)
        else:
            os._exit(FORCED + number)

    def drain(self) -> None:
        self._asked = max(self._asked, 1)
        self._call(lambda: asyncio.ensure_future(self._worker.close()))
        self.time_end()

    def time_end(self) -> None:
        """The drain has begun: it has its deadline, and not much more."""
        self._deadline_s = min(
            self._deadline_s, time.monotonic() + self._worker.shutdown_deadline_s
        )
        self._limits.put((self._deadline_s + DRAIN_SLACK_S, FAILED))

    @property
    def left_s(self) -> float:
        """How long what handlers began still has."""
        left_s = self._deadline_s - time.monotonic()
        return max(0.0, min(left_s, self._worker.shutdown_deadline_s))

    def now(self, code: int) -> None:
        """Cancel what runs. A handler that will not be cancelled does not keep the process."""
        self._asked = max(self._asked, 2)
        self.code = code
        self._call(self._worker.stop_now)
        self._limits.put((time.monotonic() + STOP_NOW_S, code))

    def _watch(self) -> None:
        """In a thread, which is there before it is needed: end the process when its time is over,
        though a handler blocks the loop."""
        ends_s, code = math.inf, FAILED
        while (left_s := ends_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                limit = self._limits.get(timeout=min(left_s, WATCH_S))
                if limit is None:
                    return
                ends_s, code = min(limit, (ends_s, code))
        if code < FORCED:
            name = self._worker.name
            logger.error(
                "the drain of queue %s has not ended in time: its process is ended",
                name,
                extra={"queue": name},
            )
        os._exit(code)

    def _call(self, deed: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deed)

    def __enter__(self) -> "Stop":
        threading.Thread(target=self._watch, name="chasqui-end", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process here if handlers were cut short or left behind: they may never return,
        and Python would wait for them."""
        self._limits.put(None)
        if isinstance(error, SystemExit):
            self.code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            self.code = FAILED
        if self.code >= FORCED or self.has_tasks_left or _has_handlers_left():
            if error is not None and not isinstance(error, SystemExit):
                logger.error("%s", error, extra={"queue": self._worker.name})
            logging.shutdown()
            os._exit(self.code)


def _tell_drain(worker: Worker) -> None:
    """What a worker that was told to end still waits for."""
    health = worker.health()
    running = 0 if health is None else health.running
    logger.info(
        "queue %s: draining; %s may take %g s more; a second signal stops at once",
        worker.name,
        count(running, "running job"),
        worker.shutdown_deadline_s,
        extra={"queue": worker.name, "running": running},
    )


def rss_bytes() -> int:
    """How much memory this process takes; where the system does not say, the most it ever took."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _has_handlers_left(limit_s: float = HANDLER_END_S, prefix: str = THREAD_NAME) -> bool:
    deadline_s = time.monotonic() + limit_s
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                return True
    return False


async def _run(worker: Worker, stop: Stop, recycle: Recycle) -> None:
    try:
        await _run_to_its_end(worker, stop, recycle)
    finally:
        stop.has_tasks_left = await _has_tasks_left(worker.name)


async def _has_tasks_left(name: str) -> bool:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    left = (await asyncio.wait(tasks, timeout=TASKS_END_S))[1] if tasks else set()
    if left:
        logger.error(
            "%s of queue %s ignored being cancelled",
            count(len(left), "task"),
            name,
            extra={"queue": name, "tasks": len(left)},
        )
    return bool(left)


async def _run_to_its_end(worker: Worker, stop: Stop, recycle: Recycle) -> None:
    stop.attach(asyncio.get_running_loop())
    running = asyncio.ensure_future(worker.run())
    if recycle != NEVER:
        while not (await asyncio.wait([running], timeout=CHECK_S))[0]:
            if recycle.is_due(worker) and not worker.is_closed:
                text = "queue %s: this process has reached its limit and makes way for another"
                logger.info(text, worker.name, extra={"queue": worker.name})
                stop.time_end()
                await worker.close()
    await running


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _is_machinery(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name == __file__ or name.startswith("<frozen importlib") or "/importlib/" in name


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
