"""App: the tasks of a program, the queues that they go to, and the workers that run them."""

import asyncio
import importlib
import os
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar, Final, Generic, ParamSpec, Protocol, TypeVar, overload

from chasqui import sync
from chasqui.consuming.around import Around
from chasqui.consuming.config import MAX_CONCURRENCY
from chasqui.consuming.runs import is_coroutine_function
from chasqui.errors import ContextError
from chasqui.model.config import check_int
from chasqui.model.job import Job
from chasqui.model.keys import Keys
from chasqui.model.words import meant, near
from chasqui.queue import Queue
from chasqui.tasks import functions
from chasqui.tasks.bulk import Bulk
from chasqui.tasks.open_queues import OpenQueues, QueuesOfApp
from chasqui.tasks.options import Backoff, Span, UniqueBy, check_option_names, task_options
from chasqui.tasks.results import typed
from chasqui.tasks.serving import WorkerOptions, group_of
from chasqui.tasks.task import AsyncTask, Call, SyncTask, Task
from chasqui.worker_group import WorkerGroup, checked_lifespan, choose

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

#: While this variable of the environment is set, every app talks to the server that it names,
#: whatever its `redis_url` says. `chasqui.testing` sets it, so that no test reaches another server,
#: not in a child process either.
URL_OVERRIDE: Final = "CHASQUI_APP_URL_OVERRIDE"


class TaskDecorator(Protocol):
    """What `App.task` with options returns."""

    # A coroutine function is also a function: the first that fits counts.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


