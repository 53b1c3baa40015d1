"""Doors of the scripts about entries in a consumer's hands, and about its place in the group.

Each function makes the request that runs one script; its docstring says what the reply means. All
but `join`, `leave` and `sweep` fail with NOGROUP if the group is gone.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha, xackdel
from chasqui._core.payload import pack
from chasqui._core.reply import Builder
from chasqui.model.keys import Keys
from chasqui.scripts.loading import call, load
from chasqui.transport.request import Effect, Request, Script

ACK: Final = load("ack", "owned")
BURY: Final = load("bury", "owned")
COMPLETE: Final = load("complete", "owned")
JOIN: Final = load("join")
LEAVE: Final = load("leave")
RECLAIM: Final = load("reclaim")
RECOVER: Final = load("recover")
RELEASE: Final = load("release", "owned")
RENEW: Final = load("renew", "owned")
RETRY: Final = load("retry", "owned")
SWEEP: Final = load("sweep")

#: What `complete`, `retry` and `bury` answer for an entry, a character each.
NOT_OURS: Final = ord("0")
SETTLED: Final = ord("1")
#: Acknowledged, but the result could not be stored.
NOT_STORED: Final = ord("2")
#: What XACKDEL answers for an entry that was not pending.
NOT_PENDING: Final = -1
ANY_SIZE: Final = 1 << 40

#: What the event and the history say of a completed job: its id, ts, name, attempt, duration_us,
#: created, and its envelope where the history is kept; or nothing.
Facts: TypeAlias = tuple[Any, ...]
#: A job that goes to the delayed set: entry id, job id, delay in ms, the member of the set, and the
#: trace context that waits beside it, or nothing.
Retry: TypeAlias = tuple[bytes, str, int, bytes, bytes]
#: A run that returned: entry id, key of the result if there is one, the result, and its facts.
Completion: TypeAlias = tuple[bytes, bytes | None, bytes, Facts]


class Consumer(NamedTuple):
    """Who holds entries: one consumer of the group of a queue."""

    keys: Keys
    group: str
    name: str


class Burial(NamedTuple):
    """A job that goes to the DLQ."""

    entry_id: bytes
    #: Fields and values of its entry there, the envelope first.
    fields: Sequence[bytes | str | int]
    #: The same for its event and for the history. As text: scripts cannot unpack bytes.
    event: Sequence[str]
    history: Sequence[str]


# ── Entries that are settled ────────────────────────────────────────────────────────────────────


def ack(
    consumer: Consumer, ids: list[bytes], events: bytes, *, has_xackdel: bool, timeout_s: float
) -> Request:
    """Acknowledge and delete entries that are certainly ours, and write `events`: an encoded XADD
    for each, or nothing.

    The first reply is that of XACKDEL, a number for each entry, or of the script where the server
    has no XACKDEL: how many were acknowledged. With events it is the first of a list, and errors
    are in the list.
    """
    buffer, script = CommandBuffer(), None
    if has_xackdel:
        xackdel(buffer, consumer.keys.stream, consumer.group.encode(), ids)
    else:
        script = ACK
        evalsha(buffer, script.sha, [consumer.keys.stream], [consumer.group, *ids])
    return Request(
        bytes(buffer) + events,
        Effect.IDEMPOTENT,
        count=1 + (len(ids) if events else 0),
        script=script,
        raises=not events,
        timeout_s=timeout_s,
    )


def complete(
    consumer: Consumer,
    completions: Iterable[Completion],
    *,
    result_ttl_ms: int,
    events: bool,
    history: bool,
) -> Request:
    """Acknowledge entries that are still the consumer's, and store their results. All of them have
    results, or none. `events` and `history`: whether to write the event and the history of each.

    Replies with SETTLED, NOT_STORED or NOT_OURS for each.
    """
    keys = consumer.keys
    names = [keys.stream]
    arguments: list[Any] = [consumer.group, consumer.name, result_ttl_ms]
    arguments += (keys.events if events else b"", keys.history if history else b"")
    for entry_id, key, result, facts in completions:
        if key is not None:
            names.append(key)
        arguments += (entry_id, result, *facts)
    return call(COMPLETE, names, arguments, Effect.IDEMPOTENT)


def retry(consumer: Consumer, retries: Iterable[Retry]) -> Request:
    """Move entries that are still the consumer's to the delayed set, each due after its delay.

    Replies with SETTLED or NOT_OURS for each.
    """
    keys = consumer.keys
    names = [keys.stream, keys.delayed, keys.wake, keys.traces]
    arguments: list[Any] = [consumer.group, consumer.name]
    for entry_id, job_id, delay_ms, member, trace in retries:
        names.append(keys.didx(job_id))
        if trace:
            names.append(keys.trace(job_id))
        arguments += (entry_id, delay_ms, member, trace)
    return call(RETRY, names, arguments, Effect.IDEMPOTENT)


def bury(
    consumer: Consumer,
    burials: Sequence[Burial],
    *,
    max_len: int | None = None,
    events: bool = False,
    history: bool = False,
) -> Request:
    """Move entries that are still the consumer's to the DLQ, which then keeps about `max_len`.
    `events` and `history`: whether to write the event and the history of each.

    Replies with SETTLED or NOT_OURS for each.
    """
    keys = consumer.keys
    arguments: list[Any] = [consumer.group, consumer.name, "" if max_len is None else max_len]
    told = [burial.event for burial in burials] if events else []
    kept = [burial.history for burial in burials] if history else []
    arguments += (keys.events if events else b"", pack(told, ANY_SIZE))
    arguments += (keys.history if history else b"", pack(kept, ANY_SIZE))
    for burial in burials:
        arguments += (burial.entry_id, len(burial.fields), *burial.fields)
    return call(BURY, [keys.stream, keys.dlq], arguments, Effect.IDEMPOTENT)


# ── Entries that are kept, taken or given back ──────────────────────────────────────────────────


def renew(consumer: Consumer, ids: Sequence[bytes], timeout_s: float | None = None) -> Request:
    """Begin the leases of entries anew. Replies with the ids that are not the consumer's."""
    return _about(consumer, RENEW, *ids, timeout_s=timeout_s)


