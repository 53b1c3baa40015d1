"""Writes, lists and removes repeat specs in Redis."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import floor
from typing import Any, TypeVar

from chasqui._core.reply import ReplyError
from chasqui.model import payload
from chasqui.model.config import check_limit
from chasqui.model.job import MissedFiresPolicy, RepeatableMeta, RepeatPattern
from chasqui.model.keys import RETRY, SPEC, Keys, check_job_name, check_text, shown
from chasqui.producing.job_options import BackoffLike, MissedFiresLike, RepeatLike, retry_of
from chasqui.producing.operations import QueueOperations
from chasqui.scripts import timing
from chasqui.timed.spec import MAX_FIRE_MS, RepeatSpec, RepeatSpecError
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import exception_for, time_us

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SPEC_FIELDS = {
    *("job_name", "pattern", "payload", "key"),
    *("limit", "start_after_ms", "end_before_ms", "missed_fires"),
}


def spec_of(
    name: str,
    data: object,
    *,
    repeat: RepeatLike,
    limit: int | None = None,
    start_after_ms: int | None = None,
    end_before_ms: int | None = None,
    attempts: int | None = None,
    backoff: BackoffLike | None = None,
    key: str | None = None,
    missed_fires: MissedFiresLike | None = None,
) -> RepeatSpec:
    """The spec that a caller describes, checked."""
    return RepeatSpec.make(
        key=_key(key),
        job_name=check_job_name(name),
        pattern=RepeatPattern.parse(repeat),
        payload=payload.encode(data),
        limit=limit,
        start_after_ms=start_after_ms,
        end_before_ms=end_before_ms,
        missed_fires=_policy(missed_fires),
        retry=retry_of(attempts, backoff),
    )


def from_dict(spec: Mapping[str, Any]) -> RepeatSpec:
    """The spec in the dict form that `Producer.upsert_repeatable` takes; its payload is encoded."""
    if not isinstance(spec, Mapping):
        raise TypeError(f"spec must be a dict, got {type(spec).__name__}")
    for name in spec:
        if name not in _SPEC_FIELDS:
            raise ValueError(f"unknown key {shown(name)} in spec")
    for name in ("job_name", "pattern", "payload"):
        if name not in spec:
            raise ValueError(f"spec.{name} is required")
    if type(spec["payload"]) is not bytes:
        raise TypeError(f"spec.payload must be bytes, got {type(spec['payload']).__name__}")
    return RepeatSpec.make(
        key=_key(spec.get("key")),
        job_name=check_job_name(spec["job_name"]),
        pattern=RepeatPattern.parse(spec["pattern"]),
        payload=spec["payload"],
        limit=spec.get("limit"),
        start_after_ms=spec.get("start_after_ms"),
        end_before_ms=spec.get("end_before_ms"),
        missed_fires=_policy(spec.get("missed_fires")),
    )


def _key(key: object) -> str:
    """An empty key means: make one of name and pattern."""
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a str, got {type(key).__name__}")
    return key or ""


def _policy(missed_fires: MissedFiresLike | None) -> MissedFiresPolicy | None:
    return None if missed_fires is None else MissedFiresPolicy.parse(missed_fires)


def to_dict(meta: RepeatableMeta) -> dict[str, Any]:
    """The dict form that `Producer.list_repeatable` gives."""
    return {
        "key": meta.key,
        "job_name": meta.job_name,
        "pattern": meta.pattern.to_dict(),
        "next_fire_ms": meta.next_fire_ms,
        "limit": meta.limit,
        "start_after_ms": meta.start_after_ms,
        "end_before_ms": meta.end_before_ms,
        "missed_fires": None if meta.missed_fires is None else meta.missed_fires.to_dict(),
    }


def upsert(operations: QueueOperations, spec: RepeatSpec) -> Plan[str]:
    """Write a spec and its first fire time, by the server's clock; returns the spec's key."""
    time = yield commands(("TIME",), effect=Effect.READ)
    first_ms = spec.first_fire_ms(time_us(time) // 1000)
    reply_key, retry = operations.encoder.reply_key(), spec.retry or b""
    yield timing.upsert_repeat(operations.keys, reply_key, spec.key, spec.encode(), retry, first_ms)
    return spec.key


def upsert_changed(operations: QueueOperations, spec: RepeatSpec) -> Plan[str]:
    """The same, unless it is there with the same content: then its next fire stays as it is.
    Writing it anew would put that off, and a spec that is written more often than it fires would
    never fire."""
    keys = operations.keys
    hash_key = keys.repeat_spec(spec.key)
    encoded, retry, score = yield commands(
        ("HGET", hash_key, SPEC),
        ("HGET", hash_key, RETRY),
        ("ZSCORE", keys.repeat, spec.key),
        effect=Effect.READ,
    )
    if encoded is not None and score is not None and (retry or None) == (spec.retry or None):
        try:
            known = RepeatSpec.decode(encoded, retry)
        except RepeatSpecError:
            known = None  # unreadable: write it anew
        if known is not None and replace(known, fired=0).encode() == spec.encode():
            return spec.key
    return (yield from upsert(operations, spec))


def listing(keys: Keys, limit: int) -> Plan[list[RepeatableMeta]]:
    """The specs that fire soonest. One that cannot be read is logged and left out."""
    limit = check_limit(limit)
    if limit == 0:
        return []
    reply = yield commands(("ZRANGE", keys.repeat, 0, limit - 1, "WITHSCORES"), effect=Effect.READ)
    scores = list(scored(reply))
    if not scores:
        return []
    names = [member.decode(errors="replace") for member, _ in scores]
    specs = yield commands(
        *(("HGET", keys.repeat_spec(name), SPEC) for name in names),
        effect=Effect.READ,
        raises=False,
    )
    found = []
    for name, (_, next_ms), encoded in zip(
        names, scores, specs if len(names) > 1 else [specs], strict=True
    ):
        if encoded is None:
            continue
        try:
            spec = RepeatSpec.decode(hash_of(encoded))
        except RepeatSpecError as error:
            fields = {"queue": keys.queue}
            logger.warning("repeat spec %r cannot be read: %s", name, error, extra=fields)
            continue
        found.append(
            RepeatableMeta(
                spec.key,
                spec.job_name,
                spec.pattern,
                next_ms,
                spec.limit,
                spec.start_after_ms,
                spec.end_before_ms,
                spec.missed_fires,
            )
        )
    return found


def remove(operations: QueueOperations, key: str) -> Plan[bool]:
    """Delete a spec; False if there was none."""
    check_text(key, "key")
    reply_key = operations.encoder.reply_key()
    reply = yield timing.remove_repeat(operations.keys, reply_key, key)
    return bool(reply)


def hash_of(reply: T | ReplyError) -> T:
    """What was read of a spec's hash; RepeatSpecError if its key is not a hash."""
    if isinstance(reply, ReplyError):
        if reply.code != "WRONGTYPE":  # about the server, not about this spec
            raise exception_for(reply)
        raise RepeatSpecError("its key holds no hash")
    return reply


def scored(reply: list[Any]) -> Iterator[tuple[bytes, int]]:
    """Members with their scores, in RESP3's pairs or RESP2's flat list.

    A score that is not a time becomes the nearest one that is.
    """
    if not reply or not isinstance(reply[0], list):
        pairs = iter(reply)
        reply = list(zip(pairs, pairs, strict=True))
    for member, score in reply:
        yield member, floor(max(-MAX_FIRE_MS, min(float(score), MAX_FIRE_MS)))
