"""Threads that plain handlers run in, and what becomes of a run there that is given up.

A thread cannot be told to leave a function. So when a run is given up (its time is over, or the
drain's), the pool's executor is replaced: what cannot be stopped takes no place from the jobs to
come, and goes on until its function returns.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

from chasqui.consuming.throttled_log import Complaints

logger = logging.getLogger(__name__)

#: How long to wait after a thread or a process could not be started.
AGAIN_S: Final = 1.0


class ThreadPool:
    """Runs functions in an executor, which it makes when it is first needed."""

    def __init__(self, places: int, name: str, queue: str) -> None:
        """`places` is how many functions run at once, `name` what their threads' names start
        with."""
        self.places = places
        self._name = name
        self._queue = queue
        self._room = asyncio.Semaphore(places)
        self._executor: _Executor | None = None
        #: Runs that somebody waits for, of each executor that has not come to its end.
        self._awaited: dict[_Executor, int] = {}
        self._complaints = Complaints(logger, queue)
        #: Nothing more is to begin.
        self.is_stopping = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns. Waits while no thread can be started."""
        while True:
            if self._executor is None:
                self._executor = _Executor(self.places, self._name)
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
                if executor in self._awaited:  # else it was closed meanwhile
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
            self._complaints.warn(
                "a handler of queue %s waits for a thread: %s", self._queue, error
            )
            self._give_up(executor)  # it has queued the function all the same
            return None

    def place(self) -> "Place":
        """A place, once there is one: what runs with it begins at once."""
        return Place(self._room)

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
    """Uses the threads that it has if no other can be started."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class Place:
    """A place in a pool, until it is left: at the latest at the end of its block."""

    def __init__(self, room: asyncio.Semaphore) -> None:
        self._room = room
        self._is_left = False

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._room.release()

    async def __aenter__(self) -> Self:
        await self._room.acquire()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
