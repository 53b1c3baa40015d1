"""Repeat specs in Redis: written, listed, removed; repeat.py knows when they fire."""

import logging
from collections.abc import Iterator, Mapping
from math import floor
from typing import Any

from chasqui import payload, scripts
from chasqui._core.reply import ReplyError
from chasqui.adding import ANSWER_TTL_S
from chasqui.producing.job_options import BackoffLike, MissedFiresLike, RepeatLike, retry_of
from chasqui.model.job import MissedFiresPolicy, RepeatableMeta, RepeatPattern
from chasqui.model.keys import SPEC, Keys, check_job_name, check_text, shown
from chasqui.plans import Plans, check_limit
from chasqui.timed.spec import MAX_FIRE_MS, RepeatSpec, RepeatSpecError
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import exception_for

logger = logging.getLogger(__name__)

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
    """Empty stands for a key made of name and pattern."""
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


def upsert(plans: Plans, spec: RepeatSpec) -> Plan[str]:
    """Write a spec and its first fire, by the server's clock; its key."""
    keys = plans.keys
    seconds, micros = yield commands(("TIME",), effect=Effect.READ)
    first_ms = spec.first_fire_ms(int(seconds) * 1000 + int(micros) // 1000)
    yield scripts.call(
        scripts.UPSERT_REPEAT,
        [keys.repeat, keys.repeat_spec(spec.key), plans.numbering.answer_key()],
        [first_ms, spec.key, spec.encode(), spec.retry or b"", ANSWER_TTL_S],
        Effect.IDEMPOTENT,
    )
    return spec.key


def listing(keys: Keys, limit: int) -> Plan[list[RepeatableMeta]]:
    """The specs that fire soonest. One that cannot be read is reported and left out."""
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
            if isinstance(encoded, ReplyError):
                if encoded.code != "WRONGTYPE":  # about the server, not about this spec
                    raise exception_for(encoded)
                raise RepeatSpecError("its key holds no hash")
            spec = RepeatSpec.decode(encoded)
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


def remove(plans: Plans, key: str) -> Plan[bool]:
    """Forget a spec; False if there was none."""
    keys = plans.keys
    check_text(key, "key")
    reply = yield scripts.call(
        scripts.REMOVE_REPEAT,
        [keys.repeat, keys.repeat_spec(key), plans.numbering.answer_key()],
        [key, ANSWER_TTL_S],
        Effect.IDEMPOTENT,
    )
    return bool(reply)


def scored(reply: list[Any]) -> Iterator[tuple[bytes, int]]:
    """Members with their scores, in RESP3's pairs or RESP2's flat list.

    A score that is no time at all is as far away as one can be, on its side.
    """
    if not reply or not isinstance(reply[0], list):
        pairs = iter(reply)
        reply = list(zip(pairs, pairs, strict=True))
    for member, score in reply:
        yield member, floor(max(-MAX_FIRE_MS, min(float(score), MAX_FIRE_MS)))
