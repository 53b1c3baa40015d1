"""The same answers the slow way: from plain replies, and from what msgpack decodes."""

from itertools import chain
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from chasqui._core.entry import Entry
from chasqui._core.envelope import Envelope, EnvelopeError, check_msgpack, decode_envelope

#: The reply or envelope must be refused.
MISSHAPEN: Final = "misshapen"
#: This decoder cannot tell.
UNKNOWN: Final = "unknown"

_NO_ENVELOPE = "missing or non-bytes payload field"
_MAX_DEPTH = 128


class Parts(NamedTuple):
    """What an envelope says."""

    id: str
    payload: bytes
    created_at_ms: int
    attempt: int
    retry: Any


# ── Entries ──────────────────────────────────────────────────────────────────────────────────────


def from_entries(reply: Any) -> Any:
    """What an EntryBuilder gave, in plain objects that can be compared."""
    if type(reply) is tuple:
        cursor, entries, deleted = reply
        return cursor, [_from_entry(entry) for entry in entries], deleted
    if type(reply) is list:
        return [_from_entry(entry) for entry in reply]
    return reply


def _from_entry(entry: Any) -> Any:
    if type(entry) is not Entry:
        return entry
    parts = None
    if entry.fault is None:
        parts = Parts(entry.job_id, entry.payload, entry.created_at_ms, entry.attempt, entry.retry)
    elif entry.job_id or entry.attempt:
        raise ValueError(f"{entry!r} was not decoded and has parts")
    told = (entry.id, entry.envelope, entry.name, entry.extra, entry.fault, entry.detail)
    return *told, entry.idle_ms, entry.deliveries, repr(parts)


def entries(shape: str, reply: Any, limit: int) -> Any:
    """What an EntryBuilder must give for this plain reply."""
    try:
        if shape == "streams" and type(reply) is dict:
            return _streams(list(reply.items()), limit)
        if type(reply) is not list:
            return reply
        if shape == "streams":
            return _streams(reply, limit)
        return _entries(reply, limit)
    except _MisshapenError:
        return MISSHAPEN


class _MisshapenError(Exception):
    pass


def _need(is_so: bool) -> None:
    if not is_so:
        raise _MisshapenError


def _streams(reply: list[Any], limit: int) -> list[Any]:
    found = []
    for stream in reply:
        _need(type(stream) in (list, tuple) and len(stream) == 2 and type(stream[0]) is bytes)
        found += _entries(stream[1], limit)
    return found


def _entries(reply: Any, limit: int) -> list[Any]:
    _need(type(reply) is list)
    return [None if entry is None else _entry(entry, limit) for entry in reply]


def _entry(reply: Any, limit: int) -> tuple[Any, ...]:
    _need(type(reply) is list and len(reply) in (2, 4) and type(reply[0]) is bytes)
    id, fields, idle_ms, deliveries = [*reply, 0, 0][:4]
    _need(type(idle_ms) is int and type(deliveries) is int)
    if fields is None:
        return id, None, "", None, "gone", None, idle_ms, deliveries, "None"
    _need(type(fields) is list and len(fields) % 2 == 0)
    _need(all(type(field) is bytes for field in fields))
    envelope, name, extra, parts = None, "", {}, None
    fault: str | None = "malformed"
    detail: str | None = _NO_ENVELOPE
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        if field == b"d" and envelope is None:
            envelope = value
        elif field == b"n":
            name = value.decode("utf-8", "replace")
        else:
            extra[field] = value
    if envelope is not None:
        fault = detail = None
        if len(envelope) > limit:
            fault = "oversize_payload"
        else:
            try:
                parts = parts_of(envelope)
            except EnvelopeError as error:
                fault, detail = "decode_failed", str(error)
    return id, envelope, name, extra or None, fault, detail, idle_ms, deliveries, repr(parts)


# ── Envelopes ────────────────────────────────────────────────────────────────────────────────────


def parts(envelope: Envelope) -> Parts:
    """The parts of a decoded envelope."""
    return Parts(
        envelope.id, envelope.payload, envelope.created_at_ms, envelope.attempt, envelope.retry
    )


