"""A job as users hold it, and the values that describe how it is retried and repeated.

Each value is checked when it is made: one that exists is valid. `parse` takes what public methods
accept in its place, the type itself or its dict form. The messages are chasquimq's.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from chasqui._core.instances import InstanceFactory
from chasqui.errors import LeaseLostError
from chasqui.model.keys import shown

if TYPE_CHECKING:
    import typing_extensions

    #: What a job returns. A bare `Job` is a `Job[Any]`.
    R_co = typing_extensions.TypeVar("R_co", covariant=True, default=Any)
else:  # the default is for type checkers alone, and only they need the library
    R_co = TypeVar("R_co", covariant=True)

_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")
_MAX_U32 = 2**32 - 1
_MAX_U64 = 2**64 - 1


class ResultSource(Protocol):
    """Where you can wait for a job that was added: a queue. That of an asyncio queue is awaited."""

    @property
    def name(self) -> str: ...
    def wait_for_result(
        self, job_id: str, *, timeout: float, poll_interval: float, since_ms: int | None
    ) -> Any: ...

    def wait_for_end(
        self, job_id: str, *, timeout: float | None, poll_interval: float, since_ms: int | None
    ) -> Any: ...


class Lease(Protocol):
    """Knows by a job's entry whether the worker still owns it, and how many runs it has."""

    @property
    def queue(self) -> str: ...
    def is_lost(self, entry: Any, /) -> bool: ...
    def attempts_of(self, entry: Any, /) -> int: ...


class _Unpickled:
    """The lease of a worker's job in another process: only its queue and the number of runs are
    known there."""

    __slots__ = ("queue",)

    def __init__(self, queue: str) -> None:
        self.queue = queue

    def is_lost(self, max_attempts: int, /) -> bool:
        return False

    def attempts_of(self, max_attempts: int, /) -> int:
        return max_attempts


@dataclass(slots=True)
class Job(Generic[R_co]):
    """One job: what `Queue` returns for an add, and what a handler gets.

    `Job[int]` returns an int. Only type checkers look at that.
    """

    id: str
    name: str
    data: Any
    #: Finished runs: 0 while the first one runs.
    attempt: int = 0
    created_at_ms: int = 0
    #: False if an earlier job has the same id, so that nothing was added.
    is_new: bool = field(default=True, compare=False)
    _queue: ResultSource | None = field(default=None, repr=False, compare=False)
    #: On a worker's job: who knows more of it, and the entry to ask by.
    _lease: tuple[Lease, Any] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled job has no ties to a queue or a worker. It knows the name of its queue and how
        many runs it has, if a worker had it."""
        fields = (self.id, self.name, self.data, self.attempt, self.created_at_ms, self.is_new)
        if self._lease is None:
            return type(self), fields
        lease = _Unpickled(self._lease[0].queue), self.max_attempts
        return type(self), (*fields, None, lease)

    @property
    def queue(self) -> str | None:
        """The name of its queue; None on a job that you made yourself."""
        if self._lease is not None:
            return self._lease[0].queue
        return None if self._queue is None else self._queue.name

    @property
    def lost(self) -> bool:
        """True once another worker has taken the job over, or may have: this run does not count,
        and the job runs again.

        It happens if the lease lapses: the machine slept, or the link was gone for too long.
        """
        return self._lease is not None and self._lease[0].is_lost(self._lease[1])

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if the job is `lost`: for handlers with steps that must not be
        repeated."""
        if self.lost:
            raise LeaseLostError(f"job {self.id} was taken over by another worker")

    @property
    def max_attempts(self) -> int | None:
        """How many runs the job has in all, on a worker's job: by its own options, those that the
        worker has for its name, or the worker's for all. None on a job that was added."""
        return None if self._lease is None else self._lease[0].attempts_of(self._lease[1])

    @property
    def is_last_attempt(self) -> bool:
        """True in the last run that the job has: if that fails, the job goes to the dead-letter
        queue."""
        most = self.max_attempts
        return most is not None and self.attempt + 1 >= most

    @property
    def attempts_made(self) -> int:
        """The same as `attempt`."""
        return self.attempt

    async def wait_for_result(self, *, timeout: float = 30.0, poll_interval: float = 0.1) -> R_co:
        """The handler's return value, once stored: workers store it with `store_results=True`, and
        never store None.

        Raises TimeoutError after `timeout` seconds, and JobFailedError as soon as the job is in the
        dead-letter queue.
        """
        queue = self._source("wait_for_result")
        value: R_co = await queue.wait_for_result(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )
        return value

    async def result(self, *, timeout: float | None = 30.0, poll_interval: float = 0.1) -> R_co:
        """The stored return value as soon as the job is done, or None if nothing was stored.

        Raises JobFailedError as soon as the job is in the dead-letter queue, TimeoutError after
        `timeout` seconds. Its worker's events tell that a job is done without a result: if they
        are off and nothing is stored, this waits until the timeout.
        """
        queue = self._source("result")
        value: R_co = await queue.wait_for_end(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )
        return value

    def _source(self, method: str) -> ResultSource:
        if self._queue is None:
            raise RuntimeError(
                f"Job.{method} requires a Queue reference; call from a Job returned by "
                "Queue.add / Queue.add_bulk, not from a Worker handler"
            )
        return self._queue


