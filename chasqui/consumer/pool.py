"""Threads that plain handlers run in, and what becomes of a run there that is given up.

A thread cannot be told to leave a function. So when a run is given up (its time is over, or the
drain's), the pool's executor is replaced: what cannot be stopped takes no place from the jobs to
come, and goes on until its function returns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class ThreadPool:
    """Runs functions in an executor, which it makes when it is first needed."""

    def __init__(self, places: int, name: str) -> None:
        """`places` is how many functions run at once, `name` what their threads' names start
        with."""
        self._places = places
        self._name = name
        self._room = asyncio.Semaphore(places)
        self._executor: ThreadPoolExecutor | None = None
        #: Runs that somebody waits for, of each executor that has not come to its end.
        self._awaited: dict[ThreadPoolExecutor, int] = {}

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._places, self._name)
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

    def _give_up(self, executor: ThreadPoolExecutor) -> None:
        if self._executor is executor:
            self._executor = None

    def _end(self, executor: ThreadPoolExecutor) -> None:
        self._awaited.pop(executor, None)
        executor.shutdown(wait=False, cancel_futures=True)


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
