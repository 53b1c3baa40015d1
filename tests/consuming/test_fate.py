"""What becomes of an entry, decided without server or clock."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui import BackoffSpec
from chasqui.consuming.fate import (
    LEAVE,
    RUN,
    Backoff,
    Bury,
    Failure,
    Limits,
    RunAgain,
    on_arrival,
    on_failure,
    retry_delay_ms,
)


@dataclass
class Entry:
    fault: Any = None
    detail: str | None = None
    attempt: int = 0
    deliveries: int = 0
    retry: Any = None
    name: str = "n"

    @property
    def max_attempts(self) -> int | None:
        return None if self.retry is None else self.retry[0]


NO_JITTER = Backoff(jitter_ms=0)


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        (Entry(), RUN),
        (Entry(fault="malformed", detail="why"), Bury("malformed", "why")),
        (Entry(fault="oversize_payload"), Bury("oversize_payload")),
        (Entry(fault="decode_failed", detail="why"), Bury("decode_failed", "why")),
        (Entry(fault="gone"), LEAVE),
        (Entry(attempt=24), RUN),
        (Entry(attempt=25), Bury("retries_exhausted")),
        (Entry(attempt=1, retry=(2, None)), RUN),
        (Entry(attempt=2, retry=(2, None)), Bury("retries_exhausted")),
        (Entry(retry=(0, None)), Bury("retries_exhausted")),
        (Entry(attempt=30, retry=(31, None)), RUN),
        # Deliveries that were lost with their workers: three, or as many as attempts.
        (Entry(deliveries=2, retry=(1, None)), RUN),
        (Entry(deliveries=3, retry=(1, None)), Bury("retries_exhausted", "worker lost")),
        (Entry(deliveries=24), RUN),
        (Entry(deliveries=25), Bury("retries_exhausted", "worker lost")),
        # What was never read is judged by its fault, however often it came.
        (Entry(fault="malformed", deliveries=99), Bury("malformed")),
    ],
)
def test_arrival(entry: Entry, verdict: object) -> None:
    assert on_arrival(entry, Limits(), is_in_hand=False) == verdict
    assert on_arrival(entry, Limits(), is_in_hand=True) == LEAVE


def test_the_budget_of_deliveries_can_be_set() -> None:
    limits = Limits(25, max_deliveries=1)
    assert on_arrival(Entry(), limits, is_in_hand=False) == RUN
    assert on_arrival(Entry(deliveries=1), limits, is_in_hand=False) == Bury(
        "retries_exhausted", "worker lost"
    )


def test_failures() -> None:
    limits = Limits(3, backoff=NO_JITTER)
    assert on_failure(Entry(), Failure(), limits, 0.5) == RunAgain(100, 1)
    assert on_failure(Entry(attempt=1), Failure(), limits, 0.5) == RunAgain(200, 2)
    assert on_failure(Entry(attempt=2), Failure(), limits, 0.5) == Bury("retries_exhausted")
    assert on_failure(Entry(), Failure(delay_ms=7), limits, 0.5) == RunAgain(7, 1)
    assert on_failure(Entry(), Failure(is_final=True), limits, 0.5) == Bury("unrecoverable")
    # A handler that asks for a retry gets no more runs than others.
    assert on_failure(Entry(attempt=2), Failure(delay_ms=7), limits, 0.5) == Bury(
        "retries_exhausted"
    )


@pytest.mark.parametrize(
    ("own", "runs", "wait_ms"),
    [
        (None, 1, 150),
        (None, 3, 450),
        (None, 100, 30_050),
        (("fixed", 40, None, None, None), 9, 90),
        (("fixed", 40, None, 9.0, 0), 9, 40),
        (("fixed", 60_000, None, None, 0), 1, 30_000),
        (("fixed", 60_000, 90_000, None, 0), 1, 60_000),
        (("exponential", 10, None, None, None), 3, 90),
        (("exponential", 10, 25, 3.0, 0), 3, 25),
        (("of the future", 10, None, None, 0), 2, 20),
        (("exponential", 0, None, 0.0, 0), 5, 0),
    ],
)
def test_what_a_job_leaves_open_the_worker_fills_in(own: Any, runs: int, wait_ms: int) -> None:
    retry = None if own is None else (None, own)
    assert retry_delay_ms(retry, runs, Backoff(), 0.5) == wait_ms


def test_a_job_goes_by_itself_then_by_its_name_then_by_the_worker() -> None:
    of_name = Backoff(delay_ms=7, jitter_ms=0)
    limits = Limits(
        3,
        backoff=NO_JITTER,
        attempts_by_name={"mail": 2, "often": 9},
        backoff_by_name={"mail": of_name},
    )
    assert [
        limits.attempts_of(entry)
        for entry in (Entry(), Entry(name="mail"), Entry(name="mail", retry=(4, None)))
    ] == [3, 2, 4]

    def wait_ms(entry: Entry) -> int:
        verdict = on_failure(entry, Failure(), limits, 0.5)
        assert isinstance(verdict, RunAgain)
        return verdict.delay_ms

    own = ("fixed", 40, None, None, 0)
    assert wait_ms(Entry()) == 100
    assert wait_ms(Entry(name="mail")) == 7
    assert wait_ms(Entry(name="mail", retry=(None, own))) == 40
    assert wait_ms(Entry(name="often", attempt=7)) == 100 * 2**7
    # What a job leaves open is the same in every worker.
    assert wait_ms(Entry(name="mail", retry=(None, ("exponential", 10, None, None, None)))) == 60
    # Deliveries go by the attempts, so by the name too.
    assert on_arrival(Entry(name="often", deliveries=8), limits, is_in_hand=False) == RUN
    assert on_arrival(Entry(name="mail", deliveries=3), limits, is_in_hand=False) == Bury(
        "retries_exhausted", "worker lost"
    )


@pytest.mark.parametrize(
    ("spec", "waits_ms"),
    [
        (BackoffSpec.fixed(40, jitter_ms=0), [40, 40, 40]),
        (BackoffSpec.fixed(40), [90, 90, 90]),
        # Nobody says a minute and means half of one.
        (BackoffSpec.fixed(60_000, jitter_ms=0), [60_000] * 3),
        (BackoffSpec("fixed", 60_000, 50_000, jitter_ms=0), [50_000] * 3),
        (BackoffSpec.exponential(20_000, jitter_ms=0), [20_000, 30_000, 30_000]),
        (BackoffSpec("exponential", 10, jitter_ms=0), [10, 20, 40]),
        (BackoffSpec.exponential(10, multiplier=3, max_ms=50, jitter_ms=0), [10, 30, 50]),
        (BackoffSpec.exponential(0, multiplier=0.0, jitter_ms=0), [0, 0, 0]),
    ],
)
def test_a_spec_of_the_worker(spec: BackoffSpec, waits_ms: list[int]) -> None:
    backoff = Backoff.of(spec)
    assert [retry_delay_ms(None, runs, backoff, 0.5) for runs in (1, 2, 3)] == waits_ms


UINTS = st.integers(0, 2**64 - 1)
BACKOFFS = st.tuples(
    st.sampled_from(["fixed", "exponential", "x"]),
    UINTS,
    st.none() | UINTS,
    st.none() | st.floats(),
    st.none() | UINTS,
)


@given(BACKOFFS, st.integers(1, 2**32), st.floats(0, 1, exclude_max=True))
def test_no_spec_makes_a_delay_that_a_score_cannot_hold(own: Any, runs: int, luck: float) -> None:
    wait_ms = retry_delay_ms((None, own), runs, Backoff(), luck)
    assert type(wait_ms) is int
    assert 0 <= wait_ms <= 2**52


@given(
    st.builds(
        BackoffSpec,
        st.sampled_from(["fixed", "exponential"]),
        UINTS,
        st.none() | UINTS,
        st.none() | st.floats(0, allow_nan=False, allow_infinity=False),
        st.none() | UINTS,
    ),
    st.integers(1, 2**32),
    st.floats(0, 1, exclude_max=True),
)
def test_nor_does_a_spec_of_the_worker(spec: BackoffSpec, runs: int, luck: float) -> None:
    wait_ms = retry_delay_ms(None, runs, Backoff.of(spec), luck)
    assert type(wait_ms) is int
    assert 0 <= wait_ms <= 2**52


@given(st.integers(1, 30), st.none() | st.integers(1, 30), st.none() | st.integers(0, 30))
def test_a_job_that_always_fails_runs_exactly_as_often_as_it_may(
    of_worker: int, of_name: int | None, own: int | None
) -> None:
    limits = Limits(of_worker, attempts_by_name={} if of_name is None else {"n": of_name})
    entry = Entry(retry=None if own is None else (own, None))
    runs = 0
    while on_arrival(entry, limits, is_in_hand=False) == RUN:
        runs += 1
        verdict = on_failure(entry, Failure(), limits, 0.0)
        if isinstance(verdict, Bury):
            assert verdict.reason == "retries_exhausted"
            break
        assert isinstance(verdict, RunAgain)
        entry = Entry(attempt=verdict.attempt, retry=entry.retry)
    assert runs == next(most for most in (own, of_name, of_worker) if most is not None)