def reclaim(
    consumer: Consumer, idle_ms: int, most: int, standing: Sequence[bytes], builder: Builder
) -> Request:
    """Take over up to `most` entries that were idle for `idle_ms`, and those `standing` whose idle
    time does not grow. Replies with the entries; it has an effect each time that it is sent."""
    keys, group, name = consumer
    arguments: list[bytes | str | int] = [group, name, idle_ms, most, *standing]
    return call(RECLAIM, [keys.stream], arguments, Effect.ONCE, builder=builder)


def recover(
    consumer: Consumer, in_hand: Sequence[bytes], most: int, builder: Builder, *, counts: bool
) -> Request:
    """Find up to `most` entries that are the consumer's and not `in_hand`. `counts` makes it one
    more delivery: their holder died, and not only a reply was lost. Replies with the entries."""
    return _about(consumer, RECOVER, "1" if counts else "", most, *in_hand, builder=builder)


def release(
    consumer: Consumer, freed: Sequence[bytes], kept: Sequence[bytes], *, wake: bool
) -> Request:
    """Give back every entry that is the consumer's, except those `kept`. `freed` were in hand:
    those among them that are pending for nobody go back too. `wake` ends the reads of others that
    wait with CLAIM. Replies with how many went back."""
    return _about(consumer, RELEASE, "1" if wake else "", len(freed), *freed, *kept)


# ── The group ───────────────────────────────────────────────────────────────────────────────────


def join(consumer: Consumer) -> Request:
    """Make the group if the stream has none, and the consumer if it has a name. Replies with 1 if
    the group was made, 0 if it was there, or the name of the other group that the stream has."""
    return _about(consumer, JOIN)


def leave(consumer: Consumer) -> Request:
    """Delete the consumer, unless it holds entries. Replies with 1 if it is gone, else 0."""
    return _about(consumer, LEAVE)


def sweep(keys: Keys, silence_ms: int, most: int) -> Request:
    """Delete up to `most` consumers that hold nothing and were silent for so long. Replies with how
    many."""
    return call(SWEEP, [keys.stream, keys.paused], [silence_ms, most], Effect.IDEMPOTENT)


def _about(
    consumer: Consumer,
    script: Script,
    *arguments: bytes | str | int,
    **options: Any,
) -> Request:
    """The request of a script that takes the stream, the group and the consumer's name first."""
    owned = (consumer.group, consumer.name, *arguments)
    return call(script, [consumer.keys.stream], owned, Effect.IDEMPOTENT, **options)
