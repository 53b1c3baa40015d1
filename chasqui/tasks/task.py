"""Task: a function of an app that can be enqueued. Call: one call of it, not sent yet.

`fetch.bind(url).then(parse).then(store)` is a chain: each task gets what the one before it returned
as its first argument. `gather(a, b, c).then(report)` runs calls or chains side by side, and the
join gets the list of what they returned.
"""

import functools
import hashlib
import pickle
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from chasqui import sync
from chasqui._core.arguments import BoundCall
from chasqui.model import payload
from chasqui.model.job import Job
from chasqui.model.steps import Failed, StepId
from chasqui.model.words import meant, near
from chasqui.producing.flows import Flow, FlowPlan, Step
from chasqui.queue import Queue
from chasqui.tasks.options import NO_OPTIONS, Backoff, CallOptions, Span, TaskOptions
from chasqui.tasks.results import typed
from chasqui.tasks.signature import Signature
from chasqui.tasks.steps import (
    first_step,
    following_step,
    home_of,
    last_job,
    new_flow_id,
    with_result,
)

P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N")
T = TypeVar("T", bound="Task[Any, Any]")


class Owner(Protocol):
    """The part of an app that its tasks use."""

    def queue(self, name: str | None = None) -> Queue:
        """The queue of this name, for the running event loop."""

    def sync_queue(self, name: str | None = None) -> sync.Queue:
        """The same without an event loop."""

    async def add(self, call: "Call[R]") -> Job[R]:
        """Add the job of a call."""

    def add_sync(self, call: "Call[R]") -> sync.Job[R]:
        """The same without an event loop."""

    async def enqueue_many(self, calls: "Iterable[Call[R]]") -> list[Job[R]]:
        """Add the jobs of many calls."""


class Task(Generic[P, R]):
    """A function that can be enqueued: `App.task` makes it.

    Calling it runs the plain function, here and now.
    """

    def __init__(self, app: Owner, function: Callable[..., Any], options: TaskOptions) -> None:
        self.app = app
        self.function = function
        self.options = options
        self.signature = Signature(function, options.name)
        self._bind_plain = None if self.signature.plain is None else self.signature.plain.bind
        self.call_options = NO_OPTIONS
        #: The task that `with_options` was called on.
        self._origin: Self | None = None
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # it is called alike
        _check_options(self)

    @property
    def name(self) -> str:
        """The name of its jobs."""
        return self.options.name

    @property
    def queue(self) -> str:
        """The queue that its jobs go to."""
        return self.call_options.queue or self.options.queue

    def __repr__(self) -> str:
        return f"<task {self.name}{self.signature} of queue {self.queue}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A pickled task is its qualified name: the other process imports it. One that has options
        of its calls is that of the task which it came from, and the options."""
        if self._origin is not None:
            return _with_call_options, (self._origin, self.call_options)
        name: str | None = getattr(self, "__qualname__", None)
        if name is None:
            raise pickle.PicklingError(f"task {self.name!r} is no name of a module")
        return name

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Add one job that calls the function with these arguments."""
        return await self.app.add(self.bind(*args, **kwargs))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> sync.Job[R]:
        """The same without an event loop: for scripts, threads and web workers."""
        return self.app.add_sync(self.bind(*args, **kwargs))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> "Call[R]":
        """The call, checked and not sent: for `enqueue_many`, `gather` and `then`."""
        bind = self._bind_plain  # most calls are plain
        data = None if bind is None else bind(args, kwargs)
        return Call(self, self.signature.encode(args, kwargs) if data is None else data)

    def with_options(
        self,
        *,
        delay: Span | None = None,
        at: datetime | None = None,
        job_id: str | None = None,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        queue: str | None = None,
        unique_for: Span | None = None,
    ) -> Self:
        """The same task with other options for the jobs that are enqueued through what this
        returns. They travel with each job, so they win over what the task says."""
        given = {**locals()}
        del given["self"]
        is_unique = self.options.unique_for is not None
        changed = self.call_options.with_changes(given, is_unique=is_unique)
        return _with_call_options(self._origin or self, changed)

    @property
    def is_plain(self) -> bool:
        """Whether its jobs have no options of their own."""
        return self.call_options is NO_OPTIONS and self.options.unique_for is None

    def job_options(self, data: Any) -> dict[str, Any]:
        """The options of `Queue.add` for a job with this data."""
        given = self.call_options.as_keywords()
        if self.options.unique_for is not None and "job_id" not in given:
            given["job_id"] = self._unique_id(data)
            given.setdefault("unique_for", self.options.unique_for)
        return given

    def _unique_id(self, data: Any) -> str:
        """The id that only calls with the same arguments have."""
        by = self.options.unique_by
        if callable(by):
            chosen = self.signature.call_with(by, data)
            given: object = chosen
            if not isinstance(given, str):
                kind = type(given).__name__
                raise TypeError(f"unique_by of task {self.name!r} must return a str, got {kind}")
        else:
            values = data
            if self.signature.whole is None:
                values = self.signature.filled(data)
                names = values if by is None else [by] if isinstance(by, str) else by
                values = {name: values[name] for name in names if name in values}
            payload.encode(values)  # it says what is wrong with them
            encoded = payload.encode(_in_order(values))
            chosen = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        return f"{self.name}:{chosen}"


