"""What a producer does to a queue, as plans: encoded and read back, without I/O.

`Queue` awaits them, `sync.Queue` runs them; a rule lives here once.
"""

import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from chasqui import payload, scripts
from chasqui.adding import (
    ANSWER_TTL_S,
    CHUNK_JOBS,
    PLAIN,
    Added,
    AddOptions,
    Batch,
    Durable,
    Numbering,
    check_all,
)
from chasqui.model.config import MAX_COUNT
from chasqui.producing.durable import confirmed, wait_words
from chasqui.errors import (
    NotSupportedError,
    PayloadError,
    PayloadTooLargeError,
    QueueFullError,
    ServerError,
)
from chasqui.model.keys import Keys, check_text, shown
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import warn_if_early

#: Results that one command asks for: a server takes a million words, and is held up by fewer.
MGET_KEYS: Final = 5000
#: A result is looked for as often as this, whatever a caller says; no sleep takes any number.
MAX_POLL_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How much of everything a queue holds, at one moment."""

    waiting: int
    pending: int
    delayed: int
    dlq: int
    repeatables: int
    #: How long the oldest job has been in the stream, waiting or running; 0 if there is none.
    oldest_ms: int
    is_paused: bool

    @classmethod
    def of(cls, numbers: list[int]) -> "Counts":
        """The counts in what the plan gives."""
        length, pending, delayed, dead, repeats, oldest_ms, paused = numbers
        # An entry that somebody deleted is pending for ever, but no longer in the stream.
        waiting = max(0, length - pending)
        return cls(waiting, pending, delayed, dead, repeats, oldest_ms, bool(paused))

    def refuse_if_any(self, queue: str) -> None:
        """Raise if the queue holds jobs."""
        if self.waiting or self.pending or self.delayed or self.dlq:
            raise NotSupportedError(
                f"queue {queue!r} holds {self.waiting} waiting, {self.pending} pending, "
                f"{self.delayed} delayed and {self.dlq} dead jobs: "
                "obliterate(force=True) deletes them too"
            )


class Plans:
    """The plans of one producer on one queue. Any thread may make them."""

    def __init__(self, keys: Keys, max_stream_len: int | None = None) -> None:
        if max_stream_len is not None and (
            isinstance(max_stream_len, bool)
            or not isinstance(max_stream_len, int)
            or not 1 <= max_stream_len <= MAX_COUNT
        ):
            raise ValueError(
                f"max_stream_len must be a positive int or None, got {shown(max_stream_len)}"
            )
        self.keys = keys
        #: The most entries that the stream is trimmed to; empty for no trimming.
        self.maxlen: int | str = "" if max_stream_len is None else max_stream_len
        self.numbering = Numbering(keys, self.maxlen)
        self._durable: set[str] = set()

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    def add(self, batch: Batch, options: AddOptions = PLAIN) -> Plan[Added]:
        """Add a batch: each job once, however often the link drops on the way."""
        now_ms = time.time_ns() // 1_000_000
        if not batch.payloads:
            return Added([], now_ms, [])
        if options.durable is not None:
            return (yield from self._add_durably(batch, options, options.durable, now_ms))
        if batch.kinds is not None:
            batch.draw_delayed_ids(now_ms, batch.kinds)
        chunk = self.numbering.chunk
        added = Added([], now_ms, [])
        replies: list[Any] = []
        parts = batch.slices()
        limit = _first_limit(batch, parts, options)
        if limit is not None and len(parts) > 1:
            first = chunk(batch, parts.pop(0), options, now_ms, added.ids, limit)
            replies.append(self._unless_full((yield first), options))
            limit = None
        had_some = bool(replies)

        def chunks() -> Iterator[Request]:
            for part in parts:
                yield chunk(batch, part, options, now_ms, added.ids, limit)
            added.jobs = batch.jobs(added.ids, now_ms)  # while the server works on them

        try:
            replies += yield chunks()
        except Exception as error:
            replies.append(error)
        check_all(replies, had_some=had_some)
        return self._added(batch, options, added, replies)

    def _add_durably(
        self, batch: Batch, options: AddOptions, durable: Durable, now_ms: int
    ) -> Plan[Added]:
        """The same, and wait for the disk or a replica."""
        if durable not in self._durable:
            yield from self._probe_durable(durable)
        ids = batch.draw_ids(now_ms)
        parts = batch.slices()
        numbers = [self.numbering.number() for _ in parts]
        limit = _first_limit(batch, parts, options)

        def make(i: int, limit: int | None = None) -> Request:
            return self.numbering.chunk(batch, parts[i], options, now_ms, [], limit, numbers[i])

        had_some = limit is not None and len(parts) > 1
        if had_some:
            self._unless_full((yield make(0, limit)), options)
            limit = None
        chunks = [partial(make, i, limit) for i in range(len(parts))]
        mark = self.numbering.mark(batch, numbers[-1])
        replies = yield from confirmed(chunks, mark, durable)
        check_all(replies, had_some=had_some)
        return self._added(batch, options, Added(ids, now_ms, []), replies)

    def _added(self, batch: Batch, options: AddOptions, added: Added, replies: list[Any]) -> Added:
        """What an add came to, by the replies to its chunks."""
        for reply in replies:
            self._unless_full(reply, options)
        if not added.jobs:
            added.jobs = batch.jobs(added.ids, added.created_at_ms)
        if batch.kinds is not None:
            flags = b"".join(replies)
            if not added.jobs:
                added.taken = flags.count(b"0")
            elif flags != b"1" * len(added.jobs):  # as they are made, all are new
                for job, flag in zip(added.jobs, flags, strict=True):
                    job.is_new = flag == ord("1")
        return added

    def _unless_full(self, reply: Any, options: AddOptions) -> Any:
        """A chunk's reply, if the queue had room for it."""
        if isinstance(reply, list):
            raise QueueFullError(self.keys.queue, reply[0], options.max_backlog or 0)
        return reply

    def _probe_durable(self, durable: Durable) -> Plan[None]:
        """Before the first durable add: can this server promise it at all?"""
        try:
            reply = yield commands(wait_words(durable, 100), effect=Effect.READ)
        except ServerError as error:
            raise NotSupportedError(
                "durable='disk' needs WAITAOF (Redis and Valkey from 7.2 on) and a server that "
                f"writes an append-only file: {error}"
            ) from None
        if durable == "replica" and reply < 1:
            raise NotSupportedError("durable='replica' needs a replica, and none is in step")
        if durable == "disk":
            warn_if_early((yield commands(("HELLO",), effect=Effect.READ, raises=False)))
        self._durable.add(durable)

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    def cancel(self, job_ids: Iterable[str]) -> Plan[list[bool]]:
        """Take delayed jobs back; per job whether there was one to take."""
        job_ids = check_ids(job_ids)
        parts = [job_ids[i : i + CHUNK_JOBS] for i in range(0, len(job_ids), CHUNK_JOBS)]
        if not parts:
            return []
        replies = yield [
            scripts.call(
                scripts.CANCEL,
                [self.keys.delayed, self.numbering.answer_key(), *self._delayed_keys(part)],
                [ANSWER_TTL_S],
                Effect.IDEMPOTENT,
            )
            for part in parts
        ]
        check_all(replies, had_some=False)
        return [flag == 49 for reply in replies for flag in reply]

    def _delayed_keys(self, job_ids: Sequence[str]) -> list[bytes]:
        keys = self.keys
        names = (keys.didx, keys.dlid, keys.trace)
        return [name(one) for one in job_ids for name in names]

    def reschedule(self, job_id: str, due_ms: int, *, is_relative: bool) -> Plan[bool]:
        """Give a delayed job another due time; False if it is no longer delayed."""
        check_ids([job_id])
        keys = self.keys
        names = [keys.delayed, keys.didx(job_id), keys.dlid(job_id), keys.wake]
        names += [keys.trace(job_id), keys.traces, self.numbering.answer_key()]
        arguments = [due_ms, int(is_relative), ANSWER_TTL_S]
        reply = yield scripts.call(scripts.RESCHEDULE, names, arguments, Effect.IDEMPOTENT)
        return bool(reply)

    def free_job_id(self, job_id: str) -> Plan[bool]:
        """Let an id be used again, whatever became of the job that took it; False if it was free.

        Should the reply be lost on the way, it is freed and the answer is False.
        """
        check_ids([job_id])
        markers = (self.keys.unique(job_id), self.keys.dlid(job_id))
        reply = yield commands(("DEL", *markers), effect=Effect.IDEMPOTENT)
        return bool(reply)

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def stored_results(self, job_ids: Iterable[str]) -> Plan[list[bytes | None]]:
        """The stored return values, encoded; None where there is none."""
        return (yield from self._stored(check_ids(job_ids)))

    def results(self, job_ids: Iterable[str]) -> Plan[list[Any]]:
        """The same, decoded."""
        job_ids = check_ids(job_ids)
        values = yield from self._stored(job_ids)
        return list(map(_decoded, job_ids, values))

    def _stored(self, job_ids: list[str]) -> Plan[list[bytes | None]]:
        if not job_ids:
            return []
        parts = (job_ids[i : i + MGET_KEYS] for i in range(0, len(job_ids), MGET_KEYS))
        replies: list[Any] = yield (
            commands(("MGET", *map(self.keys.result, part)), effect=Effect.READ) for part in parts
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [value for reply in replies for value in reply]

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    def counts(self, group: str) -> Plan[list[int]]:
        """What `Counts.of` takes: one round trip."""
        keys = self.keys
        check_text(group, "group")
        names = [keys.stream, keys.delayed, keys.dlq, keys.repeat, keys.paused]
        numbers: list[int] = yield scripts.call(scripts.COUNTS, names, [group], Effect.READ)
        return numbers

    def pause(self) -> Plan[None]:
        yield commands(("SET", self.keys.paused, "1"), effect=Effect.IDEMPOTENT)

    def resume(self) -> Plan[None]:
        yield commands(("DEL", self.keys.paused), effect=Effect.IDEMPOTENT)

    def is_paused(self) -> Plan[bool]:
        reply = yield commands(("EXISTS", self.keys.paused), effect=Effect.READ)
        return bool(reply)

    def obliterate(self, group: str, *, force: bool = True) -> Plan[int]:
        """Delete every key of the queue; how many there were. Without `force` only if it holds no
        jobs."""
        check_flag("force", force)
        if not force:
            Counts.of((yield from self.counts(group))).refuse_if_any(self.keys.queue)
        cursor, deleted = b"0", 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self.keys.pattern, "COUNT", 1000)
            cursor, found = yield commands(scan, effect=Effect.READ)
            if found:
                deleted += yield commands(("UNLINK", *found), effect=Effect.IDEMPOTENT)
            if cursor == b"0":
                return deleted


