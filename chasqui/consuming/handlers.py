"""Handlers: which function runs a job, and where: on the loop, in a thread, in a process.

Whatever the user gave, the dispatcher awaits one thing: `run(job)`.
"""

import asyncio
import contextvars
import functools
import inspect
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from chasqui.model.config import MAX_COUNT, MAX_MS, check_int
from chasqui.consuming.pools import Place, ThreadPool
from chasqui.consuming.processes import NOT_FOR_FUTURES, ProcessPool
from chasqui.consuming.runs import NotBegunError, within
from chasqui.model.words import meant, near

Handler: TypeAlias = Callable[[Any], Awaitable[Any]] | Callable[[Any], Any]
Runner: TypeAlias = Callable[[Any], Awaitable[Any]]

#: Names come from producers, who may make up any number of them.
KNOWN_NAMES: Final = 1000
#: What the names of handlers' threads start with.
THREAD_NAME: Final = "chasqui-handler"


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
        queue: str = "",
    ) -> None:
        check_int("threads", threads, 1)
        for what, numbers, high in (
            ("processes", processes, MAX_COUNT),
            ("timeout_ms", timeout_ms, MAX_MS),
        ):
            if isinstance(numbers, Mapping):
                for name, number in numbers.items():
                    check_int(f"{what}[{name!r}]", number, 1, high)
            else:
                check_int(what, numbers, 1, high)
        names = handler if isinstance(handler, Mapping) else ()
        _check_names("handler", names, names)
        _check_names("processes", processes, names)
        _check_names("timeout_ms", timeout_ms, names if names and default is None else None)
        #: What all plain functions share.
        self._threads = ThreadPool(threads, THREAD_NAME, queue)
        self._processes = processes
        self._process_pools: list[ProcessPool] = []
        self._timeouts = timeout_ms
        self._queue = queue
        self._runners: dict[str, Runner] = {}
        self._default: Runner | None = None
        self._known: dict[str, tuple[Runner | None, float | None]] = {}
        #: For people: the names that have handlers, and what runs jobs of all others.
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
    def places(self) -> int | None:
        """How many jobs can run at once, where all handlers take a thread or a process; None if
        some take neither."""
        runners = [run for run in (*self._runners.values(), self._default) if run is not None]
        if not all(isinstance(run, _InProcess | _InThread) for run in runners):
            return None
        threads = any(isinstance(run, _InThread) for run in runners) and self._threads.places
        return threads + sum(pool.places for pool in self._process_pools)

    def find(self, name: str) -> tuple[Runner | None, float | None]:
        """What runs a job of this name, or None, and how many seconds a run may take, or None: then
        it has no limit, or keeps to it by itself."""
        return self._known.get(name) or self._look_up(name)

    def _look_up(self, name: str) -> tuple[Runner | None, float | None]:
        limit = self._timeouts
        if isinstance(limit, Mapping):
            limit = limit.get(name)
        run = self._runners.get(name, self._default)
        limit_s = None if limit is None else limit / 1000
        if limit is not None and isinstance(run, _InThread | _InProcess):
            run, limit_s = functools.partial(run, limit_s=limit_s), None
        found = run, limit_s
        if len(self._known) < KNOWN_NAMES:
            self._known[name] = found
        return found

    def stop(self) -> None:
        """Let nothing more begin: what waits for a place raises NotBegunError when it gets one."""
        self._threads.is_stopping = True
        for pool in self._process_pools:
            pool.is_stopping = True

    async def close(self) -> None:
        """Let the pools go. A thread that still runs cannot be stopped; a process is ended, within
        two seconds."""
        self._threads.close()
        await asyncio.gather(*(pool.close() for pool in self._process_pools))

    def _runner(self, handler: Handler, name: str) -> Runner:
        count = self._processes
        if isinstance(count, Mapping):
            count = count.get(name)
        if count is not None:
            _check_picklable(handler, name)
            pool = ProcessPool(handler, count, self._queue)
            self._process_pools.append(pool)
            return _InProcess(pool, self._queue)
        if is_coroutine_function(handler):
            return handler
        # Without limits the executor's own queue will do, and is quicker.
        takes_place = self._timeouts is not None
        return _InThread(self._threads, handler, self._queue, takes_place=takes_place)


class _InProcess:
    """A handler that runs in a process: its time begins when the process runs it."""

    def __init__(self, pool: ProcessPool, queue: str) -> None:
        self._pool = pool
        self._queue = queue

    async def __call__(self, job: Any, limit_s: float | None = None) -> Any:
        async with self._pool.begin(job) as result:
            return await (result if limit_s is None else within(limit_s, result, self._queue))


class _InThread:
    """A handler that runs in a thread, with context variables of its own there.

    One that `takes_place` waits for it first: the time that others take there is not its own.
    """

    def __init__(
        self, pool: ThreadPool, handler: Handler, queue: str, *, takes_place: bool
    ) -> None:
        self._pool = pool
        self._handler = handler
        self._queue = queue
        self._takes_place = takes_place

    async def __call__(self, job: Any, limit_s: float | None = None) -> Any:
        if not self._takes_place:
            return await self._run(job)
        async with self._pool.place() as place:
            running = self._run(job, place)
            return await (running if limit_s is None else within(limit_s, running, self._queue))

    async def _run(self, job: Any, place: Place | None = None) -> Any:
        context = contextvars.copy_context()
        result = await self._pool.run(context.run, _run, self._pool, self._handler, job)
        # A plain function may still hand back a coroutine, such as a partial of one.
        if not inspect.isawaitable(result):
            return result
        if place is not None:
            place.leave()
        for variable, value in context.items():  # what it set there holds here as well
            variable.set(value)
        return await result


def _check_names(what: str, given: object, known: Iterable[str] | None) -> None:
    """Refuse settings for names that no handler has; None: a handler may have any."""
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


def is_coroutine_function(handler: object) -> bool:
    """Also of objects whose `__call__` is one, and of partials."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - its kind is asked, not whether it is there
    )


def _name_of(handler: object) -> str:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__qualname__", type(handler).__name__)


def _check(handler: Any, what: str) -> Any:
    if not callable(handler):
        raise TypeError(f"{what} must be callable, got {type(handler).__name__}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(f"{what} is a generator, which would never run: {_named(handler)}")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return handler  # some built-in functions do not tell
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"{what} must accept one positional argument, the job (with batch, the list of jobs): "
            f"{_named(handler)} takes {signature}"
        ) from None
    return handler


def _named(handler: Any) -> str:
    name = getattr(handler, "__qualname__", None)
    return name if isinstance(name, str) else type(handler).__qualname__


def _check_picklable(handler: Any, name: str) -> None:
    """A process gets its handler by name: it must be one that an import finds."""
    try:
        pickle.dumps(handler)
    except Exception as error:
        what = f"the handler of {name!r}" if name else "the handler"
        raise TypeError(
            f"{what} is to run in processes, so it must be a function of a module: {error}"
        ) from None