class App(Generic[C]):
    """Tasks and where they run. It opens nothing when it is made, and connects on first use.

    `queue` is where tasks go that name none. `include` are modules with more tasks, which a worker
    imports. `lifespan` makes the `context` of a worker's process. `around` are hooks around every
    run. `workers` has options for the workers of queues, in the order in which they are served;
    with `slots`, those queues share so many slots: in that order, or by their weights.
    """

    #: Those that exist, for `chasqui.testing`.
    known: ClassVar["weakref.WeakSet[App[Any]]"] = weakref.WeakSet()

    @overload
    def __init__(
        self: "App[None]",
        queue: str = "default",
        *,
        redis_url: str | None = None,
        include: Sequence[str] = (),
        lifespan: None = None,
        around: Sequence[Around] = (),
        workers: Mapping[str, WorkerOptions] | None = None,
        slots: int | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        queue: str = "default",
        *,
        redis_url: str | None = None,
        include: Sequence[str] = (),
        lifespan: Callable[[], AbstractAsyncContextManager[C]],
        around: Sequence[Around] = (),
        workers: Mapping[str, WorkerOptions] | None = None,
        slots: int | None = None,
    ) -> None: ...
    def __init__(
        self,
        queue: str = "default",
        *,
        redis_url: str | None = None,
        include: Sequence[str] = (),
        lifespan: Callable[[], AbstractAsyncContextManager[C]] | None = None,
        around: Sequence[Around] = (),
        workers: Mapping[str, WorkerOptions] | None = None,
        slots: int | None = None,
    ) -> None:
        self.default_queue = Keys(queue).queue
        self._redis_url = redis_url
        if isinstance(include, str):
            raise TypeError("include must be a list of module names, got a str")
        self.include = tuple(include)
        if lifespan is not None and not callable(lifespan):
            raise TypeError(
                f"lifespan must be a function that returns an async context manager, "
                f"got {type(lifespan).__name__}"
            )
        self.lifespan = lifespan
        self.around = tuple(around)
        self.workers = dict(workers or {})
        given: Mapping[str, object] = self.workers
        for name, options in given.items():
            if not isinstance(options, WorkerOptions):
                kind = type(options).__name__
                raise TypeError(f"workers[{name!r}] must be WorkerOptions, got {kind}")
        check_int("slots", slots, 1, MAX_CONCURRENCY)
        self.slots = slots
        #: By queue, and by the names of jobs, aliases included.
        self._tasks: dict[str, dict[str, Task[Any, Any]]] = {}
        #: Of each task the run of its module that defined it.
        self._runs: weakref.WeakKeyDictionary[Task[Any, Any], object] = weakref.WeakKeyDictionary()
        #: What was entered and not left, in a cell for each: the last one counts. Groups of workers
        #: may end in any order.
        self._contexts: tuple[list[Any], ...] = ()
        self._is_overridden = False
        #: Those that it has opened.
        self.queues = QueuesOfApp()
        #: The worker groups that were made of it and still exist.
        self.groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        App.known.add(self)

    def __repr__(self) -> str:
        return f"<app of queue {self.default_queue} with {len(self.tasks)} tasks>"

    @property
    def redis_url(self) -> str | None:
        """Its server; None: what CHASQUI_URL or REDIS_URL names. In tests, that of the test."""
        return os.environ.get(URL_OVERRIDE) or self._redis_url

    @property
    def is_in_test(self) -> bool:
        """Whether a test has taken it to another server."""
        return bool(os.environ.get(URL_OVERRIDE))

    # ── Tasks ───────────────────────────────────────────────────────────────────────────────────

    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
        queue: str | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        timeout: Span | None = None,
        unique_for: Span | None = None,
        unique_by: UniqueBy | None = None,
        every: Span | None = None,
        cron: str | None = None,
        tz: str | None = None,
        processes: int | None = None,
    ) -> TaskDecorator: ...
    def task(self, function: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """Make a task of a function.

        Its jobs have the function's name, or `name`; jobs with one of the `aliases` run too. A
        coroutine function runs on the event loop, a plain one in a thread, or in one of its own
        `processes`. `attempts`, `backoff` and `timeout` act in the worker, also for jobs that wait
        already. With `unique_for`, a call with the same arguments (or those of `unique_by`) adds
        nothing for so long. `every` or `cron` (in the zone `tz`) repeat it.
        """

        check_option_names(options)

        def make(function: Callable[..., Any]) -> Task[Any, Any]:
            return self._register(function, **options)

        return make if function is None else make(function)

    def _register(
        self,
        function: Any,
        *,
        name: str | None = None,
        queue: str | None = None,
        **options: Any,
    ) -> Task[Any, Any]:
        if isinstance(function, Task):
            function = function.function
        function = functions.checked(function, name)
        own_name = function.__name__ if name is None else name
        checked = task_options(name=own_name, queue=queue or self.default_queue, **options)
        kind = AsyncTask if is_coroutine_function(function) else SyncTask
        task: Task[Any, Any] = kind(self, function, checked)
        run = functions.execution(function)
        known = self._tasks.setdefault(checked.queue, {})
        for one in (checked.name, *checked.aliases):
            if (other := known.get(one)) is not None and not functions.is_defined_again(
                other.function, self._runs.get(other), function, run
            ):
                raise ValueError(
                    f"queue {checked.queue!r} has two tasks of the name {one!r}: "
                    f"{functions.place(other.function)} and {functions.place(function)}; give one "
                    "of them another name="
                )
        replaced = {known[one] for one in (checked.name, *checked.aliases) if one in known}
        for one in [name for name, other in known.items() if other in replaced]:
            del known[one]  # an alias that it has no more
        self._runs[task] = run
        for one in (checked.name, *checked.aliases):
            known[one] = task
        return task

    @property
    def tasks(self) -> list[Task[Any, Any]]:
        """All tasks, in the order in which they were defined."""
        found = {task for named in self._tasks.values() for task in named.values()}
        return [task for task in self._runs if task in found]

    def tasks_of(self, queue: str) -> dict[str, Task[Any, Any]]:
        """The tasks of a queue, by the names of their jobs, aliases included."""
        return self._tasks.get(queue, {})

    def runnable_on(self, queue: str) -> dict[str, Task[Any, Any]]:
        """What a worker of a queue runs, by the names of jobs: the tasks of the queue, and those
        of others, which `with_options(queue=…)` sends there. A name that several other queues have
        is nobody's."""
        own = self.tasks_of(queue)
        found: dict[str, Task[Any, Any]] = {}
        shared: set[str] = set()
        for other, named in self._tasks.items():
            if other != queue:
                shared |= found.keys() & named.keys()
                found |= named
        return {name: task for name, task in found.items() if name not in shared} | own

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    async def add(self, call: Call[R]) -> Job[R]:
        """Add the job of a call; `Task.enqueue` does this."""
        task, data = call.task, call.data
        options = {} if task.is_plain else task.job_options(data)
        return typed(await self.queue(task.queue).add(task.name, data, **options), task)

    def add_sync(self, call: Call[R]) -> sync.Job[R]:
        """The same without an event loop."""
        task, data = call.task, call.data
        options = {} if task.is_plain else task.job_options(data)
        return typed(self.sync_queue(task.queue).add(task.name, data, **options), task)

    async def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Add many jobs in one pipeline for each queue; the jobs, in the order of the calls. If
        they go to several queues, an error may come after some were added."""
        bulk = Bulk(calls)
        for part in bulk.parts:
            queue = self.queue(part.queue)
            part.jobs = await queue.add_new_jobs(part.new, part.unique_for)
        return bulk.jobs()

    def enqueue_many_sync(self, calls: Iterable[Call[R]]) -> list[sync.Job[R]]:
        """The same without an event loop."""
        bulk = Bulk(calls)
        for part in bulk.parts:
            queue = self.sync_queue(part.queue)
            part.jobs = queue.add_new_jobs(part.new, part.unique_for)
        return bulk.jobs()

    def queue(self, name: str | None = None) -> Queue:
        """The queue of this name, for the running event loop; open until `close`, or until the
        loop ends."""
        loop = asyncio.get_running_loop()
        opened = self.queues
        queues = opened.by_loop.get(loop)
        if queues is None:
            queues = opened.by_loop[loop] = OpenQueues(opened.names)
        return queues.get(name or self.default_queue, self.redis_url)

    def sync_queue(self, name: str | None = None) -> sync.Queue:
        """The same without an event loop; all threads share it."""
        name = name or self.default_queue
        opened = self.queues
        queue = opened.blocking.get(name)
        if queue is not None and queue.is_closed:
            opened.blocking.pop(name, None)
            queue = None
        if queue is None:
            # Without a lock, which a fork could leave locked: `setdefault` keeps the first one.
            queue = opened.blocking.setdefault(name, sync.Queue(name, redis_url=self.redis_url))
            opened.names.add(name)
        return queue

    async def close(self) -> None:
        """Close the queues that this event loop has opened. The next use opens them again."""
        queues = self.queues.by_loop.pop(asyncio.get_running_loop(), None)
        if queues is not None:
            await queues.close()

    def close_sync(self) -> None:
        """Close the queues that were opened without an event loop."""
        queues, self.queues.blocking = self.queues.blocking, {}
        for queue in queues.values():
            queue.close()

    async def __aenter__(self) -> "App[C]":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @asynccontextmanager
    async def asgi(self, _: object = None) -> AsyncIterator[None]:
        """The lifespan of a web application that enqueues: `FastAPI(lifespan=app.asgi)`. It closes
        the app's queues at the end."""
        try:
            yield
        finally:
            await self.close()
            self.close_sync()

    # ── Running ─────────────────────────────────────────────────────────────────────────────────

    @property
    def context(self) -> C:
        """What `lifespan` has yielded in this process. Only workers have it, and tests that
        `override` it."""
        contexts = self._contexts
        if not contexts:
            raise ContextError(_why_no_context(self.lifespan is not None))
        return contexts[-1][0]  # type: ignore[no-any-return]

    @contextmanager
    def override(self, context: C) -> Iterator[None]:
        """Have another context inside of the block, for tests: workers that begin there do not
        enter `lifespan`."""
        before, self._is_overridden = self._is_overridden, True
        try:
            with self._having(context):
                yield
        finally:
            self._is_overridden = before

    @contextmanager
    def _having(self, context: Any) -> Iterator[None]:
        cell = [context]
        self._contexts = (*self._contexts, cell)
        try:
            yield
        finally:
            self._contexts = tuple(one for one in self._contexts if one is not cell)

    def load(self) -> None:
        """Import the modules of `include`, so that all tasks are known."""
        for module in self.include:
            try:
                importlib.import_module(module)
            except Exception as error:
                error.add_note(f"while the app imported {module!r}, which its include= names")
                raise

    def worker_group(
        self,
        queues: Sequence[str] | None = None,
        burst: bool = False,
        *,
        outermost: Callable[[str], Around] | None = None,
        **options: Any,
    ) -> WorkerGroup:
        """The workers of the app's queues, or of those named, as one: with `lifespan` and
        schedules. `options` are those of a `Worker`, for each of them; with `burst` they end when
        nothing is left to do. `outermost` gives each queue a hook around all others."""
        self.load()
        known = [name for name, tasks in self._tasks.items() if tasks]
        if not known:
            raise ValueError(
                "the app has no task: define one with @app.task, or name its module in include="
            )
        for name in self.workers:
            if name not in known:
                hint = meant([repr(one) for one in near(name, known)])
                raise ValueError(f"workers names queue {name!r}, which no task is on{hint}")
        ordered = sorted(known, key=[*self.workers, *known].index)
        if isinstance(queues, str):
            raise TypeError("queues must be a list of names, got a str")
        chosen = choose(queues, ordered, what="the app")
        group = group_of(self, chosen, burst, options, outermost)
        self.groups.add(group)
        return group

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """The app in a worker's process: `lifespan` makes its context, unless that is overridden.
        Its queues are closed at the end, unless it had some open on this event loop before."""
        had_open = asyncio.get_running_loop() in self.queues.by_loop
        try:
            if self._is_overridden:
                yield
            elif self.lifespan is None:
                with self._having(None):
                    yield
            else:
                async with checked_lifespan(self.lifespan()) as context:
                    with self._having(context):
                        yield
        finally:
            if not had_open:
                await self.close()


def _why_no_context(has_lifespan: bool) -> str:
    if not has_lifespan:
        return "the app has no context: give App(lifespan=…) a function that makes one"
    return (
        "the app's context is made by its lifespan, which only workers enter (not those of "
        "processes=): in tests use `with app.override(…)`"
    )
