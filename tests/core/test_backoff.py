"""Backoff arithmetic against exact fractions, for numbers of any size and kind."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chasqui._core.backoff import MAX_DELAY_MS, backoff_ms

#: Anything that a spec could hold. A delay below a microsecond is no delay: it is left out.
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 100_000),
    st.floats(0, 1000, allow_subnormal=False).filter(lambda number: not 0 < number < 1e-3),
    st.floats(min_value=1, allow_nan=False),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 10**400, -(10**400), 2.0, 0.5, 1]),
)


def clamp(number: float, absent: int) -> Fraction:
    if number != number:
        return Fraction(absent)
    return Fraction(max(0, min(number, MAX_DELAY_MS)))


def exact(run, delay_ms, multiplier, max_delay_ms, jitter_ms, luck) -> Fraction:
    """The formula without rounding, every power that matters included."""
    steps, factor = clamp(run, 1) - 1, clamp(multiplier, 1)
    wait = clamp(delay_ms, 0)
    longest = Fraction(MAX_DELAY_MS) if max_delay_ms is None else clamp(max_delay_ms, MAX_DELAY_MS)
    jitter = min(clamp(luck, 0), 1) * clamp(jitter_ms, 0)
    if steps > 0 and wait > 0:
        doublings = -math.inf if factor == 0 else math.log2(factor) * float(steps)
        if doublings > 1000:
            wait = Fraction(MAX_DELAY_MS)
        elif doublings < -1000:
            wait = Fraction(0)
        elif steps.denominator == 1 and steps < 10_000:
            wait *= factor ** int(steps)
        else:
            wait *= Fraction(2.0**doublings)
    return min(math.floor(min(wait, longest)) + Fraction(math.floor(jitter)), MAX_DELAY_MS)


@given(
    *(st.integers(-5, 200) | NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS, NUMBERS),
    st.floats(0, 1, exclude_max=True) | NUMBERS,
)
@example(1, 100, 2.0, 30_000, 0, 0.0)
@example(2**64, 100, 1.0000001, None, 0, 0.0)
@example(3, 0, math.inf, None, 0, 0.0)
@example(3, math.inf, 0.0, None, math.inf, 0.999)
@example(math.inf, 1, 1.0, None, 0, 0.0)
def test_answer_is_the_exact_one_saturated(run, delay_ms, multiplier, max_delay_ms, jitter, luck):
    answer = backoff_ms(
        run,
        delay_ms,
        multiplier=multiplier,
        max_delay_ms=max_delay_ms,
        jitter_ms=jitter,
        luck=luck,
    )
    assert type(answer) is int
    assert 0 <= answer <= MAX_DELAY_MS
    expected = exact(run, delay_ms, multiplier, max_delay_ms, jitter, luck)
    assert abs(answer - expected) <= 1 + expected * Fraction(1, 10**5)


@given(st.integers(1, 60), st.integers(0, 10_000), st.integers(0, 10), st.integers(0, 10**6))
def test_whole_numbers_give_the_whole_number(run, delay_ms, multiplier, max_delay_ms):
    expected = min(delay_ms * multiplier ** (run - 1), max_delay_ms)
    assert backoff_ms(run, delay_ms, multiplier=multiplier, max_delay_ms=max_delay_ms) == expected


def test_defaults_of_a_worker():
    waits = [backoff_ms(run, 100, multiplier=2.0, max_delay_ms=30_000) for run in range(1, 12)]
    assert waits == [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]


def test_jitter_is_added_behind_the_maximum_and_below_its_own():
    assert backoff_ms(9, 100, max_delay_ms=50, jitter_ms=100, luck=0.999999) == 149
    assert backoff_ms(9, 100, max_delay_ms=50, jitter_ms=100) == 50


def test_other_numbers_are_numbers_too():
    assert backoff_ms(Decimal(2), Decimal(10), multiplier=Fraction(3, 2)) == 15
    assert backoff_ms(2, 10, max_delay_ms=Decimal("nan")) == 10


@pytest.mark.parametrize("what", ["run", "delay_ms", "multiplier", "jitter_ms", "luck"])
def test_what_is_no_number_is_an_error(what: str):
    with pytest.raises(TypeError):
        backoff_ms(**{"run": 1, "delay_ms": 1, what: None})
