"""What a producer does to a queue, as plans: checked, encoded and read back, without I/O.

`Producer`, `Queue` and their blocking twins run the same plans; a rule lives here once.
"""

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha_jobs
from chasqui._core.ulid import UlidFactory
from chasqui.errors import (
    NotSupportedError,
    OutcomeUnknownError,
    QueueFullError,
    ServerError,
)
from chasqui.keys import Keys
from chasqui.request import Effect, Plan, Request, commands

#: Jobs in one script: long enough to be cheap, short enough not to hold the server up.
CHUNK_JOBS: Final = 250
CHUNK_BYTES: Final = 1 << 20
#: Chunks that one bitmap keeps track of: a key of at most a kilobyte.
PAGE_BITS: Final = 8192
#: How long a chunk is remembered after the producer fell silent.
APPLIED_TTL_S: Final = 86_400
#: How long the answer to a chunk with options is kept for a repeat.
FLAGS_TTL_S: Final = 600
#: How long the id of an immediate job stays unique, unless the caller says otherwise.
UNIQUE_FOR_S: Final = 86_400

DELAYED, UNIQUE, RELATIVE = 1, 2, 4

#: One for the process: ids of all producers rise together.
ulids = UlidFactory()


@dataclass(slots=True)
class Batch:
    """Jobs to add, as columns. `kinds` and `dues` are None while no job has an option that needs
    them: then the whole batch goes the short way."""

    payloads: list[bytes]
    names: str | list[str]
    ids: list[str | None] | None = None
    retries: list[bytes | None] | None = None
    kinds: list[int] | None = None  # DELAYED + UNIQUE + RELATIVE, per job
    dues: list[int] | None = None  # ms; since 1970, or from now if RELATIVE


@dataclass(frozen=True, slots=True)
class Added:
    """The outcome of an add: per job its id, and whether it was new."""

    ids: list[str]
    created_at_ms: int
    #: None: all were.
    is_new: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class AddOptions:
    """What a call says about all its jobs."""

    max_backlog: int | None = None
    #: Wait until the add is on the server's disk ("disk") or on a replica ("replica").
    durable: Literal["disk", "replica"] | None = None
    unique_for_s: int = UNIQUE_FOR_S

    @property
    def is_plain(self) -> bool:
        """True where a job without options of its own may share a chunk with others."""
        return self.max_backlog is None and self.durable is None


PLAIN: Final = AddOptions()


