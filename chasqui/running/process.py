"""A worker or a group as a process: its loop, its signals, its end and its exit code."""

import asyncio
import contextlib
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from chasqui.consuming.handlers import THREAD_NAME
from chasqui.model.words import count
from chasqui.running.runnable import Runnable
from chasqui.running.target import log_with_trace
from chasqui.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

DRAINED: Final = 0
FAILED: Final = 1
USAGE: Final = 2
#: Stopped at once by a signal: this plus the number of the signal.
FORCED: Final = 128

#: How often the limits of a process are checked.
CHECK_S: Final = 0.2
#: A process that was told to stop at once is ended after this in any case.
STOP_NOW_S: Final = 2.0
#: How much longer than its deadline a drain may take before the process is ended in any case: a
#: handler may block the loop.
DRAIN_SLACK_S: Final = 8.0
#: How long the thread that enforces the end sleeps at most.
WATCH_S: Final = 3600.0
#: How long tasks of handlers may take to notice that they are cancelled.
TASKS_END_S: Final = 0.5
#: How long threads that have nothing more to do may take to end.
HANDLER_END_S: Final = 0.5
#: The names of threads that handlers get from `asyncio.to_thread` start with this.
LOOP_THREAD_NAME: Final = f"{THREAD_NAME}-of-loop"

_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Recycle:
    """When to replace a process by a new one. None: no such limit."""

    max_jobs: int | None = None
    max_rss_bytes: int | None = None

    def is_due(self, worker: Runnable) -> bool:
        health = worker.health()
        if self.max_jobs is not None and health is not None and health.finished >= self.max_jobs:
            return True
        return self.max_rss_bytes is not None and rss_bytes() >= self.max_rss_bytes


NEVER: Final = Recycle()


def run(worker: Runnable, recycle: Recycle = NEVER) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal stops at once. Returns the exit
    code."""
    with Stop(worker) as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop.on_signal)
        return run_until(worker, stop, recycle)


def run_until(worker: Runnable, stop: "Stop", recycle: Recycle = NEVER) -> int:
    """Run on a loop of its own until `stop` is asked for. Returns the exit code."""
    # The runner would wait for the loop's threads without a limit, and a handler may block one.
    threads = ThreadPoolExecutor(thread_name_prefix=LOOP_THREAD_NAME)
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        runner.get_loop().set_default_executor(threads)
        runner.run(_run(worker, stop, recycle))
    except Exception as error:
        if not isinstance(worker, WorkerGroup) or worker.program_error is not error:
            raise
        text = "%s cannot run: an error around its jobs, not in one"
        log_with_trace(error, text, worker.label, {"queue": worker.name})
        stop.code = FAILED
    finally:
        runner.get_loop().set_default_executor(ThreadPoolExecutor())
        threads.shutdown(wait=False)
        if not stop.has_tasks_left:  # it would wait for those without a limit too
            with contextlib.suppress(RuntimeError):  # it needs a thread, and there may be none
                runner.close()
    if stop.code == DRAINED:
        health = worker.health()
        finished = 0 if health is None else health.finished
        logger.info(
            "%s: worker ended after %s",
            worker.label,
            count(finished, "run"),
            extra={"queue": worker.name, "finished": finished},
        )
        if health is not None and (health.cut_short or health.is_incomplete):
            stop.code = FAILED
        else:
            # Wait for what a handler began in such a thread and did not await.
            _has_handlers_left(stop.left_s, LOOP_THREAD_NAME)
    return stop.code


class Stop:
    """Ends a worker on the word of signal handlers and of other threads."""

    def __init__(self, worker: Runnable) -> None:
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = 0
        #: When the process must have ended, and with what code. Safe to put into in a signal
        #: handler.
        self._limits: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()
        self._deadline_s = math.inf
        self.code = DRAINED
        #: Whether it ended only to make way for another process.
        self.is_recycled = False
        #: Whether there are tasks that ignored being cancelled.
        self.has_tasks_left = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._asked:
            self.drain()
        if self._asked > 1:
            self._call(self._worker.stop_now)

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """The first signal begins the drain, the second cuts it short, the third exits at once."""
        self._asked += 1
        if self._asked == 1:
            _log_drain(self._worker)
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
        """The drain has begun: end the process soon after its deadline in any case."""
        self._deadline_s = min(
            self._deadline_s, time.monotonic() + self._worker.shutdown_deadline_s
        )
        self._limits.put((self._deadline_s + DRAIN_SLACK_S, FAILED))

    @property
    def left_s(self) -> float:
        """How much time is left for what handlers began."""
        left_s = self._deadline_s - time.monotonic()
        return max(0.0, min(left_s, self._worker.shutdown_deadline_s))

    def now(self, code: int) -> None:
        """Cancel running handlers. One that ignores it does not keep the process alive."""
        self._asked = max(self._asked, 2)
        self.code = code
        self._call(self._worker.stop_now)
        self._limits.put((time.monotonic() + STOP_NOW_S, code))

    def _watch(self) -> None:
        """In a thread, which starts before it is needed: end the process when its time is over,
        even while a handler blocks the loop."""
        ends_s, code = math.inf, FAILED
        while (left_s := ends_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                limit = self._limits.get(timeout=min(left_s, WATCH_S))
                if limit is None:
                    return
                ends_s, code = min(limit, (ends_s, code))
        if code < FORCED:
            logger.error(
                "the drain of %s has not ended in time: its process is ended",
                self._worker.label,
                extra={"queue": self._worker.name},
            )
        os._exit(code)

    def _call(self, function: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

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
        and Python would wait for their threads."""
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


def _log_drain(worker: Runnable) -> None:
    health = worker.health()
    running = 0 if health is None else health.running
    logger.info(
        "%s: draining; %s may take %g s more; a second signal stops at once",
        worker.label,
        count(running, "running job"),
        worker.shutdown_deadline_s,
        extra={"queue": worker.name, "running": running},
    )


def rss_bytes() -> int:
    """The memory of this process; where the system does not say, the most that it ever had."""
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


async def _run(worker: Runnable, stop: Stop, recycle: Recycle) -> None:
    try:
        stop.attach(asyncio.get_running_loop())
        running = asyncio.ensure_future(worker.run())
        if recycle != NEVER:
            while not (await asyncio.wait([running], timeout=CHECK_S))[0]:
                if recycle.is_due(worker) and not worker.is_closed:
                    text = "%s: this process has reached its limit and makes way for another"
                    logger.info(text, worker.label, extra={"queue": worker.name})
                    stop.is_recycled = True
                    stop.time_end()
                    await worker.close()
        await running
    finally:
        stop.has_tasks_left = await _has_tasks_left(worker)


async def _has_tasks_left(worker: Runnable) -> bool:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    left = (await asyncio.wait(tasks, timeout=TASKS_END_S))[1] if tasks else set()
    if left:
        logger.error(
            "%s of %s ignored being cancelled",
            count(len(left), "task"),
            worker.label,
            extra={"queue": worker.name, "tasks": len(left)},
        )
    return bool(left)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
