"""Pools that plain handlers run in, and what becomes of a run there that is given up.

Neither a thread nor a process can be told to leave a function. So when a run is given up (its time
is over, or the drain's), the pool's executor is replaced: what cannot be stopped takes no place
from the jobs to come. A process is ended; a thread goes on until its function returns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from types import TracebackType
from typing import Any, Self


class Pool:
    """Runs functions in an executor, which it makes when it is first needed."""

    def __init__(self, make: Callable[[], Executor], places: int) -> None:
        """`places` is how many functions the executor runs at once."""
        self._make = make
        self._room = asyncio.Semaphore(places)
        self._executor: Executor | None = None
        #: Runs that somebody waits for, of each executor that has not come to its end.
        self._awaited: dict[Executor, int] = {}

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns."""
        if self._executor is None:
            self._executor = self._make()
        executor = self._executor
        self._awaited[executor] = self._awaited.get(executor, 0) + 1
        try:
            future = executor.submit(function, *arguments)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if not future.cancel() and not future.done():
                    self._give_up(executor)
                raise
        finally:
            if executor in self._awaited:  # else it was closed meanwhile
                self._awaited[executor] -= 1
                if executor is not self._executor and not self._awaited[executor]:
                    self._end(executor)

    def place(self) -> "Place":
        """A place, once there is one: what runs with it begins at once."""
        return Place(self._room)

    def close(self) -> None:
        """End every executor."""
        self._executor = None
        for executor in list(self._awaited):
            self._end(executor)

    def _give_up(self, executor: Executor) -> None:
        if self._executor is executor:
            self._executor = None

    def _end(self, executor: Executor) -> None:
        self._awaited.pop(executor, None)
        executor.shutdown(wait=False, cancel_futures=True)


class ProcessPool(Pool):
    """The same with an executor for each process: when a process dies its executor gives up all
    that runs in it, and other jobs would have failed as well. Each run needs a place."""

    def __init__(self, make: Callable[[], Executor], places: int) -> None:
        """`make` makes an executor of one process."""
        super().__init__(make, places)
        self._idle: list[Executor] = []
        self._busy: set[Executor] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        executor, future = self._submit(function, *arguments)
        self._busy.add(executor)
        is_sound = True
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            is_sound = future.cancel() or future.done()
            raise
        except BrokenExecutor:  # its process died
            is_sound = False
            raise
        finally:
            if executor in self._busy:  # else it was closed meanwhile
                self._busy.discard(executor)
                if is_sound:
                    self._idle.append(executor)
                else:
                    self._end(executor)

    def _submit(
        self, function: Callable[..., Any], *arguments: Any
    ) -> tuple[Executor, Future[Any]]:
        """Hand a run to a process that has nothing to do and, as far as that is known, lives."""
        while self._idle:
            executor = self._idle.pop()
            try:
                return executor, executor.submit(function, *arguments)
            except BrokenExecutor:
                self._end(executor)
        executor = self._make()
        return executor, executor.submit(function, *arguments)

    def close(self) -> None:
        """End every process."""
        ended = [*self._idle, *self._busy]
        self._idle.clear()
        self._busy.clear()
        for executor in ended:
            self._end(executor)

    def _end(self, executor: Executor) -> None:
        # Before the shutdown, which forgets them.
        processes = list((getattr(executor, "_processes", None) or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


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
