"""What becomes of an entry: pure decisions, no I/O, no clock, so that they can be simulated.

An entry is judged when it arrives (run it, bury it, leave it alone) and when its run is over
(acknowledge it, repeat it later, bury it).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from chasqui._core.backoff import backoff_ms

if TYPE_CHECKING:  # a name of the stub: compiled modules have no type aliases
    from chasqui._core.envelope import RetryTuple

RETRIES_EXHAUSTED: Final = "retries_exhausted"
UNRECOVERABLE: Final = "unrecoverable"
DECODE_FAILED: Final = "decode_failed"
WORKER_LOST: Final = "worker lost"
GONE: Final = "gone"
#: Too much for one read: only its id was kept of it.
LEFT: Final = "left"


class Arrived(Protocol):
    """What a decision needs to know of an entry."""

    @property
    def fault(self) -> str | None: ...
    @property
    def detail(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...
    @property
    def deliveries(self) -> int:
        """How often it was delivered before this time."""

    @property
    def max_attempts(self) -> int | None: ...
    @property
    def retry(self) -> "RetryTuple | None": ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a retry, where the job does not say."""

    delay_ms: int = 100
    multiplier: float = 2.0
    max_delay_ms: int = 30_000
    jitter_ms: int = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """How often a job may run, where the job does not say, and how often it may be delivered."""

    max_attempts: int = 25
    #: None: three, or the job's attempts if that is more.
    max_deliveries: int | None = None
    backoff: Backoff = Backoff()

    def attempts_of(self, entry: Arrived) -> int:
        own = entry.max_attempts
        return self.max_attempts if own is None else own

    def deliveries_of(self, entry: Arrived) -> int:
        if self.max_deliveries is not None:
            return self.max_deliveries
        return max(3, self.attempts_of(entry))


@dataclass(frozen=True, slots=True)
class Run:
    """Hand it to its handler."""


@dataclass(frozen=True, slots=True)
class Leave:
    """It is in hand already, or there is nothing left of it."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Back to the delayed set, due in `delay_ms`, with `attempt` runs behind it."""

    delay_ms: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Bury:
    """To the dead-letter queue."""

    reason: str
    detail: str | None = None


Arrival: TypeAlias = Run | Leave | Bury
Verdict: TypeAlias = RunAgain | Bury

RUN: Final = Run()
LEAVE: Final = Leave()


def on_arrival(entry: Arrived, limits: Limits, *, is_in_hand: bool) -> Arrival:
    """An entry was delivered to us, for the first time or again.

    `is_in_hand`: we hold it already, running or waiting, and a reclaim gave it to us once more.
    """
    if is_in_hand:
        return LEAVE
    if entry.fault == GONE:
        return LEAVE
    if entry.fault is not None:
        return Bury(entry.fault, entry.detail)
    if entry.attempt + 1 > limits.attempts_of(entry):
        return Bury(RETRIES_EXHAUSTED)
    # A delivery that was lost with its worker is no failed run: it has a budget of its own.
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
    """A run failed. `luck` in [0, 1) decides the jitter."""
    if failure.is_final:
        return Bury(failure.reason, failure.detail)
    runs = entry.attempt + 1
    if runs >= limits.attempts_of(entry):
        return Bury(RETRIES_EXHAUSTED)
    if failure.delay_ms is not None:
        return RunAgain(failure.delay_ms, runs)
    return RunAgain(retry_delay_ms(entry.retry, runs, limits.backoff, luck), runs)


def retry_delay_ms(retry: "RetryTuple | None", runs: int, default: Backoff, luck: float) -> int:
    """The wait after `runs` failed runs; what the job leaves open, the worker fills in."""
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
        multiplier = default.multiplier
    return backoff_ms(
        runs,
        delay_ms,
        multiplier=multiplier,
        max_delay_ms=default.max_delay_ms if max_delay_ms is None else max_delay_ms,
        jitter_ms=default.jitter_ms if jitter_ms is None else jitter_ms,
        luck=luck,
    )
