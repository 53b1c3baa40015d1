"""The jobs that wait or are delayed, and which of them a test means."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from chasqui import Task
from chasqui._core.entry import Entry
from chasqui.managing.entries import delayed_job, ranges
from chasqui.model import payload
from chasqui.model.keys import DEFAULT_GROUP, Keys, shown
from chasqui.model.words import count, meant, near
from chasqui.testing.apps import task_of
from chasqui.testing.clock import Moves, pairs
from chasqui.testing.drained import arguments
from chasqui.testing.server import ServerOfTests
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect

#: How far a delay or a moment may be off.
TOLERANCE: Final = timedelta(seconds=1)
#: What a test may expect of a job beside its arguments.
_OF_JOB: Final = ("delay", "at", "queue", "job_id")
_ZERO: Final = timedelta()


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that waits or is delayed."""

    #: The task that takes it; None if no app has one.
    task: Task[Any, Any] | None
    name: str
    queue: str
    #: The arguments that it was enqueued with, by name.
    args: Any
    id: str
    #: How long after it was added it is due; zero for a job that waits.
    delay: timedelta
    #: When that is, by the clock that was when it was added.
    at: datetime
    #: What the job carries.
    data: Any = field(repr=False)


def enqueued(server: ServerOfTests, moves: Moves, queues: Iterable[str]) -> list[Enqueued]:
    """The jobs of these queues: those that wait, in their order, then the delayed ones by when they
    are due."""
    waiting: list[Enqueued] = []
    delayed: list[Enqueued] = []
    for queue in queues:
        keys = Keys(queue)
        for entry in _waiting(server.connection, keys):
            data = payload.decode(entry.payload)
            waiting.append(_job(queue, entry.name, entry.job_id, data, entry.created_at_ms, _ZERO))
        reply = server.connection.execute(
            "ZRANGE", keys.delayed, 0, -1, "WITHSCORES", effect=Effect.READ
        )
        for member, score in pairs(reply):
            name, envelope = delayed_job(member)
            created_ms = envelope.created_at_ms
            delay_ms = int(score) + moves.since(created_ms) - created_ms
            delay = timedelta(milliseconds=delay_ms)
            data = payload.decode(envelope.payload)
            delayed.append(_job(queue, name, envelope.id, data, created_ms, delay))
    return waiting + sorted(delayed, key=lambda job: job.at)


def _waiting(connection: BlockingConnection, keys: Keys) -> list[Entry]:
    """The entries that no worker has."""
    entries: list[Entry] = connection.call(ranges(("XRANGE", keys.stream, "-", "+")))
    # Without a group there is nothing pending: that refusal is the answer.
    pending = connection.execute(
        *("XPENDING", keys.stream, DEFAULT_GROUP, "-", "+", max(1, len(entries))),
        effect=Effect.READ,
        raises=False,
    )
    held = {one[0] for one in pending} if isinstance(pending, list) else set()
    return [entry for entry in entries if entry.id not in held and entry.fault is None]


def _job(
    queue: str, name: str, job_id: str, data: Any, created_ms: int, delay: timedelta
) -> Enqueued:
    at = datetime.fromtimestamp(created_ms / 1000, UTC) + delay
    args = arguments(queue, name, data)
    return Enqueued(task_of(queue, name), name, queue, args, job_id, delay, at, data)


class Expected:
    """What a test expects of a job of a task: some of its arguments, delay, at, queue, job_id."""

    def __init__(self, task: Task[Any, Any], expected: Mapping[str, Any]) -> None:
        """Raises TypeError for what neither the task nor a job has."""
        if not isinstance(task, Task):
            raise TypeError(f"a task is asked for, got {type(task).__name__}")
        self._task = task
        names = task.signature.names
        for name in expected:
            if name not in names and name not in _OF_JOB:
                hint = meant([repr(one) for one in near(name, [*names, *_OF_JOB])])
                raise TypeError(f"task {task.name!r} has no parameter {name!r}{hint}")
        self._args = {name: value for name, value in expected.items() if name in names}
        self._of_job = {name: value for name, value in expected.items() if name not in names}
        for name, kind in (("delay", timedelta), ("at", datetime)):
            value = self._of_job.get(name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")

    def __str__(self) -> str:
        given = {**self._args, **self._of_job}
        values = ", ".join(f"{name}={_text(value)}" for name, value in given.items())
        return f"task {self._task.name!r}" + (f" with {values}" if values else "")

    def fits(self, job: Enqueued) -> bool:
        return self.is_of_task(job) and self._fits_job(job) and self._fits_args(job)

    def is_of_task(self, job: Enqueued) -> bool:
        """Whether it is a job of the task, on the task's queue or where no other task has it."""
        options = self._task.options
        if job.name not in (options.name, *options.aliases):
            return False
        own = job.queue in (self._task.queue, options.queue)
        return own or job.task is None or job.task.function is self._task.function

    def _fits_job(self, job: Enqueued) -> bool:
        wanted = self._of_job
        return (
            ("queue" not in wanted or job.queue == wanted["queue"])
            and ("job_id" not in wanted or job.id == wanted["job_id"])
            and ("delay" not in wanted or abs(job.delay - wanted["delay"]) <= TOLERANCE)
            and ("at" not in wanted or abs(job.at - wanted["at"].astimezone(UTC)) <= TOLERANCE)
        )

    def _fits_args(self, job: Enqueued) -> bool:
        if not self._args:
            return True
        try:
            given = self._task.signature.decode(job.data)
        except Exception:  # data that the task cannot take are not what is expected
            return False
        return all(self._fits(name, value, given) for name, value in self._args.items())

    def _fits(self, name: str, value: Any, given: dict[str, Any]) -> bool:
        has = given.get(name, self._task.signature.default(name))
        return has is not inspect.Parameter.empty and bool(value == has)


# ── Words ───────────────────────────────────────────────────────────────────────────────────────


def table(jobs: list[Enqueued]) -> str:
    """The jobs as lines, for the text of a failed assertion."""
    if not jobs:
        return "Nothing was enqueued."
    rows = [("task", "queue", "arguments", "delay", "id")]
    for job in jobs:
        delay = "" if job.delay == _ZERO else str(_rounded(job.delay))
        rows.append((job.name, job.queue, _call(job.args), delay, job.id))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    verb = "was" if len(jobs) == 1 else "were"
    return "\n".join([f"There {verb} {count(len(jobs), 'job')}:", *lines])


def _call(args: Any) -> str:
    if not isinstance(args, dict):
        return shown(args)
    return ", ".join(f"{name}={shown(value)}" for name, value in args.items())


def _text(value: Any) -> str:
    return str(value) if isinstance(value, timedelta | datetime) else shown(value)


def _rounded(delay: timedelta) -> timedelta:
    return timedelta(seconds=round(delay.total_seconds()))