#: Makes jobs from columns of checked values, at a third of what calls to Job cost.
job_factory: "Final[InstanceFactory[Job]]" = InstanceFactory(Job)


@dataclass(frozen=True, slots=True)
class BackoffSpec:
    """How long a job waits before it is run again."""

    kind: str
    delay_ms: int
    max_delay_ms: int | None = None
    multiplier: float | None = None
    jitter_ms: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "exponential"):
            raise ValueError(
                f"unknown backoff kind {self.kind!r}; expected 'fixed' or 'exponential'"
            )
        _check_uint("backoff.delay_ms", self.delay_ms)
        for name in ("max_delay_ms", "jitter_ms"):
            if (value := getattr(self, name)) is not None:
                _check_uint(f"backoff.{name}", value)
        if (multiplier := self.multiplier) is not None:
            if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
                raise ValueError("backoff.multiplier must be a number")
            if not 0 <= multiplier <= sys.float_info.max:
                raise ValueError("backoff.multiplier must be finite and non-negative")
            # On the wire it is a float64, whatever the caller wrote.
            object.__setattr__(self, "multiplier", float(multiplier))

    @classmethod
    def fixed(cls, delay_ms: int, jitter_ms: int | None = None) -> "BackoffSpec":
        """The same delay before every retry, but no longer than the worker's longest (30 s), plus
        up to `jitter_ms` at random."""
        return cls("fixed", delay_ms, jitter_ms=jitter_ms)

    @classmethod
    def exponential(
        cls,
        initial_ms: int,
        *,
        multiplier: float = 2.0,
        max_ms: int | None = None,
        jitter_ms: int | None = None,
    ) -> "BackoffSpec":
        """A delay that is multiplied from retry to retry, up to `max_ms`, plus the jitter."""
        return cls("exponential", initial_ms, max_ms, multiplier, jitter_ms)

    @classmethod
    def parse(cls, value: "BackoffSpec | int | Mapping[str, Any]") -> "BackoffSpec":
        """The spec for what a caller passed as `backoff`; an int is a fixed delay in ms."""
        if isinstance(value, BackoffSpec):
            return value
        if isinstance(value, Mapping):
            _refuse_unknown(value, "backoff", cls)
            _require(value, "backoff", "kind", "delay_ms")
            return cls(**value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"backoff must be int (ms) / BackoffSpec / dict; got {type(value).__name__}"
            )
        return cls.fixed(value)

    def to_dict(self) -> dict[str, Any]:
        """The dict form: `kind`, `delay_ms`, and what else is set."""
        given = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in given if value is not None}


