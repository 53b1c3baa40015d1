"""A repeat spec: what a user may ask for, its bytes in Redis, and when it fires."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from chasqui._core.envelope import check_msgpack, decode_envelope, encode_envelope
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import check_text, shown
from chasqui.timed.cron import Cron

#: Fire times are scores, and a score is a double.
MAX_FIRE_MS: Final = 2**53

_MAX_KEY_BYTES: Final = 1024
_MAX_U64: Final = 2**64 - 1
# A spec nests three levels deep; future versions may use a few more.
_MAX_DEPTH: Final = 8
_BAD_IN_KEY = re.compile("[{}\x00-\x1f\x7f-\x9f\u2028\u2029]")


class RepeatSpecError(ValueError):
    """Bytes in Redis that are not a repeat spec, or one that this version cannot read."""


@dataclass(frozen=True, slots=True)
class RepeatSpec:
    """A job that fires again and again.

    `make` checks what a user asks for. `decode` also reads what other producers may write.
    """

    key: str
    job_name: str
    pattern: RepeatPattern
    #: The user's value, encoded.
    payload: bytes
    #: None: no limit. So is 0, which only other producers write.
    limit: int | None = None
    start_after_ms: int | None = None
    #: It may still fire at this time, and not later.
    end_before_ms: int | None = None
    #: The count when the spec was written; the current count is a field beside it in the hash.
    fired: int = 0
    #: None: missed fires are skipped.
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

        Raises ValueError with the field's name and what is wrong with it.
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
        spec.first_fire_ms(0)  # parses the cron expression: an error in it shows at any time
        return spec

    def first_fire_ms(self, now_ms: int) -> int:
        """The first fire of a spec written at `now_ms`; ValueError if it never fires."""
        first = self.next_ignoring_end(now_ms)
        if first is None:
            raise ValueError(f"repeat {self.pattern.to_dict()} has no fire that can be scheduled")
        if self.is_over(first):
            raise ValueError(
                f"end_before_ms {self.end_before_ms} is before the first fire, {first}"
            )
        return first

    def next_fire_ms(self, after_ms: int) -> int | None:
        """The first fire later than `after_ms`; None if there is none.

        An interval counts from `after_ms`, so that has to be a fire time itself.
        """
        following = self.next_ignoring_end(after_ms)
        if following is None or self.is_over(following):
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

        Raises RepeatSpecError. A cron expression is parsed only when a fire time is needed: its
        writer may accept expressions that we do not.
        """
        try:
            if retry is not None:
                decode_envelope(encode_envelope("", b"", 0, 0, retry))
            check_msgpack(data, _MAX_DEPTH)
            fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
            if not isinstance(fields, list) or len(fields) < 7:
                raise ValueError("expected an array of at least 7 elements")
            # Both were added later: older writers leave them out.
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

    def next_ignoring_end(self, after_ms: int) -> int | None:
        """As `next_fire_ms`, but past `end_before_ms` too."""
        after_ms = max(after_ms, self.start_after_ms or 0)
        following: int | None
        if self.pattern.interval_ms is not None:
            following = after_ms + self.pattern.interval_ms
        else:
            following = self.cron().next_after(after_ms)
        return following if following is not None and following <= MAX_FIRE_MS else None

    def is_over(self, at_ms: int) -> bool:
        return self.end_before_ms is not None and at_ms > self.end_before_ms

    def cron(self) -> Cron:
        assert self.pattern.expression is not None
        return _read_cron(self.pattern.expression, self.pattern.tz)


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


# Specs are decoded each time they are due, and parsing costs more than finding the next fire.
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
        # chasquimq treats a cap of 0 as skip; we never write that.
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
