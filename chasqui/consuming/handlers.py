"""Handlers: which function runs a job, and whether on the loop, in a thread or in a process.

The dispatcher always awaits the same thing, `run(job)`.
"""

import asyncio
import contextvars
import functools
import inspect
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from chasqui.consuming.around import Around, hooked
from chasqui.consuming.pools import ThreadPool
from chasqui.consuming.runs import (
    NOT_FOR_FUTURES,
    NotBegunError,
    is_coroutine_function,
    named,
    run_with_timeout,
)
from chasqui.model.words import meant, near

if TYPE_CHECKING:
    from chasqui.consuming.processes import ProcessPool

Handler: TypeAlias = Callable[[Any], Awaitable[Any]] | Callable[[Any], Any]
Runner: TypeAlias = Callable[[Any], Awaitable[Any]]

#: How many names are remembered: producers may make up any number of them.
KNOWN_NAMES: Final = 1000
#: What the names of handlers' threads start with.
THREAD_NAME: Final = "chasqui-handler"


class Handlers:
    """The handlers of one worker, by names of jobs. A name never makes it import anything."""

    def __init__(
        self,
        handler: Handler | Mapping[str, Handler],
        *,
        default: Handler | None = None,
        threads: int,
        processes: Mapping[str, int] | int | None = None,
        timeout_ms: Mapping[str, int] | int | None = None,
        by_name: Mapping[str, Mapping[str, object]] | None = None,
        around: Sequence[Around] = (),
        queue: str = "",
    ) -> None:
        """`by_name` has other options that go by name, whose names are checked here."""
        names = handler if isinstance(handler, Mapping) else ()
        _check_names("handler", names, names)
        _check_names("processes", processes, names)
        for what, given in {"timeout_ms": timeout_ms, **(by_name or {})}.items():
            _check_names(what, given, names if names and default is None else None)
        #: Shared by all plain functions.
        self._threads = ThreadPool(threads, THREAD_NAME, queue)
        self._processes = processes
        self._process_pools: list[ProcessPool] = []
        self._timeouts = timeout_ms
        self._around = around
        #: What runs a handler within the hooks, by the handler's runner and its time limit.
        self._hooked: dict[tuple[int, float | None], Runner] = {}
        self._queue = queue
        self._runners: dict[str, Runner] = {}
        self._default: Runner | None = None
        self._known: dict[str, tuple[Runner | None, float | None]] = {}
        #: For the log: the names that have handlers, and the handler of all others.
        self.names: list[str] = []
        if isinstance(handler, Mapping):
            if not handler and default is None:
                raise ValueError("handler is an empty mapping and there is no default")
            for name, one in handler.items():
                self._runners[name] = self._runner(_check(one, f"handler[{name!r}]"), name)
                self.names.append(name)
            if default is not None:
                self._default = self._runner(_check(default, "default"), "")
                self.names.append(f"{_name_of(default)} for all others")
        else:
            if default is not None:
                raise TypeError("default is taken only where handler is a mapping of names")
            self._default = self._runner(_check(handler, "handler"), "")
            self.names.append(f"{_name_of(handler)} for all")

    @property
    def capacity(self) -> int | None:
        """How many jobs can run at once, if every handler needs a thread or a process; else
        None."""
        runners = [run for run in (*self._runners.values(), self._default) if run is not None]
        if not all(isinstance(run, _InProcess | _InThread) for run in runners):
            return None
        threads = any(isinstance(run, _InThread) for run in runners) and self._threads.size
        return threads + sum(pool.size for pool in self._process_pools)

    def find(self, name: str) -> tuple[Runner | None, float | None]:
        """What runs a job of this name, or None; and the time limit that the caller must see to,
        or None."""
        return self._known.get(name) or self._look_up(name)

    def _look_up(self, name: str) -> tuple[Runner | None, float | None]:
        limit = self._timeouts
        if isinstance(limit, Mapping):
            limit = limit.get(name)
        run = inner = self._runners.get(name, self._default)
        limit_s = None if limit is None else limit / 1000
        key = id(inner), limit_s
        if limit is not None and isinstance(run, _InThread | _InProcess):
            run, limit_s = functools.partial(run, limit_s=limit_s), None
        elif limit_s is not None and run is not None and self._around:
            # The limit is the handler's: hooks see the TimeoutError, and may take their time.
            run, limit_s = _limited(run, limit_s, self._queue), None
        if self._around and run is not None:
            run = self._hooked.get(key) or self._hooked.setdefault(key, hooked(self._around, run))
        found = run, limit_s
        if len(self._known) < KNOWN_NAMES:
            self._known[name] = found
        return found

    def stop(self) -> None:
        """Let nothing more begin: runs that wait for a thread or a process raise NotBegunError."""
        self._threads.is_stopping = True
        for pool in self._process_pools:
            pool.is_stopping = True

    async def close(self) -> None:
        """Close the pools. Threads that still run cannot be stopped; processes end within two
        seconds."""
        self._threads.close()
        await asyncio.gather(*(pool.close() for pool in self._process_pools))

    def _runner(self, handler: Handler, name: str) -> Runner:
        count = self._processes
        if isinstance(count, Mapping):
            count = count.get(name)
        if count is not None:
            _check_picklable(handler, name)
            from chasqui.consuming.processes import ProcessPool  # here: few need multiprocessing

            pool = ProcessPool(handler, count, self._queue)
            self._process_pools.append(pool)
            return _InProcess(pool, self._queue)
        if getattr(handler, "runs_on_loop", False) or is_coroutine_function(handler):
            return handler
        # Without time limits a run may wait in the executor's own queue, which is quicker.
        reserves = self._timeouts is not None
        return _InThread(self._threads, handler, self._queue, reserves=reserves)