class Plans:
    """The plans of one producer on one queue."""

    def __init__(self, keys: Keys, max_stream_len: int | None = None) -> None:
        self.keys = keys
        self.producer_id = str(uuid.uuid4())
        #: The most entries that the stream is trimmed to; empty for no trimming.
        self.maxlen: int | str = "" if max_stream_len is None else max_stream_len
        self._chunks = itertools.count()
        self._buffer: CommandBuffer | None = None
        self._durable: set[str] = set()

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    def add(self, batch: Batch, options: AddOptions = PLAIN) -> Plan[Added]:
        """Add a batch: each job once, however often the link drops on the way."""
        now_ms = time.time_ns() // 1_000_000
        if not batch.payloads:
            return Added([], now_ms)
        if batch.kinds is not None:
            _draw_delayed_ids(batch, now_ms)
        if options.durable is not None and options.durable not in self._durable:
            yield from self._probe_durable(options.durable)
        ids: list[str] = []
        chunks = list(_slices(batch.payloads))
        replies: list[Any] = []
        limit: int | None = None
        if options.max_backlog is not None:
            # The first chunk asks for room for the whole batch; the others follow if it got it.
            limit = options.max_backlog - len(batch.payloads) + chunks[0].stop
        if len(chunks) == 1 or limit is not None:
            part = chunks.pop(0)
            request = self.chunk(batch, part, options, now_ms, ids, limit)
            reply = yield request if chunks else _until_durable(request, options)
            if not chunks:
                reply = _check_durable(reply, options)
            if isinstance(reply, list):
                raise QueueFullError(self.keys.queue, reply[0], options.max_backlog or 0)
            replies.append(reply)
        if chunks:
            answers = yield (
                _until_durable(request, options) if part is chunks[-1] else request
                for part in chunks
                for request in (self.chunk(batch, part, options, now_ms, ids),)
            )
            _check_all(answers, had_some=bool(replies))
            answers[-1] = _check_durable(answers[-1], options)
            replies += answers
        if batch.kinds is None:
            return Added(ids, now_ms)
        return Added(ids, now_ms, [flag == 49 for reply in replies for flag in reply])

    def chunk(
        self,
        batch: Batch,
        part: slice,
        options: AddOptions,
        now_ms: int,
        ids: list[str],
        limit: int | None = None,
    ) -> Request:
        """One script call for one slice of the batch; appends the ids of its jobs.

        `limit` is the backlog beyond which the server refuses it.
        """
        keys, number = self.keys, next(self._chunks)
        buffer, self._buffer = self._buffer or CommandBuffer(), None
        full: int | str = "" if limit is None else limit
        payloads, names = batch.payloads, batch.names
        part_ids = None if batch.ids is None else batch.ids[part]
        retries = None if batch.retries is None else batch.retries[part]
        if part.stop - part.start != len(payloads):
            payloads = payloads[part]
            names = names if isinstance(names, str) else names[part]
        if batch.kinds is None:
            page, bit = divmod(number, PAGE_BITS)
            script, due_ms = scripts.ADD, None
            script_keys = [keys.stream, keys.applied(self.producer_id, page)]
            arguments: list[Any] = [bit, APPLIED_TTL_S, self.maxlen, full]
        else:
            assert batch.dues is not None
            assert part_ids is not None
            kinds, due_ms = batch.kinds[part], batch.dues[part]
            script = scripts.ADD_MIXED
            script_keys = [
                keys.stream,
                keys.delayed,
                keys.flags(self.producer_id, number),
                keys.wake,
                *_job_keys(keys, kinds, part_ids),
            ]
            text = "".join(map(str, kinds))
            arguments = [FLAGS_TTL_S, self.maxlen, full, options.unique_for_s, text]
        ids += evalsha_jobs(
            buffer,
            script.sha,
            script_keys,
            arguments,
            ulids,
            now_ms,
            payloads,
            names,
            part_ids,
            retries,
            due_ms,
        )
        request = Request(bytes(buffer), Effect.IDEMPOTENT, script=script)
        buffer.clear()
        self._buffer = buffer
        return request

    def _probe_durable(self, durable: str) -> Plan[None]:
        """Before the first durable add: can this server promise it at all?"""
        try:
            reply = yield commands(_durable_words(durable, 100), effect=Effect.READ)
        except ServerError as error:
            raise NotSupportedError(
                "durable='disk' needs WAITAOF (Redis and Valkey from 7.2 on) and a server that "
                f"writes an append-only file: {error}"
            ) from None
        if durable == "replica" and reply < 1:
            raise NotSupportedError("durable='replica' needs a replica, and none is in step")
        self._durable.add(durable)

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    def cancel(self, job_ids: Sequence[str]) -> Plan[list[bool]]:
        """Take delayed jobs back; per job whether there was one to take."""
        answers: list[bool] = []
        for start in range(0, len(job_ids), CHUNK_JOBS):
            part = job_ids[start : start + CHUNK_JOBS]
            names = [self.keys.delayed]
            for job_id in part:
                names += (self.keys.didx(job_id), self.keys.dlid(job_id))
            # Not idempotent in its answer: a repeat after a lost reply would say "was not there".
            reply = yield scripts.call(scripts.CANCEL, names, [], Effect.ONCE)
            answers += [flag == 49 for flag in reply]
        return answers

    def reschedule(self, job_id: str, due_ms: int, *, is_relative: bool) -> Plan[bool]:
        """Give a delayed job another due time; False if it is no longer delayed."""
        keys = self.keys
        names = [keys.delayed, keys.didx(job_id), keys.dlid(job_id), keys.wake]
        arguments = [due_ms, int(is_relative)]
        reply = yield scripts.call(scripts.RESCHEDULE, names, arguments, Effect.IDEMPOTENT)
        return bool(reply)

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def results(self, job_ids: Sequence[str]) -> Plan[list[bytes | None]]:
        """The stored return values, encoded; None where there is none."""
        if not job_ids:
            return []
        values: list[bytes | None] = yield commands(
            ("MGET", *map(self.keys.result, job_ids)), effect=Effect.READ
        )
        return values

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    def counts(self, group: str) -> Plan[list[int]]:
        """Length, pending, delayed, dlq, repeatables, lag in ms, paused: one round trip."""
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

    def obliterate(self) -> Plan[int]:
        """Delete every key of the queue; how many there were."""
        cursor, deleted = b"0", 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self.keys.pattern, "COUNT", 1000)
            cursor, found = yield commands(scan, effect=Effect.READ)
            if found:
                deleted += yield commands(("UNLINK", *found), effect=Effect.IDEMPOTENT)
            if cursor == b"0":
                return deleted