@dataclass(frozen=True, slots=True)
class RepeatPattern:
    """When a repeatable job fires. cron.py knows whether a cron expression has a next time."""

    kind: str
    expression: str | None = None
    tz: str | None = None
    interval_ms: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "cron":
            if not isinstance(self.expression, str) or not self.expression:
                raise ValueError('cron pattern requires `expression` (e.g. "0 2 * * *")')
            if self.tz is not None and not isinstance(self.tz, str):
                raise ValueError("pattern.tz must be a string or None")
        elif self.kind == "every":
            if self.interval_ms is None:
                raise ValueError("pattern.interval_ms is required")
            if _check_uint("pattern.interval_ms", self.interval_ms) == 0:
                raise ValueError("pattern.interval_ms must be > 0")
        else:
            raise ValueError(f"unknown pattern kind {self.kind!r}; expected 'cron' or 'every'")

    @classmethod
    def cron(cls, expression: str, *, tz: str | None = None) -> "RepeatPattern":
        """Fires by a cron expression of 5 fields, or 6 with leading seconds.

        `tz` is None or "UTC", an offset such as "+05:30", or an IANA name.
        """
        return cls("cron", expression, tz)

    @classmethod
    def every(cls, interval_ms: int) -> "RepeatPattern":
        """Fires at a fixed interval, first one interval from now."""
        return cls("every", interval_ms=interval_ms)

    @classmethod
    def parse(cls, value: "RepeatPattern | Mapping[str, Any]") -> "RepeatPattern":
        """The pattern for what a caller passed as `repeat`."""
        if isinstance(value, RepeatPattern):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"repeat must be a RepeatPattern or dict; got {type(value).__name__}")
        _refuse_unknown(value, "repeat", cls)
        _require(value, "pattern", "kind")
        if value["kind"] == "cron":
            return cls("cron", value.get("expression"), value.get("tz"))
        return cls(value["kind"], interval_ms=value.get("interval_ms"))

    def to_dict(self) -> dict[str, Any]:
        """The dict form."""
        if self.kind == "every":
            return {"kind": "every", "interval_ms": self.interval_ms}
        zone = {} if self.tz is None else {"tz": self.tz}
        return {"kind": "cron", "expression": self.expression, **zone}


@dataclass(frozen=True, slots=True)
class MissedFiresPolicy:
    """What happens with fire times at which no scheduler ran."""

    kind: str
    max_catchup: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("skip", "fire-once", "fire-all"):
            raise ValueError(
                f"unknown missed-fires kind {self.kind!r}; "
                "expected 'skip' / 'fire-once' / 'fire-all'"
            )
        if self.kind != "fire-all":
            return
        most = self.max_catchup
        if most is None:
            raise ValueError("missed_fires.max_catchup is required when kind is 'fire-all'")
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(f"max_catchup must be an int, got {type(most).__name__}")
        if not 1 <= most <= _MAX_U32:
            raise ValueError(f"max_catchup must be from 1 to {_MAX_U32}, got {most}")

    @classmethod
    def skip(cls) -> "MissedFiresPolicy":
        """Drop them and go on with the next time in the future. The default."""
        return cls("skip")

    @classmethod
    def fire_once(cls) -> "MissedFiresPolicy":
        """Fire once for all of them."""
        return cls("fire-once")

    @classmethod
    def fire_all(cls, max_catchup: int) -> "MissedFiresPolicy":
        """Fire for each of them, oldest first, but no more than `max_catchup` times."""
        if max_catchup is None:
            raise TypeError("max_catchup must be an int, got NoneType")
        return cls("fire-all", max_catchup)

    @classmethod
    def parse(cls, value: "MissedFiresPolicy | Mapping[str, Any]") -> "MissedFiresPolicy":
        """The policy for what a caller passed as `missed_fires`."""
        if isinstance(value, MissedFiresPolicy):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"missed_fires must be a MissedFiresPolicy or dict; got {type(value).__name__}"
            )
        _refuse_unknown(value, "missed_fires", cls)
        _require(value, "missed_fires", "kind")
        if value["kind"] == "fire-all":
            return cls("fire-all", value.get("max_catchup"))
        return cls(value["kind"])

    def to_dict(self) -> dict[str, Any]:
        """The dict form."""
        if self.kind == "fire-all":
            return {"kind": "fire-all", "max_catchup": self.max_catchup}
        return {"kind": self.kind}


@dataclass(frozen=True, slots=True)
class RepeatableMeta:
    """A repeatable job as it is listed: its schedule and its key, without its data."""

    key: str
    job_name: str
    pattern: RepeatPattern
    next_fire_ms: int
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    #: None where missed fires are skipped.
    missed_fires: MissedFiresPolicy | None = None


def is_drawn(job_id: str) -> bool:
    """Whether chasqui or chasquimq drew this id: a ULID, which holds the time it was drawn at."""
    return _ULID.fullmatch(job_id) is not None


def _check_uint(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_U64:
        raise ValueError(f"{what} must be a non-negative int")
    return value


def _refuse_unknown(value: Mapping[str, Any], what: str, kind: type[Any]) -> None:
    """Refuse keys that mean nothing: most are typing errors."""
    for name in value:
        if name not in kind.__slots__:
            raise ValueError(
                f"unknown key {shown(name)} in {what}; expected {', '.join(kind.__slots__)}"
            )


def _require(value: Mapping[str, Any], what: str, *names: str) -> None:
    for name in names:
        if name not in value:
            raise ValueError(f"{what}.{name} is required")
