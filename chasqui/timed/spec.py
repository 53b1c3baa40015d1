"""A repeat spec: its bytes in Redis, and which fires it owes at a given moment.

Nothing here reads a clock or talks to Redis: the scheduler passes Redis's time in.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from chasqui._core.envelope import check_msgpack, decode_envelope, encode_envelope
from chasqui.timed.cron import Cron
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import check_text, shown

__all__ = [
    "MAX_FIRES_PER_PLAN",
    "MAX_FIRE_MS",
    "FirePlan",
    "RepeatSpec",
    "RepeatSpecError",
    "plan_fires",
]

#: The most fires that one plan makes up for, whatever `max_catchup` allows: planning them all
#: must not hold up a worker's event loop.
MAX_FIRES_PER_PLAN: Final = 10_000
#: Fire times are scores, and a score is a double.
MAX_FIRE_MS: Final = 2**53

_MAX_KEY_BYTES: Final = 1024
_MAX_U64: Final = 2**64 - 1
# A spec nests three deep; a few levels more are left to its future versions.
_MAX_DEPTH: Final = 8
_BAD_IN_KEY = re.compile("[{}\x00-\x1f\x7f-\x9f\u2028\u2029]")


class RepeatSpecError(ValueError):
    """Bytes in Redis that are no repeat spec, or one that this version cannot read."""


@dataclass(frozen=True, slots=True)
class RepeatSpec:
    """A job that fires again and again, with all that is known about it in Redis.

    `make` checks what a user asks for. What `decode` reads may go beyond that.
    """

    key: str
    job_name: str
    pattern: RepeatPattern
    #: The user's value, encoded.
    payload: bytes
    #: None is no limit; so is 0, which only other producers write.
    limit: int | None = None
    start_after_ms: int | None = None
    #: The last moment at which it may fire.
    end_before_ms: int | None = None
    #: As it was when the spec was written; the count that goes on is a field beside it.
    fired: int = 0
    #: None where missed fires are skipped.
    missed_fires: MissedFiresPolicy | None = None
    #: Attempts and backoff of each fire, as `encode_retry` makes them: also a field beside it.
    retry: bytes | None = None

    @classmethod
    def make(
        cls,
        job_name: str,
        pattern: RepeatPattern,
        payload: bytes,
        *,
        key: str | None = None,
        limit: int | None = None,
        start_after_ms: int | None = None,
        end_before_ms: int | None = None,
        missed_fires: MissedFiresPolicy | None = None,
        retry: bytes | None = None,
    ) -> "RepeatSpec":
        """A new spec; without a key it gets one made of the name and the pattern.

        Raises ValueError, with the field's name and what is wrong with it.
        """
        key = _check_key(key or _derived_key(job_name, pattern))
        if _uint_or_none("limit", limit) == 0:
            raise ValueError("limit must be at least 1, or None for no limit; got 0")
        start = _uint_or_none("start_after_ms", start_after_ms)
        end = _uint_or_none("end_before_ms", end_before_ms)
        if start is not None and end is not None and end < start:
            raise ValueError(f"end_before_ms {end} is before start_after_ms {start}")
        if missed_fires is not None and missed_fires.kind == "skip":
            missed_fires = None
        spec = cls(key, job_name, pattern, payload, limit, start, end, 0, missed_fires, retry)
        spec.first_fire_ms(0)  # reads the cron expression; what is no good in 1970 never will be
        return spec

    def first_fire_ms(self, now_ms: int) -> int:
        """The first fire of a spec that is written at `now_ms`; ValueError if that is too late."""
        first = self._next_ignoring_end(now_ms)
        if first is None:
            raise ValueError(f"repeat {self.pattern.to_dict()} has no fire that can be scheduled")
        if self._is_over(first):
            raise ValueError(
                f"end_before_ms {self.end_before_ms} is before the first fire, {first}"
            )
        return first

    def next_fire_ms(self, after_ms: int) -> int | None:
        """The first fire later than `after_ms`, or None if that was the last.

        An interval counts from `after_ms`, so that has to be a fire itself.
        """
        following = self._next_ignoring_end(after_ms)
        if following is None or self._is_over(following):
            return None
        return following

    def encode(self) -> bytes:
        """The value of the hash's `spec` field."""
        fields: list[object] = [
            self.key,
            self.job_name,
            _pattern_to_wire(self.pattern),
            msgpack.packb(self.payload, use_bin_type=True),
            self.limit,
            self.start_after_ms,
            self.end_before_ms,
            self.fired,
        ]
        if self.missed_fires is not None:
            fields.append(_missed_fires_to_wire(self.missed_fires))
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        return packed

    @classmethod
    def decode(cls, data: bytes, retry: bytes | None = None) -> "RepeatSpec":
        """The spec in a hash's `spec` field, with the hash's `retry`.

        Raises RepeatSpecError. A cron expression is only read when a fire time is asked for:
        that is the first moment at which it matters that ours and its writer's may differ.
        """
        try:
            if retry is not None:
                decode_envelope(encode_envelope("", b"", 0, 0, retry))
            check_msgpack(data, _MAX_DEPTH)
            fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
            if not isinstance(fields, list) or len(fields) < 7:
                raise ValueError("expected an array of at least 7 elements")
            # Both were added later, and are left out by those who do not know them.
            fired = fields[7] if len(fields) > 7 else 0
            missed_fires = fields[8] if len(fields) > 8 else "Skip"
            return cls(
                key=_str("key", fields[0]),
                job_name=_str("job_name", fields[1]),
                pattern=_pattern_from_wire(fields[2]),
                payload=_payload_from_wire(fields[3]),
                limit=_uint_or_none("limit", fields[4]),
                start_after_ms=_uint_or_none("start_after_ms", fields[5]),
                end_before_ms=_uint_or_none("end_before_ms", fields[6]),
                fired=_uint("fired", fired),
                missed_fires=_missed_fires_from_wire(missed_fires),
                retry=retry,
            )
        except (ValueError, TypeError) as error:
            raise RepeatSpecError(f"not a repeat spec: {error}") from error

    def _next_ignoring_end(self, after_ms: int) -> int | None:
        after_ms = max(after_ms, self.start_after_ms or 0)
        following: int | None
        if self.pattern.interval_ms is not None:
            following = after_ms + self.pattern.interval_ms
        else:
            following = self._cron().next_after(after_ms)
        return following if following is not None and following <= MAX_FIRE_MS else None

    def _first_fire_past(self, now_ms: int, due_ms: int) -> int | None:
        """The first fire later than `now_ms`, in one step however long ago `due_ms` was."""
        interval = self.pattern.interval_ms
        if interval is not None:
            # The interval's steps since `due_ms`, not since now: it keeps its beat.
            now_ms = due_ms + (now_ms - due_ms) // interval * interval
        return self.next_fire_ms(now_ms)

    def _last_fire(self, due_ms: int, until_ms: int, after_ms: int) -> int:
        """Of the fires from `due_ms` on, the last one by `until_ms`; any other, where that is not
        later than `after_ms`. In a few steps however long ago `due_ms` was."""
        if self.end_before_ms is not None:
            until_ms = min(until_ms, self.end_before_ms)
        interval = self.pattern.interval_ms
        if interval is not None:
            return due_ms + (until_ms - due_ms) // interval * interval
        next_after = self._cron().next_after

        def is_last(second: int) -> bool:
            following = next_after(second * 1000)
            return following is None or following > until_ms

        # A cron expression fires on whole seconds.
        seconds = range(max(due_ms, after_ms) // 1000, until_ms // 1000)
        found = bisect_left(seconds, True, key=is_last)
        return (seconds.start + found) * 1000 if found else due_ms

    def _is_over(self, at_ms: int) -> bool:
        return self.end_before_ms is not None and at_ms > self.end_before_ms

    def _cron(self) -> Cron:
        assert self.pattern.expression is not None
        return _read_cron(self.pattern.expression, self.pattern.tz)


@dataclass(frozen=True, slots=True)
class FirePlan:
    """What a due spec does now, and when it is due again."""

    #: The moments that are fired for, oldest first.
    fire_times_ms: list[int]
    #: None: the spec is finished, and goes.
    next_ms: int | None

    def steps(self, most: int) -> Iterator["FirePlan"]:
        """The same in plans of at most `most` fires each, to be carried out in this order.

        Whoever stops between two steps leaves the spec due at the first fire that is owed.
        """
        times = self.fire_times_ms
        for start in range(0, max(len(times), 1), most):
            end = start + most
            yield FirePlan(times[start:end], times[end] if end < len(times) else self.next_ms)


def plan_fires(
    spec: RepeatSpec, due_ms: int, now_ms: int, fired: int, *, led_since_ms: int | None = None
) -> FirePlan:
    """What `spec` does at `now_ms`, due at `due_ms` (its score) and fired `fired` times so far.

    One fire that is due is fired, however late. Two or more are missed fires, and all of them go
    by the spec's policy: skipped; fired once, as of `due_ms`; or fired from the oldest on, up to
    `max_catchup` and MAX_FIRES_PER_PLAN, the others skipped. chasquimq does the same.
    To skip is for fires that came while no scheduler ran. So the last of them is fired if it came
    later than `led_since_ms`, when this scheduler began to lead: then it is the one that is late.
    Raises ValueError for a cron expression that cannot be read.
    """
    if due_ms > now_ms:
        return FirePlan([], due_ms)
    left = spec.limit - fired if spec.limit else MAX_FIRES_PER_PLAN + 1
    if left <= 0 or spec._is_over(due_ms):
        return FirePlan([], None)

    times = [due_ms]
    following = spec._next_ignoring_end(due_ms)
    is_missed = following is not None and following <= now_ms
    policy = spec.missed_fires
    if is_missed and policy is None:
        times = []
        if led_since_ms is not None and led_since_ms < now_ms:
            last = spec._last_fire(due_ms, now_ms, led_since_ms)
            times = [last] if last > led_since_ms else []
    elif is_missed and policy is not None and policy.max_catchup is not None:
        most = min(policy.max_catchup, left, MAX_FIRES_PER_PLAN)
        while len(times) < most:
            later = spec.next_fire_ms(times[-1])
            if later is None or later > now_ms:
                break
            times.append(later)
    next_ms = None if len(times) >= left else spec._first_fire_past(now_ms, due_ms)
    return FirePlan(times, next_ms)


def _check_key(key: str) -> str:
    if _BAD_IN_KEY.search(_str("key", key)):
        raise ValueError(f"key must hold no braces or control characters, got {shown(key)}")
    if len(check_text(key, "key").encode()) > _MAX_KEY_BYTES:
        raise ValueError(f"key takes more than {_MAX_KEY_BYTES} bytes of UTF-8")
    return key


def _derived_key(job_name: str, pattern: RepeatPattern) -> str:
    if pattern.kind == "every":
        return f"{job_name}::every:{pattern.interval_ms}"
    tz = "UTC" if pattern.tz is None else pattern.tz
    return f"{job_name}::cron:{pattern.expression}:{tz}"


# Specs are decoded each time they are due, and parsing costs more than the fire time itself.
@lru_cache(maxsize=1024)
def _read_cron(expression: str, tz: str | None) -> Cron:
    return Cron(expression, tz)


def _pattern_to_wire(pattern: RepeatPattern) -> dict[str, list[object]]:
    if pattern.kind == "every":
        return {"Every": [pattern.interval_ms]}
    return {"Cron": [pattern.expression, pattern.tz]}


def _pattern_from_wire(value: Any) -> RepeatPattern:
    match value:
        case {"Cron": [expression, tz, *_]}:
            return RepeatPattern("cron", expression, tz)
        case {"Every": [interval_ms, *_]}:
            return RepeatPattern("every", interval_ms=interval_ms)
    raise ValueError(f"unknown pattern {shown(value)}")


def _missed_fires_to_wire(policy: MissedFiresPolicy) -> object:
    return "FireOnce" if policy.kind == "fire-once" else {"FireAll": [policy.max_catchup]}


def _missed_fires_from_wire(value: Any) -> MissedFiresPolicy | None:
    match value:
        # A cap of nothing is how chasquimq would skip, too; we do not write it.
        case "Skip" | {"FireAll": [0, *_]}:
            return None
        case "FireOnce":
            return MissedFiresPolicy.fire_once()
        case {"FireAll": [max_catchup, *_]}:
            return MissedFiresPolicy.fire_all(max_catchup)
    raise ValueError(f"unknown missed_fires {shown(value)}")


def _payload_from_wire(value: Any) -> bytes:
    if isinstance(value, bytes):
        check_msgpack(value)
        if isinstance(payload := msgpack.unpackb(value), bytes):
            return payload
    raise ValueError("payload is not a bin that holds a bin")


def _str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")
    return value


def _uint(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_U64:
        raise ValueError(f"{name} must be a non-negative int, got {shown(value)}")
    return value


def _uint_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _uint(name, value)
