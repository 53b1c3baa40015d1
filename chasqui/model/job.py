"""A job as users hold it, and what they say about it besides its data.

The types are checked when they are made, so whoever holds one holds a valid one. `parse` takes
what public methods accept in their place: the type itself or its dict form. The messages are
chasquimq's.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from chasqui._core.instances import Slots
from chasqui.errors import LeaseLostError
from chasqui.model.keys import shown

_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")
_ULID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_MAX_U32 = 2**32 - 1
_MAX_U64 = 2**64 - 1


class ResultSource(Protocol):
    """Where a job that was added can be waited for."""

    async def wait_for_result(
        self, job_id: str, *, timeout: float, poll_interval: float, since_ms: int | None
    ) -> Any: ...

    async def wait_for_end(
        self, job_id: str, *, timeout: float | None, poll_interval: float, since_ms: int | None
    ) -> Any: ...


class Lease(Protocol):
    """What knows whether a worker still owns its jobs."""

    def is_lost(self, entry_id: bytes, /) -> bool: ...


@dataclass(slots=True)
class Job:
    """One job: what `Queue` returns for an add, and what a handler gets."""

    id: str
    name: str
    data: Any
    #: Finished runs: 0 while the first one runs.
    attempt: int = 0
    created_at_ms: int = 0
    #: False where an earlier job had the same id, so that nothing was added.
    is_new: bool = field(default=True, compare=False)
    _queue: ResultSource | None = field(default=None, repr=False, compare=False)
    #: On a worker's job: what tells whether it is still ours, and the id it has there.
    _lease: tuple[Lease, bytes] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes the job, not its ties to a queue or a worker."""
        fields = (self.id, self.name, self.data, self.attempt, self.created_at_ms, self.is_new)
        return type(self), fields

    @property
    def lost(self) -> bool:
        """True once another worker has taken the job over, or may have: whatever this run does is
        not counted, and the job runs again.

        That takes a lapse of the lease: a machine that slept, a link that was gone for too long.
        """
        return self._lease is not None and self._lease[0].is_lost(self._lease[1])

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if the job is `lost`: for handlers with steps that must not be
        repeated."""
        if self.lost:
            raise LeaseLostError(f"job {self.id} was taken over by another worker")

    @property
    def attempts_made(self) -> int:
        """The same as `attempt`."""
        return self.attempt

    async def wait_for_result(self, *, timeout: float = 30.0, poll_interval: float = 0.1) -> Any:
        """The handler's return value, once stored: workers store it if told to, and None never.

        Raises TimeoutError after `timeout` seconds, and JobFailedError as soon as the job is in the
        dead-letter queue.
        """
        queue = self._source("wait_for_result")
        return await queue.wait_for_result(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )

    async def result(self, *, timeout: float | None = 30.0, poll_interval: float = 0.1) -> Any:
        """The stored return value as soon as the job is done, or None if nothing was stored.

        Raises JobFailedError as soon as the job is in the dead-letter queue, TimeoutError after
        `timeout` seconds. That a job is done without a result is known by its events: where its
        worker has them off, and stores nothing, this waits until the timeout.
        """
        queue = self._source("result")
        return await queue.wait_for_end(
            self.id, timeout=timeout, poll_interval=poll_interval, since_ms=None
        )

    def _source(self, method: str) -> ResultSource:
        if self._queue is None:
            raise RuntimeError(
                f"Job.{method} requires a Queue reference; call from a Job returned by "
                "Queue.add / Queue.add_bulk, not from a Worker handler; for a job of a "
                "sync.Queue, call that queue's wait_for_result or wait_for_end with its id"
            )
        return self._queue


#: Makes jobs from columns of checked values, at a third of what calls to Job cost.
job_slots: Final = Slots(Job)


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
            return cls(
                value["kind"],
                value["delay_ms"],
                value.get("max_delay_ms"),
                value.get("multiplier"),
                value.get("jitter_ms"),
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"backoff must be int (ms) / BackoffSpec / dict; got {type(value).__name__}"
            )
        return cls.fixed(value)

    def to_dict(self) -> dict[str, Any]:
        """The dict form: `kind`, `delay_ms`, and what else is set."""
        optional = {
            "max_delay_ms": self.max_delay_ms,
            "multiplier": self.multiplier,
            "jitter_ms": self.jitter_ms,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        return {"kind": self.kind, "delay_ms": self.delay_ms, **given}


@dataclass(frozen=True, slots=True)
class RepeatPattern:
    """When a repeatable job fires. Whether a cron expression has a next time, cron.py knows."""

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
    """What becomes of the times at which no scheduler was there to fire."""

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
        """Forget them; go on with the next time in the future. The default."""
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


def drawn_ms(job_id: str) -> int:
    """When an id that we or chasquimq made up was drawn, by the producer's clock; 0 for others."""
    if not _ULID.fullmatch(job_id):
        return 0
    drawn = 0
    for digit in job_id[:10]:
        drawn = drawn * 32 + _ULID_DIGITS.index(digit)
    return drawn


def _check_uint(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_U64:
        raise ValueError(f"{what} must be a non-negative int")
    return value


def _refuse_unknown(value: Mapping[str, Any], what: str, kind: type[Any]) -> None:
    """Most keys that nobody reads are typing errors."""
    for name in value:
        if name not in kind.__slots__:
            raise ValueError(
                f"unknown key {shown(name)} in {what}; expected {', '.join(kind.__slots__)}"
            )


def _require(value: Mapping[str, Any], what: str, *names: str) -> None:
    for name in names:
        if name not in value:
            raise ValueError(f"{what}.{name} is required")