def _draw_delayed_ids(batch: Batch, now_ms: int) -> None:
    """Ids of delayed jobs are part of their keys, so they must be known before the frame."""
    assert batch.kinds is not None
    ids = batch.ids if batch.ids is not None else [None] * len(batch.payloads)
    batch.ids = [
        ulids.next(now_ms) if job_id is None and kind & DELAYED else job_id
        for job_id, kind in zip(ids, batch.kinds, strict=True)
    ]


def _job_keys(keys: Keys, kinds: list[int], ids: list[str | None]) -> Iterator[bytes]:
    """The keys of each job's own, in the order in which the script takes them."""
    for kind, job_id in zip(kinds, ids, strict=True):
        if kind & DELAYED:
            assert job_id is not None
            yield keys.didx(job_id)
        if kind & UNIQUE:
            assert job_id is not None
            yield keys.unique(job_id)
            yield keys.dlid(job_id)


def _slices(payloads: list[bytes]) -> Iterator[slice]:
    """Cut a batch where a chunk would get too long."""
    total = len(payloads)
    if total <= CHUNK_JOBS and sum(map(len, payloads)) <= CHUNK_BYTES:
        yield slice(0, total)
        return
    start = size = 0
    for i, payload in enumerate(payloads):
        if i > start and (i - start == CHUNK_JOBS or size + len(payload) > CHUNK_BYTES):
            yield slice(start, i)
            start, size = i, 0
        size += len(payload)
    yield slice(start, total)


def _check_all(replies: list[Any], *, had_some: bool) -> None:
    """Raise what went wrong with a batch of several chunks.

    If the server refused all of them, nothing was added and its refusal is raised. Otherwise some
    may be in, and the caller must be told so.
    """
    failures = [reply for reply in replies if isinstance(reply, BaseException)]
    if not failures:
        return
    first = failures[0]
    if not isinstance(first, Exception):
        raise first
    was_refused = all(not isinstance(failure, OutcomeUnknownError) for failure in failures)
    if was_refused and len(failures) == len(replies) and not had_some:
        raise first
    raise OutcomeUnknownError(
        f"{len(failures)} of {len(replies)} chunks of the batch failed ({first}): "
        "some of its jobs may have been added"
    ) from first


#: How long the disk or the replica may take to confirm.
_DURABLE_WAIT_MS: Final = 10_000


def _durable_words(durable: str, wait_ms: int) -> tuple[str | int, ...]:
    return ("WAITAOF", 1, 0, wait_ms) if durable == "disk" else ("WAIT", 1, wait_ms)


def _until_durable(request: Request, options: AddOptions) -> Request:
    """The request with the wait behind it, in one frame: it waits for what this link wrote, so
    both must go over the same one. A chunk that is found applied writes too, for that reason."""
    if options.durable is not None:
        wait = commands(_durable_words(options.durable, _DURABLE_WAIT_MS), effect=Effect.READ)
        request.frame += wait.frame
        request.count += 1
        request.timeout_s = _DURABLE_WAIT_MS / 1000 + 10
    return request


def _check_durable(reply: Any, options: AddOptions) -> Any:
    """The chunk's own reply; OutcomeUnknownError if the wait behind it was in vain."""
    if options.durable is None:
        return reply
    chunk_reply, answer = reply
    confirmed = answer[0] if options.durable == "disk" else answer
    if not isinstance(chunk_reply, list) and confirmed < 1:
        raise OutcomeUnknownError(
            f"the jobs were added, but no {options.durable} confirmed them within "
            f"{_DURABLE_WAIT_MS} ms"
        )
    return chunk_reply
