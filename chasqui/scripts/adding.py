"""The scripts that add jobs, and those that take back or move what was added for later."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from chasqui.model.keys import Keys
from chasqui.scripts.loading import REPLY_TTL_S, call, load, or_empty
from chasqui.transport.request import Effect, Request, Script

ADD: Final = load("add")
ADD_MIXED: Final = load("add_mixed")
CANCEL: Final = load("cancel")
RESCHEDULE: Final = load("reschedule")

#: How long a chunk is remembered after the last one of its page.
APPLIED_TTL_S: Final = 3600
#: How long the id of an immediate job stays unique, unless the caller says otherwise.
UNIQUE_FOR_S: Final = 86_400
#: Turns flags as bytes into their digits.
_DIGITS: Final = bytes(range(ord("0"), ord("8"))).ljust(256)

#: A script, its keys, and those of its arguments that come before the jobs. The compiled encoder
#: appends the jobs: it makes the frame of a chunk in one pass.
ChunkCall: TypeAlias = tuple[Script, list[bytes], list[Any]]


def add(
    keys: list[bytes], bit: int, max_len: int | None, max_backlog: int | None, name: str | None
) -> ChunkCall:
    """Add plain jobs. `keys` are the stream and the bitmap of the chunk's page; `name` is that of
    all jobs, or None if each has its own.

    The reply is 1, 0 if the chunk was in already, or `[depth]` if the queue is full.
    """
    arguments: list[Any] = [
        bit,
        APPLIED_TTL_S,
        or_empty(max_len),
        or_empty(max_backlog),
    ]
    arguments += (0,) if name is None else (1, name)
    return ADD, keys, arguments


def add_mixed(
    keys: Keys,
    reply_key: bytes,
    flags: list[int],
    ids: list[str | None],
    *,
    trace: str,
    created_at_ms: int,
    max_len: int | None,
    max_backlog: int | None,
    unique_for_s: int | None,
) -> ChunkCall:
    """Add jobs with delays or ids of their own.

    The reply has a byte per job, `1` added or `0` an earlier job has its id; or it is `[depth]` if
    the queue is full.
    """
    names = [keys.stream, keys.delayed, reply_key, keys.wake, *([keys.traces] if trace else ())]
    names += keys.of_jobs(flags, ids, is_traced=bool(trace))
    arguments = [
        REPLY_TTL_S,
        or_empty(max_len),
        or_empty(max_backlog),
        unique_for_s or UNIQUE_FOR_S,
        unique_for_s or 0,
        bytes(flags).translate(_DIGITS),
        trace,
        created_at_ms,
    ]
    return ADD_MIXED, names, arguments


def cancel(keys: Keys, reply_key: bytes, job_ids: Sequence[str]) -> Request:
    """Take delayed jobs back. The reply has a byte per job, `1` cancelled or `0` not delayed."""
    names = [keys.delayed, reply_key]
    for job_id in job_ids:
        names += (keys.didx(job_id), keys.dlid(job_id), keys.trace(job_id))
    return call(CANCEL, names, [REPLY_TTL_S], Effect.IDEMPOTENT)


def reschedule(
    keys: Keys, reply_key: bytes, job_id: str, due_ms: int, *, is_relative: bool
) -> Request:
    """Give a delayed job another due time. The reply is 1, or 0 if it is no longer delayed."""
    names = [keys.delayed, keys.didx(job_id), keys.dlid(job_id), keys.wake]
    names += [keys.trace(job_id), keys.traces, reply_key]
    arguments = [due_ms, int(is_relative), REPLY_TTL_S]
    return call(RESCHEDULE, names, arguments, Effect.IDEMPOTENT)
