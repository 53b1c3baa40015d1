"""What serves an app: a worker for each of its queues, its schedules, and a table of both."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from chasqui.consuming.around import Around
from chasqui.consuming.config import MAX_THREADS, WorkerConfig
from chasqui.consuming.shared_slots import SharedSlots
from chasqui.model.config import check_int
from chasqui.model.job import RepeatPattern
from chasqui.model.words import duration
from chasqui.queue import Queue
from chasqui.tasks.handlers import handler_of, options_of
from chasqui.tasks.task import AsyncTask, Task
from chasqui.worker import Worker
from chasqui.worker_group import Table, WorkerGroup

logger = logging.getLogger(__name__)

#: The keys of schedules that tasks have in code begin with this.
SCHEDULE_PREFIX = "task:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(WorkerConfig):
    """The options of the worker of one queue of an app. Unless told otherwise it stores results.

    `weight` counts where queues share slots: a queue gets starts by it. If no queue has a weight,
    earlier queues come first.
    """

    store_results: bool = True
    weight: int | None = None

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)  # `super` does not know a class with slots
        check_int("weight", self.weight, 1, 1_000)


class Served(Protocol):
    """The part of an app that its workers use."""

    around: tuple[Around, ...]
    workers: dict[str, WorkerOptions]
    slots: int | None

    @property
    def redis_url(self) -> str | None:
        """Its server."""

    @property
    def is_in_test(self) -> bool:
        """Whether a test has taken it to another server."""

    @property
    def tasks(self) -> list[Task[Any, Any]]:
        """All tasks."""

    def tasks_of(self, queue: str) -> dict[str, Task[Any, Any]]:
        """The tasks of a queue, by the names of their jobs."""

    def runnable_on(self, queue: str) -> dict[str, Task[Any, Any]]:
        """What a worker of a queue runs, by the names of jobs."""

    def queue(self, name: str | None = None) -> Queue:
        """The queue of this name."""

    def entered(self) -> AbstractAsyncContextManager[None]:
        """The app in a worker's process."""


def group_of(
    app: Served,
    queues: Sequence[str],
    burst: bool,
    options: Mapping[str, Any],
    outermost: Callable[[str], Around] | None = None,
) -> WorkerGroup:
    """The workers of these queues, in their order. `outermost` gives each queue a hook around
    all others."""
    slots = _shared(app, queues)
    workers = [_worker(app, queue, slots, options, outermost) for queue in queues]

    async def write_schedules() -> None:
        for queue in queues:
            await _write_schedules(app, queue)

    return WorkerGroup(
        workers,
        name=", ".join(queues),
        lifespan=app.entered,
        before=write_schedules,
        slots=slots,
        burst=burst,
        facts=[_table_of_tasks(app, queues), *_table_of_schedules(app, queues)],
    )


def _shared(app: Served, queues: Sequence[str]) -> SharedSlots | None:
    if app.slots is None:
        return None
    weights = {queue: app.workers.get(queue, WorkerOptions()).weight for queue in queues}
    is_weighed = any(weights.values())
    shares = {queue: weight or 1 for queue, weight in weights.items()}
    return SharedSlots(app.slots, shares, mode="weight" if is_weighed else "strict")


def _worker(
    app: Served,
    queue: str,
    slots: SharedSlots | None,
    options: Mapping[str, Any],
    outermost: Callable[[str], Around] | None,
) -> Worker:
    named = app.runnable_on(queue)
    config = app.workers.get(queue, WorkerOptions())
    given = {"redis_url": app.redis_url, "around": app.around or None, **options}
    if outermost is not None:
        given["around"] = (outermost(queue), *(given["around"] or config.around))
    if app.is_in_test:
        # Whatever its options say: they are for the server that the test must not reach.
        given |= {"redis_url": app.redis_url, "tls": False, "credential_provider": None}
        config = replace(config, credential_provider=None)
    if slots is not None:
        given["concurrency"] = slots.total
    given = {name: value for name, value in given.items() if value is not None}
    config = replace(config, **given)
    config = replace(config, concurrency=_places(app.tasks_of(queue).values(), config))
    handlers = {id(task): handler_of(task) for task in named.values()}
    return Worker(
        queue,
        {name: handlers[id(task)] for name, task in named.items()},
        config=_plain(config),
        **options_of(named, config),
    )


