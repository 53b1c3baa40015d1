"""Handlers: which function runs a job, and where: on the loop, in a thread, in a process.

Whatever the user gave, the dispatcher awaits one thing: `run(job)`.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any, Final, TypeAlias

Handler: TypeAlias = Callable[[Any], Awaitable[Any]] | Callable[[Any], Any]
Runner: TypeAlias = Callable[[Any], Awaitable[Any]]

#: Names come from producers, who may make up any number of them.
KNOWN_NAMES: Final = 1000


class Handlers:
    """The registry of one worker. Names choose among what is here; nothing is ever imported."""

    def __init__(
        self,
        handler: Handler | Mapping[str, Handler],
        *,
        default: Handler | None = None,
        threads: int,
        processes: Mapping[str, int] | int | None = None,
        timeout_ms: Mapping[str, int] | int | None = None,
    ) -> None:
        self._threads = threads
        self._thread_pool: ThreadPoolExecutor | None = None
        self._process_pools: dict[str, ProcessPoolExecutor] = {}
        self._processes = processes
        self._timeouts = timeout_ms
        self._runners: dict[str, Runner] = {}
        self._default: Runner | None = None
        self._known: dict[str, tuple[Runner | None, float | None]] = {}
        if isinstance(handler, Mapping):
            for name, one in handler.items():
                self._runners[name] = self._runner(_check(one, f"handler[{name!r}]"), name)
            if default is not None:
                self._default = self._runner(_check(default, "default"), "")
        else:
            if default is not None:
                raise TypeError("default is taken only where handler is a mapping of names")
            self._default = self._runner(_check(handler, "handler"), "")

    def find(self, name: str) -> tuple[Runner | None, float | None]:
        """What runs a job of this name, or None, and how many seconds a run may take, or None."""
        return self._known.get(name) or self._look_up(name)

    def _look_up(self, name: str) -> tuple[Runner | None, float | None]:
        limit = self._timeouts
        if isinstance(limit, Mapping):
            limit = limit.get(name)
        found = self._runners.get(name, self._default), None if limit is None else limit / 1000
        if len(self._known) < KNOWN_NAMES:
            self._known[name] = found
        return found

    def close(self) -> None:
        """Let the pools go. A thread that still runs cannot be stopped; a process is ended."""
        if self._thread_pool is not None:
            self._thread_pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._process_pools.values():
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()

    def _runner(self, handler: Handler, name: str) -> Runner:
        count = self._processes
        if isinstance(count, Mapping):
            count = count.get(name)
        if count is not None:
            return functools.partial(self._in_process, handler, name, count)
        if is_coroutine_function(handler):
            return handler
        return functools.partial(self._in_thread, handler)

    async def _in_thread(self, handler: Callable[[Any], Any], job: Any) -> Any:
        if self._thread_pool is None:
            self._thread_pool = ThreadPoolExecutor(self._threads, "chasqui-handler")
        result = await _await_executor(self._thread_pool, handler, job)
        # A plain function may still hand back a coroutine, such as a partial of one.
        return await result if inspect.isawaitable(result) else result

    async def _in_process(self, handler: Handler, name: str, count: int, job: Any) -> Any:
        pool = self._process_pools.get(name)
        if pool is None:
            pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
            self._process_pools[name] = pool
        try:
            return await _await_executor(pool, _run_there, handler, job)
        except BaseException:
            if getattr(pool, "_broken", False):
                # One of its processes died: the pool is of no use any more, the next job makes one.
                self._process_pools.pop(name, None)
                pool.shutdown(wait=False)
            raise


async def _await_executor(pool: Executor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _run_there(handler: Handler, job: Any) -> Any:
    """In a process of the pool: coroutine functions get a loop for the run."""
    result = handler(job)
    return asyncio.run(_as_coroutine(result)) if inspect.isawaitable(result) else result


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def is_coroutine_function(handler: object) -> bool:
    """Also of objects whose `__call__` is one, and of partials."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - its kind is asked, not whether it is there
    )


def _check(handler: Any, what: str) -> Any:
    if not callable(handler):
        raise TypeError(f"{what} must be callable, got {type(handler).__name__}")
    return handler
