"""What a producer does to a queue, as plans: encoded and read back, without I/O.

`Queue` awaits them, `sync.Queue` runs them; a rule lives here once.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chasqui import payload, scripts
from chasqui.adding import (
    ANSWER_TTL_S,
    CHUNK_JOBS,
    MAX_COUNT,
    PLAIN,
    Added,
    AddOptions,
    Batch,
    Numbering,
    check_all,
    confirmed,
    durable_words,
    until_durable,
)
from chasqui.errors import NotSupportedError, QueueFullError, ServerError
from chasqui.job import Job
from chasqui.keys import Keys
from chasqui.request import Effect, Plan, Request, commands
from chasqui.server import warn_if_early


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
                f"max_stream_len must be a positive int or None, got {max_stream_len!r}"
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
        batch.draw_delayed_ids(now_ms)
        if options.durable is not None and options.durable not in self._durable:
            yield from self._probe_durable(options.durable)
        chunk = self.numbering.chunk
        ids: list[str] = []
        replies: list[Any] = []
        parts = list(batch.slices())
        limit: int | None = None
        if options.max_backlog is not None and batch.immediate():
            # The first chunk asks for room for the whole batch; the others follow if it got it.
            limit = options.max_backlog - batch.immediate() + batch.immediate(parts[0])
            if len(parts) > 1:
                reply = yield chunk(batch, parts.pop(0), options, now_ms, ids, limit)
                replies.append(self._unless_full(reply, options))
                limit = None
        # Alone, when all others are in: what it waits for is on disk then with all before it.
        last = parts.pop() if options.durable is not None or limit is not None else None
        jobs: list[Job] = []

        def chunks() -> Iterator[Request]:
            for part in parts:
                yield chunk(batch, part, options, now_ms, ids)
            if last is None:
                jobs.extend(batch.jobs(ids, now_ms))  # while the server works on them

        if parts:
            try:
                answers = yield chunks()
            except Exception as error:
                answers = [error]
            check_all(answers, had_some=bool(replies))
            replies += answers
        if last is not None:
            request = chunk(batch, last, options, now_ms, ids, limit)
            try:
                answer = yield until_durable(request, options)
                replies.append(self._unless_full(confirmed(answer, options), options))
            except Exception as error:
                check_all([error], had_some=bool(replies))
        jobs = jobs or batch.jobs(ids, now_ms)
        if batch.kinds is not None:
            flags = (flag for reply in replies for flag in reply)
            for job, flag in zip(jobs, flags, strict=bool(jobs)):
                job.is_new = flag == ord("1")
        return Added(ids, now_ms, jobs)

    def _unless_full(self, reply: Any, options: AddOptions) -> Any:
        """A chunk's reply, if the queue had room for it."""
        if isinstance(reply, list):
            raise QueueFullError(self.keys.queue, reply[0], options.max_backlog or 0)
        return reply

    def _probe_durable(self, durable: str) -> Plan[None]:
        """Before the first durable add: can this server promise it at all?"""
        try:
            reply = yield commands(durable_words(durable, 100), effect=Effect.READ)
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
        names += [keys.trace(job_id), keys.traces]
        arguments = [due_ms, int(is_relative)]
        reply = yield scripts.call(scripts.RESCHEDULE, names, arguments, Effect.IDEMPOTENT)
        return bool(reply)

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def stored_results(self, job_ids: Iterable[str]) -> Plan[list[bytes | None]]:
        """The stored return values, encoded; None where there is none."""
        job_ids = check_ids(job_ids)
        if not job_ids:
            return []
        values: list[bytes | None] = yield commands(
            ("MGET", *map(self.keys.result, job_ids)), effect=Effect.READ
        )
        return values

    def results(self, job_ids: Iterable[str]) -> Plan[list[Any]]:
        """The same, decoded."""
        values = yield from self.stored_results(job_ids)
        return [None if value is None else payload.decode(value) for value in values]

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    def counts(self, group: str) -> Plan[list[int]]:
        """What `Counts.of` takes: one round trip."""
        keys = self.keys
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


class ResultWait:
    """How a stored result is waited for."""

    def __init__(self, job_id: str, timeout_s: float, poll_interval_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout_s}")
        if not poll_interval_s > 0:
            raise ValueError(
                f"poll_interval must be a positive number of seconds, got {poll_interval_s}"
            )
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._poll_interval_s = poll_interval_s
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


def check_ids(job_ids: Iterable[str]) -> list[str]:
    """Ids of jobs that exist: any text will do, since chasquimq takes any."""
    if isinstance(job_ids, str):
        raise TypeError("job_ids must be a list of ids, got a single str")
    ids = list(job_ids)
    for i, job_id in enumerate(ids):
        if not isinstance(job_id, str):
            raise TypeError(f"job_ids[{i}] must be a str, got {type(job_id).__name__}")
    return ids


def check_limit(limit: object) -> int:
    """How many to list or move at most."""
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, got {type(limit).__name__}")
    if limit < 0:
        raise ValueError(f"limit must be non-negative, got {limit}")
    return min(limit, MAX_COUNT)