def _in_order(value: Any) -> Any:
    """The same with the keys of all maps in one order: maps that are equal become equal bytes."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (isinstance(key, bytes), key))
        return {key: _in_order(value[key]) for key in keys}
    return [_in_order(one) for one in value] if isinstance(value, list) else value


def _with_call_options(origin: T, options: CallOptions) -> T:
    """The same task, whose jobs have these options."""
    task = object.__new__(type(origin))
    task.__dict__.update(origin.__dict__)
    task._origin, task.call_options = origin, options
    return task


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine function: it runs on the worker's event loop."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]


class SyncTask(Task[P, R]):
    """A task whose function is a plain one: it runs in a thread, or in a process."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]


class Call(BoundCall, Generic[R]):
    """One call of a task, checked and not sent yet."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<call of task {self.task.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled call is its task, by name, and its data."""
        return type(self), (self.task, self.data)

    def then(
        self, task: Task[Concatenate[R, P], N], *args: P.args, **kwargs: P.kwargs
    ) -> "Chain[N]":
        """A chain: when this call is done, the task runs, with the result as its first argument."""
        steps = [first_step(self), following_step(task, args, kwargs)]
        return Chain(FlowPlan([steps]), (self.task, task))

    async def enqueue(self) -> Job[R]:
        """Add it as one job."""
        app: Owner = self.task.app
        return await app.add(self)

    def enqueue_sync(self) -> sync.Job[R]:
        """The same without an event loop."""
        app: Owner = self.task.app
        return app.add_sync(self)


class Chain(Generic[R]):
    """Calls that follow one another, perhaps behind others that run side by side: not sent yet."""

    def __init__(self, plan: FlowPlan, tasks: tuple[Task[Any, Any], ...]) -> None:
        self._plan = plan
        #: All of them; the last one's result is that of the chain.
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<flow of {len(self._tasks)} calls that ends with task {self._tasks[-1].name}>"

    def then(
        self, task: Task[Concatenate[R, P], N], *args: P.args, **kwargs: P.kwargs
    ) -> "Chain[N]":
        """The same with one more call behind it, which gets the result as its first argument."""
        step = following_step(task, args, kwargs)
        plan = self._plan
        if plan.join:
            plan = FlowPlan(plan.chains, [*plan.join, step], plan.need)
        else:
            plan = FlowPlan([[*plan.chains[0], step]])
        return Chain(plan, (*self._tasks, task))

    async def enqueue(self) -> Job[R]:
        """Begin it; the job of the last call, whose result you may wait for at once."""
        owner, queue = home_of(self._tasks)
        flow = await owner.queue(queue).add_flow(self._plan, flow_id=new_flow_id())
        return typed(last_job(flow), self._tasks[-1])

    def enqueue_sync(self) -> sync.Job[R]:
        """The same without an event loop."""
        owner, queue = home_of(self._tasks)
        flow = owner.sync_queue(queue).add_flow(self._plan, flow_id=new_flow_id())
        job: Any = last_job(flow)
        return typed(job, self._tasks[-1])

    @property
    def steps(self) -> tuple[list[Step], tuple[Task[Any, Any], ...]]:
        """Its steps and their tasks, to be one of the chains of a group."""
        if self._plan.join:
            raise ValueError("a group cannot be part of another: gather takes calls and chains")
        return list(self._plan.chains[0]), self._tasks


