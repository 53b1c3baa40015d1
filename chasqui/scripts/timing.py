"""Doors to the scripts of timed work: promotion, repeat specs and the leader lock."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from chasqui.model.keys import Keys
from chasqui.scripts.loading import REPLY_TTL_S, call, load, or_empty
from chasqui.transport.request import Effect, Request

FIRE: Final = load("fire")
LEASE_RELEASE: Final = load("lease_release")
LEASE_TAKE: Final = load("lease_take")
PROMOTE: Final = load("promote", "envelope")
REMOVE_REPEAT: Final = load("remove_repeat")
UPSERT_REPEAT: Final = load("upsert_repeat")


@dataclass(frozen=True, slots=True)
class Promoted:
    """What one promotion did and found."""

    count: int
    #: Members that were not jobs; they are in the DLQ now.
    malformed: int
    #: Jobs that are still delayed.
    depth: int
    #: How long the first of them has been due.
    lag_ms: int
    #: How long until it is due, by the server's clock; None if there is none.
    next_due_s: float | None
    #: Its score; None if there is none.
    first: bytes | None = field(default=None, compare=False)
    #: The server's time.
    now_ms: int = field(default=0, compare=False)
    #: For each promoted job: its id, its name, and when it was created (unix ms) unless its id
    #: shows it.
    jobs: list[tuple[bytes, bytes, bytes | None]] = field(default_factory=list, repr=False)

    @classmethod
    def parse(cls, reply: list[Any]) -> "Promoted":
        now_ms, depth, lag_ms, wait_us, first, malformed, own = reply[:7]
        created = dict(zip(own[::2], own[1::2], strict=True))
        ids, names = reply[7::2], reply[8::2]
        jobs = [(ids[i], names[i], created.get(i)) for i in range(len(ids))]
        next_due_s = None if wait_us < 0 else wait_us / 1e6
        return cls(len(ids), malformed, depth, lag_ms, next_due_s, first or None, now_ms, jobs)


def promote(keys: Keys, most: int, max_stream_len: int | None) -> Request:
    """Move up to `most` due jobs into the stream; the reply is for `Promoted.parse`.

    A repeated call moves what is due then; no job is moved twice.
    """
    names = [keys.delayed, keys.stream, keys.dlq, keys.traces, keys.didx("")]
    return call(PROMOTE, names, [most, or_empty(max_stream_len)], Effect.IDEMPOTENT)


class SpecFires(NamedTuple):
    """What one repeat spec fires in one call."""

    #: The spec's member of the repeat set.
    member: bytes
    #: The score that these fires were computed from; at any other score nothing is fired.
    due_ms: int
    #: None: the spec is finished and is deleted.
    next_ms: int | None
    job_name: str
    #: Fire times with the envelopes of their jobs.
    fires: list[tuple[int, bytes]]


class FireReply(NamedTuple):
    """What a call of `fire` did."""

    #: The server's time.
    now_ms: int
    fires: int
    #: Specs that were no longer due at their score: nothing was done about those.
    stale: int


def fire(keys: Keys, specs: Iterable[SpecFires], max_stream_len: int | None) -> Request:
    """Fire repeat specs in this order and set their next times; replies `FireReply`'s fields."""
    names = [keys.stream, keys.delayed, keys.repeat, keys.wake]
    arguments: list[Any] = [or_empty(max_stream_len)]
    for member, due_ms, next_ms, job_name, fires in specs:
        names.append(keys.repeat_spec(member.decode(errors="replace")))
        arguments += (member, due_ms, or_empty(next_ms), job_name, len(fires))
        for one in fires:
            arguments += one
    return call(FIRE, names, arguments, Effect.IDEMPOTENT)


def take_lock(lock: bytes, holder: str, ttl_s: int, *, timeout_s: float | None = None) -> Request:
    """Take a lock if it is free, renew it if it is the holder's; replies -1 if it is the holder's
    now, else the ms until it may be free."""
    return call(LEASE_TAKE, [lock], [holder, ttl_s], Effect.IDEMPOTENT, timeout_s=timeout_s)


def release_lock(lock: bytes, freed: bytes, holder: str) -> Request:
    """Free a lock if it is the holder's, and push onto the list `freed`; replies 1 if it was."""
    return call(LEASE_RELEASE, [lock, freed], [holder], Effect.IDEMPOTENT)


def upsert_repeat(
    keys: Keys, reply_key: bytes, spec_key: str, spec: bytes, retry: bytes, first_ms: int
) -> Request:
    """Write a repeat spec and its first fire time. A repeated call finds the key `reply_key` and
    changes nothing."""
    names = [keys.repeat, keys.repeat_spec(spec_key), reply_key]
    return call(
        UPSERT_REPEAT, names, [first_ms, spec_key, spec, retry, REPLY_TTL_S], Effect.IDEMPOTENT
    )


def remove_repeat(keys: Keys, reply_key: bytes, spec_key: str) -> Request:
    """Delete a repeat spec; replies 1 if there was one, also to a repeated call."""
    names = [keys.repeat, keys.repeat_spec(spec_key), reply_key]
    return call(REMOVE_REPEAT, names, [spec_key, REPLY_TTL_S], Effect.IDEMPOTENT)
