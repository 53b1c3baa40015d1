"""The fate of an entry: decisions without I/O or a clock, so that they can be simulated.

One is made when an entry arrives: run it, bury it, leave it alone. Another when its run has failed:
retry it or bury it. (An entry whose run returned is acknowledged: there is nothing to decide.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from chasqui._core.backoff import backoff_ms
from chasqui.model.job import BackoffSpec

if TYPE_CHECKING:  # a name of the stub: compiled modules have no type aliases
    from chasqui._core.envelope import RetryTuple

RETRIES_EXHAUSTED: Final = "retries_exhausted"
UNRECOVERABLE: Final = "unrecoverable"
DECODE_FAILED: Final = "decode_failed"
WORKER_LOST: Final = "worker lost"
GONE: Final = "gone"
#: Too large for one read: only its id was kept.
LEFT: Final = "left"


class Arrived(Protocol):
    """What a decision needs to know about an entry."""

    @property
    def name(self) -> str: ...
    @property
    def fault(self) -> str | None: ...
    @property
    def detail(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...
    @property
    def deliveries(self) -> int:
        """How often it was delivered before."""

    @property
    def max_attempts(self) -> int | None: ...
    @property
    def retry(self) -> "RetryTuple | None": ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a retry, for jobs without a backoff of their own."""

    delay_ms: int = 100
    multiplier: float = 2.0
    max_delay_ms: int = 30_000
    jitter_ms: int = 100

    @classmethod
    def of(cls, spec: BackoffSpec) -> "Backoff":
        """What a spec of the worker comes to: its gaps are filled, and without a `max_delay_ms` it
        is never cut below its own delay."""
        delay_ms, multiplier, longest_ms = spec.delay_ms, spec.multiplier, spec.max_delay_ms
        if spec.kind == "fixed":
            multiplier = 1.0
        return cls(
            delay_ms,
            GAPS.multiplier if multiplier is None else multiplier,
            max(GAPS.max_delay_ms, delay_ms) if longest_ms is None else longest_ms,
            GAPS.jitter_ms if spec.jitter_ms is None else spec.jitter_ms,
        )


#: What a backoff leaves open.
GAPS: Final = Backoff()


@dataclass(frozen=True, slots=True)
class Limits:
    """How often a job may run, how long it waits in between, and how often it may be delivered.

    What a job says itself goes first, then what there is for its name, then what is for all.
    """

    max_attempts: int = 25
    #: None: three, or the job's attempts if that is more.
    max_deliveries: int | None = None
    backoff: Backoff = GAPS
    attempts_by_name: Mapping[str, int] = field(default_factory=dict)
    backoff_by_name: Mapping[str, Backoff] = field(default_factory=dict)

    def attempts_of(self, entry: Arrived) -> int:
        own = entry.max_attempts
        return self.attempts_by_name.get(entry.name, self.max_attempts) if own is None else own

    def backoff_of(self, entry: Arrived) -> Backoff:
        """The backoff of a job that has none of its own."""
        return self.backoff_by_name.get(entry.name, self.backoff)

    def deliveries_of(self, entry: Arrived) -> int:
        if self.max_deliveries is not None:
            return self.max_deliveries
        return max(3, self.attempts_of(entry))


@dataclass(frozen=True, slots=True)
class Run:
    """Run its handler."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Do nothing: we hold it already, or nothing is left of it."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Move it to the delayed set, due in `delay_ms`, with `attempt` runs behind it."""

    delay_ms: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Move it to the DLQ."""

    reason: str
    detail: str | None = None


Arrival: TypeAlias = Run | Leave | Bury
Verdict: TypeAlias = RunAgain | Bury

RUN: Final = Run()
LEAVE: Final = Leave()


def on_arrival(entry: Arrived, limits: Limits, *, is_in_hand: bool) -> Arrival:
    """The fate of an entry that was delivered, for the first time or again.

    `is_in_hand`: we hold it already, running or waiting, and a takeover delivered it once more.
    """
    if is_in_hand:
        return LEAVE
    if entry.fault == GONE:
        return LEAVE
    if entry.fault is not None:
        return Bury(entry.fault, entry.detail)
    if entry.attempt + 1 > limits.attempts_of(entry):
        return Bury(RETRIES_EXHAUSTED)
    # A worker that died counts as a delivery, not as a failed run: deliveries have a limit of
    # their own.
    if entry.deliveries >= limits.deliveries_of(entry):
        return Bury(RETRIES_EXHAUSTED, WORKER_LOST)
    return RUN


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run failed."""

    #: No retry helps.
    is_final: bool = False
    #: The delay that the handler asked for.
    delay_ms: int | None = None
    reason: str = UNRECOVERABLE
    detail: str | None = None


def on_failure(entry: Arrived, failure: Failure, limits: Limits, luck: float) -> Verdict:
    """The fate of an entry whose run failed. `luck` in [0, 1) decides the jitter."""
    if failure.is_final:
        return Bury(failure.reason, failure.detail)
    runs = entry.attempt + 1
    if runs >= limits.attempts_of(entry):
        return Bury(RETRIES_EXHAUSTED)
    if failure.delay_ms is not None:
        return RunAgain(failure.delay_ms, runs)
    return RunAgain(retry_delay_ms(entry.retry, runs, limits.backoff_of(entry), luck), runs)


def retry_delay_ms(retry: "RetryTuple | None", runs: int, default: Backoff, luck: float) -> int:
    """The wait after `runs` failed runs: by the job's own backoff, its gaps filled by the same
    numbers in every worker, or else by `default`."""
    own = None if retry is None else retry[1]
    if own is None:
        return backoff_ms(
            runs,
            default.delay_ms,
            multiplier=default.multiplier,
            max_delay_ms=default.max_delay_ms,
            jitter_ms=default.jitter_ms,
            luck=luck,
        )
    kind, delay_ms, max_delay_ms, multiplier, jitter_ms = own
    if kind == "fixed":
        multiplier = 1.0
    elif multiplier is None:
        multiplier = GAPS.multiplier
    return backoff_ms(
        runs,
        delay_ms,
        multiplier=multiplier,
        max_delay_ms=GAPS.max_delay_ms if max_delay_ms is None else max_delay_ms,
        jitter_ms=GAPS.jitter_ms if jitter_ms is None else jitter_ms,
        luck=luck,
    )