class _InProcess:
    """A handler that runs in a process. Its time begins when the process begins to run it."""

    def __init__(self, pool: "ProcessPool", queue: str) -> None:
        self._pool = pool
        self._queue = queue

    async def __call__(self, job: Any, limit_s: float | None = None) -> Any:
        async with self._pool.begin(job) as result:
            return await (
                result if limit_s is None else run_with_timeout(limit_s, result, self._queue)
            )


class _InThread:
    """A handler that runs in a thread, with its own context variables.

    With `reserves` it waits for a free thread first, so that the wait does not count as its time.
    """

    def __init__(self, pool: ThreadPool, handler: Handler, queue: str, *, reserves: bool) -> None:
        self._pool = pool
        self._handler = handler
        self._queue = queue
        self._reserves = reserves

    async def __call__(self, job: Any, limit_s: float | None = None) -> Any:
        if not self._reserves:
            return await self._run(job)
        async with self._pool.reserve() as release:
            running = self._run(job, release)
            return await (
                running if limit_s is None else run_with_timeout(limit_s, running, self._queue)
            )

    async def _run(self, job: Any, release: Callable[[], None] | None = None) -> Any:
        context = contextvars.copy_context()
        result = await self._pool.run(context.run, _run, self._pool, self._handler, job)
        # A plain function may still return a coroutine.
        if not inspect.isawaitable(result):
            return result
        if release is not None:
            release()
        for variable, value in context.items():  # the coroutine sees what the function has set
            variable.set(value)
        return await result


def _limited(run: Runner, limit_s: float, queue: str) -> Runner:
    return lambda job: run_with_timeout(limit_s, run(job), queue)


def _check_names(what: str, given: object, known: Iterable[str] | None) -> None:
    """Refuse settings for names that no handler has; if `known` is None, any name may have one."""
    for name in given if isinstance(given, Mapping) else ():
        if not isinstance(name, str):
            raise TypeError(f"{what} goes by the names of jobs, which are str: got {name!r}")
        if known is not None and name not in known:
            raise ValueError(
                f"{what} names {name!r}, for which handler has no function of its own"
                f"{meant([repr(one) for one in near(name, known)])}"
            )


def _run(pool: ThreadPool, handler: Handler, job: Any) -> Any:
    """In a thread."""
    if pool.is_stopping:
        raise NotBegunError
    try:
        return handler(job)
    except NOT_FOR_FUTURES as error:
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error


def _name_of(handler: object) -> str:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return named(handler)


def _check(handler: Any, what: str) -> Any:
    if not callable(handler):
        raise TypeError(f"{what} must be callable, got {type(handler).__name__}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(f"{what} is a generator, which would never run: {named(handler)}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return handler  # some built-in functions have none
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"{what} must accept one positional argument, the job (with batch, the list of jobs): "
            f"{named(handler)} takes {signature}"
        ) from None
    return handler


def _check_picklable(handler: Any, name: str) -> None:
    """Raise TypeError unless a process can import the handler: it gets only the name."""
    try:
        pickle.dumps(handler)
    except Exception as error:
        what = f"the handler of {name!r}" if name else "the handler"
        raise TypeError(
            f"{what} is to run in processes, so it must be a function of a module: {error}"
        ) from None
