"""Threads for plain handlers, and what happens to a run there that is given up.

A thread cannot be stopped. So when a run is given up, because its time or the drain's is over, the
pool replaces its executor: the function goes on until it returns, but takes no thread from the next
jobs.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from chasqui.consuming.throttled_log import ThrottledLog

logger = logging.getLogger(__name__)

#: How long to wait after a thread or a process could not be started.
AGAIN_S: Final = 1.0


class ThreadPool:
    """Runs functions in an executor, made when it is first needed."""

    def __init__(self, size: int, name: str, queue: str) -> None:
        """`size` functions run at once, in threads whose names start with `name`."""
        self.size = size
        self._name = name
        self._queue = queue
        self._room = asyncio.Semaphore(size)
        self._executor: _Executor | None = None
        #: How many runs are awaited in each executor that is not shut down.
        self._awaited: dict[_Executor, int] = {}
        self._log = ThrottledLog(logger, queue)
        #: Set when nothing more may begin.
        self.is_stopping = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns. Waits while no thread can be started."""
        while True:
            if self._executor is None:
                self._executor = _Executor(self.size, self._name)
            executor = self._executor
            self._awaited[executor] = self._awaited.get(executor, 0) + 1
            try:
                future = self._submit(executor, function, *arguments)
                if future is not None:
                    return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if future is not None and not future.cancel() and not future.done():
                    self._give_up(executor)
                raise
            finally:
                if executor in self._awaited:  # else the pool was closed meanwhile
                    self._awaited[executor] -= 1
                    if executor is not self._executor and not self._awaited[executor]:
                        self._end(executor)
            await asyncio.sleep(AGAIN_S)

    def _submit(
        self, executor: "_Executor", function: Callable[..., Any], *arguments: Any
    ) -> Future[Any] | None:
        try:
            return executor.submit(function, *arguments)
        except RuntimeError as error:
            self._log.warning("a handler of queue %s waits for a thread: %s", self._queue, error)
            self._give_up(executor)  # it has queued the function nevertheless
            return None

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a free thread: a run in the block begins at once. Yields a function that frees
        the thread for others before the block ends."""
        await self._room.acquire()
        with contextlib.ExitStack() as stack:
            stack.callback(self._room.release)
            yield stack.close

    def close(self) -> None:
        """End every executor."""
        self._executor = None
        for executor in list(self._awaited):
            self._end(executor)

    def _give_up(self, executor: "_Executor") -> None:
        if self._executor is executor:
            self._executor = None

    def _end(self, executor: "_Executor") -> None:
        self._awaited.pop(executor, None)
        executor.shutdown(wait=False, cancel_futures=True)


class _Executor(ThreadPoolExecutor):
    """Makes do with the threads that it has if no other can be started."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
