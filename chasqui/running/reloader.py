"""A supervisor for development: it starts the processes anew when a Python file has changed."""

import contextlib
import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

from chasqui.errors import NotSupportedError
from chasqui.model.words import count, some
from chasqui.running.process import DRAINED, NEVER, USAGE, Recycle
from chasqui.running.runnable import Runnable
from chasqui.running.supervisor import NOW, Child, Supervisor
from chasqui.running.target import Target

logger = logging.getLogger(__name__)

#: How long jobs may run on after a change before they are stopped and given back.
PATIENCE_S: Final = 1.0
#: Changes that come so close together are one.
TOGETHER_MS, TOGETHER_MOST_MS = 50, 400
#: How often the thread that watches looks whether it should end; and how long its start may take.
TICK_MS: Final = 100
READY_S: Final = 2.0


class Reloader(Supervisor):
    """Keeps processes running, each with the newest code under a folder.

    After a change a process drains. What still runs after a second is stopped, and its jobs are
    given back; the next process starts when the old one has ended. If the program is broken, it
    waits for the next change.
    """

    def __init__(
        self,
        target: Target | str,
        count: int,
        recycle: Recycle = NEVER,
        around_load: Callable[[], AbstractContextManager[None]] = nullcontext,
        show: Callable[[Runnable], None] | None = None,
        *,
        folder: Path,
    ) -> None:
        if importlib.util.find_spec("watchfiles") is None:
            raise NotSupportedError(
                "chasqui worker --reload needs watchfiles: pip install 'chasqui[reload]'"
            )
        super().__init__(target, count, recycle, around_load, show)
        self._folder = folder
        self._ending = threading.Event()
        self._is_ready = threading.Event()
        #: Files that changed, as the thread has seen them.
        self._changed: list[str] = []
        #: The processes that were told to drain, and when they are to be stopped.
        self._leaving: set[int] = set()
        self._stop_at_s = math.inf
        self._has_loaded = False

    def run(self) -> int:
        # The time of a .pyc is in seconds: a second change in one second would not be seen.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        watching = threading.Thread(target=self._watch, name="chasqui-reload", daemon=True)
        watching.start()
        self._is_ready.wait(READY_S)
        try:
            return super().run()
        finally:
            self._ending.set()
            watching.join(READY_S)

    def run_once(self) -> None:
        super().run_once()
        self._has_loaded = self._has_loaded or self.running > 0
        if self._is_stopping:
            return
        if self._changed:
            files, self._changed = self._changed, []
            self._renew(sorted({*files}))
        if time.monotonic() >= self._stop_at_s:
            self._stop_at_s = math.inf
            self._send(NOW + str(DRAINED).encode(), self._those_that_leave())

    def _watch(self) -> None:
        """In a thread: note changes, and wake the supervisor."""
        import watchfiles

        try:
            for changes in watchfiles.watch(
                self._folder,
                watch_filter=watchfiles.PythonFilter(),
                debounce=TOGETHER_MOST_MS,
                step=TOGETHER_MS,
                stop_event=self._ending,
                rust_timeout=TICK_MS,
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                self._is_ready.set()
                if changes:
                    self._changed += [os.path.relpath(path, self._folder) for _, path in changes]
                    with contextlib.suppress(BlockingIOError):  # it is being woken already
                        os.write(self._wake_write, b"\0")
        except Exception as error:  # such as too many files for the system
            text = "changes in %s cannot be watched: %s"
            logger.error(text, self._folder, error, extra={"folder": str(self._folder)})
            self._is_ready.set()

    def _renew(self, files: list[str]) -> None:
        """Let all processes make way for new ones."""
        text = "%s changed: %s; starting anew"
        logger.info(text, count(len(files), "file"), some(files), extra={"files": len(files)})
        for index, child in enumerate(self._children):
            if child.process is None:
                child.start_at_s, child.deaths = 0.0, 0
            elif index not in self._leaving:
                self._leaving.add(index)
                self._stop_at_s = time.monotonic() + PATIENCE_S
        self._ask_to_drain(self._those_that_leave())

    def _those_that_leave(self) -> list[Child]:
        return [self._children[index] for index in self._leaving]

    def _start_due(self) -> float | None:
        idle_s = super()._start_due()
        limits_s = [self._stop_at_s - time.monotonic()] + ([] if idle_s is None else [idle_s])
        until_s = min(limits_s)
        return None if math.isinf(until_s) else max(0.0, until_s)

    def _plan_next(self, child: Child, process: SpawnProcess, code: int | None) -> None:
        index = self._children.index(child)
        is_leaving = index in self._leaving
        self._leaving.discard(index)
        if self._is_stopping:
            super()._plan_next(child, process, code)
        elif is_leaving:
            child.start_at_s, child.deaths = 0.0, 0
        elif child.is_broken or (code == USAGE and self._has_loaded):
            child.start_at_s = math.inf
            fields = {"folder": str(self._folder)}
            logger.info("waiting for a change in %s", self._folder, extra=fields)
        else:
            super()._plan_next(child, process, code)
