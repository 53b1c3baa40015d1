"""The scripts that look after a queue: counts, waiting and dead jobs, the length of its logs."""

from collections.abc import Sequence
from typing import Final

from chasqui._core.entry import Entry
from chasqui.model.keys import TRACEPARENT, Keys
from chasqui.scripts.loading import REPLY_TTL_S, call, load, or_empty
from chasqui.transport.request import Effect, Request

COUNTS: Final = load("counts")
DELETE_DEAD: Final = load("delete_dead")
DRAIN: Final = load("drain")
READER: Final = load("reader")
REPLAY: Final = load("replay")
TRIM: Final = load("trim")

#: A reader of a log that is dead for this long is forgotten.
FORGET_MS: Final = 7 * 86_400_000


def counts(keys: Keys, group: str) -> Request:
    """The reply is a list of ints: stream length, pending, delayed, dead, repeatable jobs, ms that
    the oldest entry has been in the stream, 1 if the queue is paused."""
    names = [keys.stream, keys.delayed, keys.dlq, keys.repeat, keys.paused]
    return call(COUNTS, names, [group], Effect.READ)


def purge(keys: Keys, entries: Sequence[Entry]) -> Request:
    """Delete entries that wait in the stream, and free their jobs' ids. The reply has a byte per
    entry, `1` deleted or `0` gone or handed to a worker."""
    names = [keys.stream]
    for entry in entries:
        names += (keys.unique(entry.job_id), keys.dlid(entry.job_id))
    return call(DRAIN, names, [entry.id for entry in entries], Effect.IDEMPOTENT)


def replay(keys: Keys, reply_key: bytes, entries: Sequence[Entry], max_len: int | None) -> Request:
    """Move dead jobs back into the stream. The reply is how many were moved."""
    names = [keys.dlq, keys.stream, reply_key, *(keys.result(entry.job_id) for entry in entries)]
    arguments: list[bytes | str | int] = [or_empty(max_len), REPLY_TTL_S]
    for entry in entries:
        trace = (entry.extra or {}).get(TRACEPARENT, b"")
        arguments += (entry.id, entry.with_attempt(0), entry.name, trace)
    return call(REPLAY, names, arguments, Effect.IDEMPOTENT)


def delete_dead(keys: Keys, entries: Sequence[Entry]) -> Request:
    """Delete dead jobs, and free their ids. The reply is how many were deleted."""
    names, arguments = [keys.dlq, keys.unique("")], list[bytes | int]()
    for entry in entries:
        names += (keys.unique(entry.job_id), keys.dlid(entry.job_id))
        arguments += (entry.id, entry.created_at_ms if entry.fault is None else b"")
    return call(DELETE_DEAD, names, arguments, Effect.IDEMPOTENT)


def trim(log: bytes, config: bytes, name: str, default: int) -> Request:
    """Drop a log's oldest entries, as the queue's settings and the log's readers allow; `default`
    is how many entries stay if the settings do not say. The reply means nothing."""
    return call(TRIM, [log, config], [name, default], Effect.IDEMPOTENT)


def keep_for_reader(
    config: bytes,
    log: str,
    reader: str,
    *,
    position: str,
    ordinal: int | None,
    lease_ms: int,
    hold: int,
) -> Request:
    """Say that a log's reader is alive for `lease_ms`, and has read up to `position`. The reply is
    1 if the reader was known."""
    arguments: list[str | int] = [log, FORGET_MS, reader, lease_ms, hold, position]
    arguments.append("-" if ordinal is None else ordinal)
    return call(READER, [config], arguments, Effect.IDEMPOTENT)


def forget_reader(config: bytes, log: str, reader: str) -> Request:
    """Forget a log's reader. The reply is 1 if the reader was known."""
    return call(READER, [config], [log, FORGET_MS, reader], Effect.IDEMPOTENT)
