"""Handlers of tasks: what a worker calls with a job, which calls the task's function."""

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from chasqui.consuming.config import Handler, WorkerConfig
from chasqui.model.job import Job
from chasqui.tasks.signature import Signature
from chasqui.tasks.task import AsyncTask, Task


def handler_of(task: Task[Any, Any]) -> Handler:
    """What runs a job of the task: on the loop, in a thread or in a process."""
    return _on_loop(task) if isinstance(task, AsyncTask) else PlainHandler(task)


def options_of(named: Mapping[str, Task[Any, Any]], config: WorkerConfig) -> dict[str, Any]:
    """The options of a `Worker` that runs these tasks, by the names of their jobs. What a task does
    not say, `config` says for it."""
    found: dict[str, Any] = {}
    options = {name: task.options for name, task in named.items()}
    for option, of_task in (
        ("max_attempts", "attempts"),
        ("backoff", "backoff"),
        ("timeout_ms", "timeout_ms"),
        ("processes", "processes"),
    ):
        own = {name: getattr(one, of_task) for name, one in options.items()}
        if any(value is not None for value in own.values()):
            default = getattr(config, option)
            by_name = {
                name: _of_worker(default, name) if value is None else value
                for name, value in own.items()
            }
            found[option] = {name: value for name, value in by_name.items() if value is not None}
    return found


def _of_worker(default: Any, name: str) -> Any:
    is_by_name = isinstance(default, Mapping) and not isinstance(default.get("kind"), str)
    return default.get(name) if is_by_name else default


def _on_loop(task: AsyncTask[Any, Any]) -> Handler:
    """The handler of a coroutine function. If nothing is to be done behind the run, it is a plain
    function that returns the task's own coroutine: another one around it would cost as much as all
    the rest."""
    function, signature = task.function, task.signature
    decode = signature.decode

    def call(job: Job) -> Awaitable[Any]:
        arguments = decode(job.data)
        if signature.whole is None:
            return function(**arguments)  # type: ignore[no-any-return]
        return function(*arguments.values())  # type: ignore[no-any-return]

    run = call
    if signature.plain is not None:
        fit = signature.plain.fit

        def run(job: Job) -> Awaitable[Any]:
            data = job.data
            return function(**data) if fit(data) else call(job)

    if not signature.returns.is_native:
        call_first = run

        async def run(job: Job) -> Any:
            return signature.encode_result(await call_first(job))

    run.runs_on_loop = True  # type: ignore[attr-defined]
    return run


class PlainHandler:
    """The handler of a plain function. It can be pickled, as processes need it."""

    def __init__(self, task: Task[Any, Any]) -> None:
        self._task = task
        self.__qualname__ = task.name

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainHandler, (self._task,)

    def __call__(self, job: Job) -> Any:
        task = self._task
        signature = task.signature
        arguments = signature.decode(job.data)
        function = task.function
        result = function(**arguments) if signature.whole is None else function(*arguments.values())
        if signature.returns.is_native:
            return result
        if inspect.isawaitable(result):  # a plain function around a coroutine function
            return _encoded(result, signature)
        return signature.encode_result(result)


async def _encoded(result: Awaitable[Any], signature: Signature) -> Any:
    return signature.encode_result(await result)
