"""The options of tasks and of single calls, checked when they are written down."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from chasqui.model.config import check_int
from chasqui.model.job import BackoffSpec, RepeatPattern
from chasqui.model.keys import Keys, check_job_id, check_job_name, shown
from chasqui.model.words import meant, near
from chasqui.producing.job_options import retry_of
from chasqui.timed.cron import Cron

#: A span of time: a timedelta, or a number of seconds.
Span: TypeAlias = timedelta | float
#: How long to wait before a retry; an int is a fixed wait in ms, as everywhere.
Backoff: TypeAlias = BackoffSpec | timedelta | int | Mapping[str, Any]
#: The arguments that make a call unique: their names, or a function of them that gives a str.
UniqueBy: TypeAlias = str | Sequence[str] | Callable[..., str]

#: The longest wait of a worker, for jobs that do not say otherwise.
_LONGEST_WAIT_MS: Final = 30_000
_MAX_SECONDS: Final = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """How a task runs. Attempts, backoff and timeout act in the worker, by the task's name: a
    change of them reaches jobs that wait already."""

    name: str
    queue: str
    aliases: tuple[str, ...] = ()
    attempts: int | None = None
    backoff: BackoffSpec | None = None
    timeout_ms: int | None = None
    unique_for: float | None = None
    unique_by: UniqueBy | None = None
    repeat: RepeatPattern | None = None
    #: How many processes run it; None: it runs on the loop, or in a thread.
    processes: int | None = None


def task_options(
    *,
    name: str,
    queue: str,
    aliases: Sequence[str] = (),
    attempts: int | None = None,
    backoff: Backoff | None = None,
    timeout: Span | None = None,
    unique_for: Span | None = None,
    unique_by: UniqueBy | None = None,
    every: Span | None = None,
    cron: str | None = None,
    tz: str | None = None,
    processes: int | None = None,
) -> TaskOptions:
    """Check what was given to `App.task`; errors name the argument."""
    Keys(queue)
    if isinstance(aliases, str) or not isinstance(aliases, Sequence):
        raise TypeError(f"aliases must be a list of names, got {type(aliases).__name__}")
    check_int("attempts", attempts, 1, 2**32 - 1)
    check_int("processes", processes, 1, 1_000)
    if unique_by is not None and unique_for is None:
        raise ValueError("unique_by needs unique_for: say for how long a call stays unique")
    return TaskOptions(
        name=check_job_name(name),
        queue=queue,
        aliases=tuple(check_job_name(one) for one in aliases),
        attempts=attempts,
        backoff=None if backoff is None else backoff_of(backoff),
        timeout_ms=None if timeout is None else milliseconds("timeout", timeout),
        unique_for=None if unique_for is None else seconds("unique_for", unique_for, low=1),
        unique_by=unique_by,
        repeat=_pattern(every, cron, tz),
        processes=processes,
    )


def check_option_names(options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that a task does not have."""
    known = inspect.signature(task_options).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"a task has no option {name!r}{meant(near(name, known))}")


def _pattern(every: Span | None, cron: str | None, tz: str | None) -> RepeatPattern | None:
    if every is not None and cron is not None:
        raise ValueError("a task has every or cron, not both")
    if tz is not None and cron is None:
        raise ValueError("tz is for cron: the time zone that its fields are in")
    if every is not None:
        return RepeatPattern.every(milliseconds("every", every))
    if cron is None:
        return None
    pattern = RepeatPattern.cron(cron, tz=tz)
    Cron(cron, tz)  # it knows what can be read
    return pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What `with_options` says about single jobs; it travels with each of them."""

    delay: timedelta | None = None
    at: datetime | None = None
    job_id: str | None = None
    attempts: int | None = None
    backoff: BackoffSpec | None = None
    queue: str | None = None
    unique_for: float | None = None

    def with_changes(self, given: Mapping[str, Any], *, is_unique: bool) -> "CallOptions":
        """The same with other values for what is not None in `given`, checked. The jobs of a task
        that `is_unique` have ids without being told."""
        changes = {name: value for name, value in given.items() if value is not None}
        for name, check in _CHECKS.items():
            if name in changes:
                changes[name] = check(changes[name])
        changed = replace(self, **changes)
        if changed.delay is not None and changed.at is not None:
            raise ValueError("a job has delay or at, not both")
        if "unique_for" in changes and changed.job_id is None and not is_unique:
            raise ValueError("unique_for is for a job_id: say which id is to stay taken")
        return changed

    def as_keywords(self) -> dict[str, Any]:
        """The options of `Queue.add` that say the same, without the queue."""
        given = {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) is not None and one.name != "queue"
        }
        if (at := given.pop("at", None)) is not None:
            given["delay_ms"] = at
        return given


def _delay(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    return timedelta(seconds=seconds("delay", value, low=0))


def _moment(value: object) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError(f"at must be a datetime, got {type(value).__name__}")
    if value.tzinfo is None:
        raise ValueError("at must have a time zone: datetime.now(UTC), or .astimezone()")
    return value


def _attempts(value: object) -> int:
    retry_of(value, None)  # it checks
    assert isinstance(value, int)
    return value


def _queue(value: Any) -> str:
    return Keys(value).queue


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "delay": _delay,
    "at": _moment,
    "job_id": check_job_id,
    "attempts": _attempts,
    "backoff": lambda value: _uncut(backoff_of(value)),
    "queue": _queue,
    "unique_for": lambda value: seconds("unique_for", value, low=1),
}
NO_OPTIONS: Final = CallOptions()


def _uncut(spec: BackoffSpec) -> BackoffSpec:
    """The same for a single job: without a longest wait of its own it would be cut to 30 s."""
    if spec.max_delay_ms is None and spec.delay_ms > _LONGEST_WAIT_MS:
        return replace(spec, max_delay_ms=spec.delay_ms)
    return spec


def backoff_of(value: Backoff) -> BackoffSpec:
    """The spec for what was passed as `backoff`; a timedelta is a fixed wait."""
    if isinstance(value, timedelta):
        return BackoffSpec.fixed(milliseconds("backoff", value))
    return BackoffSpec.parse(value)


def seconds(what: str, span: object, *, low: float = 0.001) -> float:
    """A span in seconds; an error names `what`."""
    if isinstance(span, timedelta):
        span = span.total_seconds()
    if isinstance(span, bool) or not isinstance(span, int | float):
        kind = type(span).__name__
        raise TypeError(f"{what} must be a timedelta or a number of seconds, got {kind}")
    if not low <= span <= _MAX_SECONDS:
        raise ValueError(f"{what} must be from {low:g} s to ten years, got {shown(span)}")
    return float(span)


def milliseconds(what: str, span: object) -> int:
    return round(seconds(what, span) * 1000)
