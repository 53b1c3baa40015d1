"""How long to wait before a retry: arithmetic that saturates, whatever a spec says."""

from libc.math cimport INFINITY, isnan, pow
from libc.stdint cimport uint64_t

#: The longest delay that is ever answered, about 142,000 years: added to a time of today in
#: ms it is still an exact double, which is what a sorted set keeps as its score.
MAX_DELAY_MS = 1 << 52

cdef double CEILING = <double>(<uint64_t>1 << 52)


def backoff_ms(run, delay_ms, *, multiplier=1.0, max_delay_ms=None, jitter_ms=0, double luck=0.0):
    """Milliseconds to wait after failed run number `run` (from 1).

    `min(delay · multiplier^(run-1), max) + luck · jitter`, with `luck` drawn from [0, 1) by the
    caller. Numbers of any size and sign are taken: what is negative counts as 0, what is not a
    number as absent, and the answer lies in 0..MAX_DELAY_MS.
    """
    cdef double steps = _clamp(run) - 1.0
    cdef double factor = _clamp(multiplier) if not _is_nan(multiplier) else 1.0
    cdef double wait = _clamp(delay_ms)
    cdef double jitter = _clamp(jitter_ms)
    if steps > 0.0 and wait > 0.0:          # 0 · inf is not a number
        wait = min(wait * pow(factor, steps), CEILING)
    if max_delay_ms is not None and not _is_nan(max_delay_ms):
        wait = min(wait, _clamp(max_delay_ms))
    if isnan(luck) or luck < 0.0:
        luck = 0.0
    wait += <double><uint64_t>(min(luck, 1.0) * jitter)
    return <uint64_t>min(wait, CEILING)


cdef bint _is_nan(object number) except -1:
    return isinstance(number, float) and isnan(<double>number)


cdef double _clamp(object number) except -1.0:
    """The number as a double in 0..CEILING (a multiplier beyond that saturates anyway)."""
    cdef double value
    try:
        value = number
    except OverflowError:                   # an int too large for a double
        value = -INFINITY if number < 0 else INFINITY
    if isnan(value) or value < 0.0:
        return 0.0
    return min(value, CEILING)
