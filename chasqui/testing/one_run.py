"""One run of a task without a queue: its call becomes data and back, as on the way to a worker."""

import asyncio
import time
from typing import Any

from chasqui import App, Job, Task
from chasqui._core.ulid import UlidFactory
from chasqui.consuming.current import CURRENT
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.runs import run_with_timeout
from chasqui.model import payload
from chasqui.tasks.handlers import handler_of, options_of
from chasqui.tasks.serving import WorkerOptions

_ulids = UlidFactory()


class _OneRun:
    """The lease of a job that no worker holds: it knows how many runs the job would have."""

    def __init__(self, queue: str) -> None:
        self.queue = queue

    def is_lost(self, entry: object, /) -> bool:
        return False

    def attempts_of(self, entry: int, /) -> int:
        return entry


async def run_once(task: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the task returns, as `job.result()` would give it."""
    app: App[Any] = task.app  # type: ignore[assignment]  # every task is of an app
    name, queue = task.name, task.queue
    data = payload.decode(payload.encode(task.bind(*args, **kwargs).data))
    config = app.workers.get(queue, WorkerOptions())
    options = options_of({name: task}, config)
    attempts = task.call_options.attempts or options.get("max_attempts", config.max_attempts)
    most = attempts.get(name, 25) if isinstance(attempts, dict) else attempts
    now_ms = time.time_ns() // 1_000_000
    job_id = task.call_options.job_id or _ulids.next(now_ms)
    job: Job = Job(job_id, name, data, 0, now_ms, _lease=(_OneRun(queue), most))
    handlers = Handlers(
        {name: handler_of(task)},
        threads=1,
        processes=options.get("processes", config.processes),
        timeout_ms=options.get("timeout_ms", config.timeout_ms),
        around=app.around or config.around,
        queue=queue,
    )
    try:
        async with app.entered():
            # In a task of its own, so that what it sets in its context stays there.
            result = await asyncio.ensure_future(_run(handlers, job, queue))
    finally:
        await handlers.close()
    if result is None:
        return None
    stored = payload.decode(payload.encode(result, root="result"))
    returns = task.signature.returns
    return stored if returns.is_native else returns.decode(stored, "result")


async def _run(handlers: Handlers, job: Job, queue: str) -> Any:
    CURRENT.set(job)
    run, limit_s = handlers.find(job.name)
    assert run is not None  # it is the only one
    running = run(job)
    return await (running if limit_s is None else run_with_timeout(limit_s, running, queue))