def _places(own: Iterable[Task[Any, Any]], config: WorkerConfig) -> int:
    """How many jobs a worker takes at once: no more than it has threads and processes, if the tasks
    of its queue all need one. Tasks of other queues do not count: their jobs are rare here, and the
    queue's own would wait for threads that another worker may have."""
    tasks = set(own)
    if any(isinstance(task, AsyncTask) for task in tasks):
        return config.concurrency
    processes = [task.options.processes for task in tasks]
    threads = (config.threads or MAX_THREADS) if None in processes else 0
    return min(config.concurrency, threads + sum(count or 0 for count in processes))


def _plain(options: WorkerOptions) -> WorkerConfig:
    """The same without what only an app knows."""
    names = [one.name for one in fields(WorkerConfig) if one.init]
    return WorkerConfig(**{name: getattr(options, name) for name in names})


# ── Schedules ───────────────────────────────────────────────────────────────────────────────────


def schedule_key(task: Task[Any, Any]) -> str:
    """The key of a task's schedule. It does not depend on the schedule: a new one replaces it."""
    return SCHEDULE_PREFIX + task.name


async def _write_schedules(app: Served, queue: str) -> None:
    """Write the schedules of tasks that are new or have changed, and name those that no task of
    the app has any more: they are removed by hand only, for a newer version may have them."""
    scheduled = {
        schedule_key(task): task
        for task in app.tasks
        if task.options.queue == queue and task.options.repeat is not None
    }
    its_queue = app.queue(queue)
    for key, task in scheduled.items():
        assert task.options.repeat is not None
        await its_queue.upsert_repeatable_job(
            task.name, {}, repeat=task.options.repeat, key=key, keep_same=True
        )
    for spec in await its_queue.get_repeatable_jobs(limit=1000):
        if spec.key.startswith(SCHEDULE_PREFIX) and spec.key not in scheduled:
            logger.warning(
                "queue %s: schedule %s has no task in this app any more; if no other version of it "
                "has one: chasqui repeatable remove %s %s",
                queue,
                spec.key,
                queue,
                spec.key,
                extra={"queue": queue, "key": spec.key},
            )


# ── What is shown at the start ──────────────────────────────────────────────────────────────────


def _table_of_tasks(app: Served, queues: Sequence[str]) -> Table:
    rows = [
        (
            task.name,
            task.options.queue,
            _where(task),
            task.options.attempts or _attempts(app, task),
            None if task.options.timeout_ms is None else duration(task.options.timeout_ms * 1000),
        )
        for task in app.tasks
        if task.options.queue in queues
    ]
    return Table("tasks", ("task", "queue", "runs in", "attempts", "timeout"), tuple(rows))


def _table_of_schedules(app: Served, queues: Sequence[str]) -> list[Table]:
    rows = [
        (task.name, _when(task.options.repeat))
        for task in app.tasks
        if task.options.queue in queues and task.options.repeat is not None
    ]
    return [Table("schedules", ("task", "when"), tuple(rows))] if rows else []


def _attempts(app: Served, task: Task[Any, Any]) -> int | None:
    """How many runs its jobs have by the worker's options."""
    most = app.workers.get(task.options.queue, WorkerOptions()).max_attempts
    return most.get(task.name) if isinstance(most, Mapping) else most


def _where(task: Task[Any, Any]) -> str:
    if isinstance(task, AsyncTask):
        return "event loop"
    processes = task.options.processes
    return "threads" if processes is None else f"processes ({processes})"


def _when(repeat: RepeatPattern) -> str:
    if repeat.interval_ms is not None:
        return f"every {duration(repeat.interval_ms * 1000)}"
    return f"{repeat.expression} {repeat.tz or 'UTC'}"
