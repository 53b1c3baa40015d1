"""How long to wait before a retry: arithmetic that saturates, whatever a spec says."""

from libc.math cimport INFINITY, floor, isnan, pow
from libc.stdint cimport uint64_t

#: The longest delay that is ever answered, about 142,000 years: added to a time of today in
#: ms it is still an exact double, which is what a sorted set keeps as its score.
MAX_DELAY_MS = 1 << 52

cdef double CEILING = <double>(<uint64_t>1 << 52)


def backoff_ms(run, delay_ms, *, multiplier=1.0, max_delay_ms=None, jitter_ms=0, luck=0.0):
    """Milliseconds to wait after failed run number `run` (from 1).

    `min(delay · multiplier^(run-1), max) + luck · jitter`, with `luck` drawn from [0, 1) by the
    caller. Numbers of any size and sign are taken: what is not a number counts as absent, what is
    negative as 0, what is beyond MAX_DELAY_MS as that, and the answer lies in 0..MAX_DELAY_MS.
    """
    cdef double steps = _clamp(run, 1.0) - 1.0
    cdef double factor = _clamp(multiplier, 1.0)
    cdef double wait = _clamp(delay_ms, 0.0)
    cdef double longest = CEILING if max_delay_ms is None else _clamp(max_delay_ms, CEILING)
    cdef double jitter = min(_clamp(luck, 0.0), 1.0) * _clamp(jitter_ms, 0.0)
    if steps > 0.0 and wait > 0.0:          # 0 · inf is not a number
        wait *= pow(factor, steps)
    return <uint64_t>min(floor(min(wait, longest)) + floor(jitter), CEILING)


cdef double _clamp(object number, double absent) except -1.0:
    """The number as a double in 0..CEILING."""
    cdef double value
    try:
        value = number
    except OverflowError:                   # an int too large for a double
        value = -INFINITY if number < 0 else INFINITY
    if isnan(value):
        return absent
    return min(max(value, 0.0), CEILING)