class Group(Generic[R]):
    """Calls or chains that run side by side, not sent yet: `then` says what follows them."""

    def __init__(
        self,
        chains: list[tuple[list[Step], tuple[Task[Any, Any], ...]]],
        need: Literal["all", "ended"],
    ) -> None:
        self._chains = chains
        self._need = need

    def __repr__(self) -> str:
        return f"<group of {len(self._chains)} calls>"

    def then(
        self, task: Task[Concatenate[list[R], P], N], *args: P.args, **kwargs: P.kwargs
    ) -> Chain[N]:
        """A call that runs once all of them have ended: its first argument is the list of what they
        returned, in their order."""
        join = [following_step(task, args, kwargs)]
        if not self._chains:  # there is nothing to wait for
            return Chain(FlowPlan([[with_result(join[0], [])]]), (task,))
        plan = FlowPlan([steps for steps, _ in self._chains], join, self._need)
        tasks = tuple(one for _, tasks in self._chains for one in tasks)
        return Chain(plan, (*tasks, task))

    async def enqueue(self) -> list[Job[R]]:
        """Begin them without anything behind; the jobs of their last calls."""
        if not self._chains:
            return []
        owner, queue = self._home()
        added = owner.queue(queue)
        flow = await added.add_flow(self._plan(), flow_id=new_flow_id())
        return self._jobs(flow, Job, added)

    def enqueue_sync(self) -> list[sync.Job[R]]:
        """The same without an event loop."""
        if not self._chains:
            return []
        owner, queue = self._home()
        added = owner.sync_queue(queue)
        flow = added.add_flow(self._plan(), flow_id=new_flow_id())
        return self._jobs(flow, sync.Job, added)

    def _plan(self) -> FlowPlan:
        if self._need != "all":
            raise ValueError("need='ended' is for groups with a join: say what follows with then()")
        return FlowPlan([steps for steps, _ in self._chains])

    def _home(self) -> tuple[Any, str]:
        return home_of([one for _, tasks in self._chains for one in tasks])

    def _jobs(self, flow: Flow, kind: Any, queue: Any) -> list[Any]:
        jobs = []
        for i, (steps, tasks) in enumerate(self._chains):
            job_id = str(StepId(flow.id, str(i), len(steps) - 1))
            job = kind(job_id, steps[-1].name, steps[-1].data, _queue=queue)
            jobs.append(typed(job, tasks[-1]))
        return jobs


@overload
def gather(*calls: Call[R] | Chain[R], need: Literal["all"] = "all") -> Group[R]: ...
@overload
def gather(*calls: Call[R] | Chain[R], need: Literal["ended"]) -> Group[R | Failed]: ...
def gather(*calls: Any, need: Any = "all") -> Any:
    """Calls or chains that run side by side; `then` adds what runs behind all of them.

    With `need="all"` the join runs when all have succeeded: if one is dead, so is the join, until
    the dead job is replayed and succeeds. With `need="ended"` it runs in any case, and gets a
    `Failed` in the place of each result that there is not.
    """
    if need not in ("all", "ended"):
        raise ValueError(f"need must be 'all' or 'ended', got {need!r}")
    chains: list[tuple[list[Step], tuple[Task[Any, Any], ...]]] = []
    for i, call in enumerate(calls):
        if isinstance(call, Call):
            chains.append(([first_step(call)], (call.task,)))
        elif isinstance(call, Chain):
            chains.append(call.steps)
        else:
            kind = type(call).__name__
            raise TypeError(
                f"gather takes calls and chains, made by task.bind(…): number {i} is a {kind}"
            )
    return Group(chains, need)


def _check_options(task: Task[Any, Any]) -> None:
    """Refuse options that do not fit the function."""
    options, signature = task.options, task.signature
    by = options.unique_by
    if callable(by):
        signature.check_taken_by(by, f"unique_by of task {task.name!r}")
    elif by is not None:
        for name in [by] if isinstance(by, str) else by:
            if name not in signature.names:
                hint = meant([repr(one) for one in near(str(name), signature.names)])
                raise ValueError(
                    f"unique_by of task {task.name!r} names {name!r}, which is no parameter{hint}"
                )
    if options.repeat is not None and signature.whole is not None:
        raise TypeError(f"task {task.name!r} repeats, so it cannot take the whole data as `/` asks")
    if options.repeat is not None and signature.required:
        raise TypeError(
            f"task {task.name!r} repeats, so its parameters need defaults: "
            f"{', '.join(signature.required)} has none"
        )
    if options.processes is not None and isinstance(task, AsyncTask):
        raise TypeError(f"task {task.name!r} is a coroutine function: processes run plain ones")