def parts_of(data: bytes) -> Parts:
    return parts(decode_envelope(data))


# ── Payloads ─────────────────────────────────────────────────────────────────────────────────────


def payload(data: bytes) -> Any:
    """What a payload says by msgpack, or MISSHAPEN."""
    try:
        check_msgpack(data, _MAX_DEPTH)
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except ValueError:
        return MISSHAPEN


def packed(value: Any) -> Any:
    """The value as msgpack writes it."""
    return msgpack.packb(value, use_bin_type=True)


class _Ext(NamedTuple):
    """Unlike msgpack's, of any code."""

    code: int
    data: bytes


class _Pairs(list[Any]):
    """A map, without hashing its keys."""


def envelope(data: bytes) -> Parts | str:
    """What msgpack makes of an envelope: its parts, MISSHAPEN or UNKNOWN.

    On the way, `check_msgpack` is held against msgpack too.
    """
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            object_pairs_hook=_Pairs,
            unicode_errors="surrogateescape",
            ext_hook=_Ext,
        )
    except (ValueError, RecursionError) as error:
        # msgpack reads ext type -1 as a time and refuses what is none; we look at no ext.
        is_time = any(word in str(error).lower() for word in ("timestamp", "nanoseconds"))
        if not is_time and _is_msgpack(data):
            raise AssertionError(f"check_msgpack accepts what msgpack refuses: {error!r}") from None
        return UNKNOWN if is_time or isinstance(error, msgpack.StackError) else MISSHAPEN
    depth, has_ext = _survey(value)
    if _is_msgpack(data) != (depth <= _MAX_DEPTH and not has_ext):
        raise AssertionError(f"check_msgpack is wrong: {depth} levels, ext: {has_ext}")
    try:
        return _parts_of_value(value)
    except _MisshapenError:
        return MISSHAPEN


def _is_msgpack(data: bytes) -> bool:
    try:
        check_msgpack(data)
    except EnvelopeError:
        return False
    return True


def _survey(value: Any) -> tuple[int, bool]:
    """How deep it is nested, and whether there is an ext type in it."""
    deepest, has_ext, level = 0, False, [value]
    while True:
        has_ext = has_ext or any(isinstance(item, _Ext | msgpack.Timestamp) for item in level)
        containers = [item for item in level if isinstance(item, list)]
        if not containers:
            return deepest, has_ext
        deepest += 1
        level = []
        for items in containers:
            level += chain.from_iterable(items) if type(items) is _Pairs else items


def _parts_of_value(value: Any) -> Parts:
    _need(type(value) is list and len(value) >= 4)
    id, payload, created_at_ms, attempt, *more = value
    _need(_is_text(id) and type(payload) is bytes)
    _need(_is_uint(created_at_ms) and _is_uint(attempt, 32))
    _check_ignored(more[1:])
    return Parts(id, payload, created_at_ms, attempt, _retry(more[0]) if more else None)


def _retry(value: Any) -> Any:
    if value is None:
        return None
    _need(type(value) is list)
    _check_ignored(value[2:])
    max_attempts, backoff = [*value[:2], None, None][:2]
    _need(max_attempts is None or _is_uint(max_attempts, 32))
    if backoff is not None:
        _need(type(backoff) is list and len(backoff) >= 2)
        _check_ignored(backoff[5:])
        kind, delay_ms, max_delay_ms, multiplier, jitter_ms = [*backoff, None, None, None][:5]
        _need(_is_text(kind) and _is_uint(delay_ms))
        _need(all(number is None or _is_uint(number) for number in (max_delay_ms, jitter_ms)))
        if multiplier is not None:
            _need(type(multiplier) is float or _is_uint(multiplier))
            multiplier = float(multiplier)
        backoff = kind, delay_ms, max_delay_ms, multiplier, jitter_ms
    return None if max_attempts is None and backoff is None else (max_attempts, backoff)


def _check_ignored(values: list[Any]) -> None:
    _need(all(_survey(value)[0] <= _MAX_DEPTH for value in values))


def _is_text(value: Any) -> bool:
    return type(value) is str and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_uint(value: Any, bits: int = 64) -> bool:
    return type(value) is int and 0 <= value < 1 << bits