def _decoded(job_id: str, value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return payload.decode(value)
    except PayloadTooLargeError as error:
        what = f"the stored result of job {job_id}"
        raise PayloadTooLargeError(error.size, error.limit, what) from None
    except PayloadError as error:
        raise PayloadError(f"the stored result of job {job_id} cannot be read: {error}") from None


def _first_limit(batch: Batch, parts: list[slice], options: AddOptions) -> int | None:
    """The backlog beyond which the first chunk is refused, so that there is room for all; the
    others follow if it got it."""
    if options.max_backlog is None or not batch.immediate():
        return None
    return options.max_backlog - batch.immediate() + batch.immediate(parts[0])


class ResultWait:
    """How a stored result is waited for."""

    def __init__(
        self,
        job_id: str,
        timeout_s: float | None,
        poll_interval_s: float,
        since_ms: int | None = None,
    ) -> None:
        check_ids([job_id])
        if since_ms is not None and (
            isinstance(since_ms, bool) or not isinstance(since_ms, int) or since_ms < 0
        ):
            raise ValueError(f"since_ms must be a non-negative int or None, got {shown(since_ms)}")
        self._job_id = job_id
        self._timeout_s = math.inf if timeout_s is None else _seconds("timeout", timeout_s)
        self._poll_interval_s = min(_seconds("poll_interval", poll_interval_s), MAX_POLL_S)
        self._started_s = time.monotonic()
        self._has_warned = False

    def next_s(self, *, warns: bool = True) -> float:
        """How long to sleep before the next look; TimeoutError if that was the last."""
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._timeout_s:
            raise TimeoutError(f"job {self._job_id} has no result after {self._timeout_s:g} s")
        if waited_s > 1 and warns and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "wait_for_result has been waiting for more than 1 s: does the worker have "
                "store_results=True, and does its handler return something?",
                RuntimeWarning,
                stacklevel=4,
            )
        return min(self._poll_interval_s, self._timeout_s - waited_s)


def _seconds(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{what} must be a positive number of seconds, got {shown(value)}")
    return float(min(value, sys.maxsize))  # which is for ever


def check_ids(job_ids: Iterable[str]) -> list[str]:
    """Ids of jobs that exist: any text will do, since chasquimq takes any."""
    if isinstance(job_ids, str | Mapping) or not isinstance(job_ids, Iterable):
        raise TypeError(f"job_ids must be a list of ids, got {type(job_ids).__name__}")
    return [check_text(job_id, f"job_ids[{i}]") for i, job_id in enumerate(job_ids)]


def check_flag(what: str, value: object) -> None:
    """What is not said plainly must not delete anything."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be a bool, got {type(value).__name__}")


def check_limit(limit: object) -> int:
    """How many to list or move at most."""
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, got {type(limit).__name__}")
    if limit < 0:
        raise ValueError(f"limit must be non-negative, got {shown(limit)}")
    return min(limit, MAX_COUNT)
