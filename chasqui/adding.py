"""How jobs leave a producer: as numbered chunks, each applied once however often it is sent.

A chunk that is sent again after a lost reply is known by its number, so a retry never doubles a job
and a caller is told what the first arrival did. Nothing is sent from here.
"""

import itertools
import math
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import cut, evalsha_jobs, shared
from chasqui._core.options import DELAYED, RELATIVE, draw_delayed_ids
from chasqui._core.ulid import UlidFactory
from chasqui.model.config import MAX_COUNT
from chasqui.errors import OutcomeUnknownError
from chasqui.model.job import Job, ResultSource, job_slots
from chasqui.model.keys import Keys, shown
from chasqui.transport.request import Effect, Request, commands

OnFull: TypeAlias = Literal["raise", "wait"]
Durable: TypeAlias = Literal["disk", "replica"]

#: A chunk's: who made it, and its number among his.
Number: TypeAlias = tuple[str, int]

#: Jobs in one script: long enough to be cheap, short enough not to hold the server up.
CHUNK_JOBS: Final = 250
CHUNK_BYTES: Final = 1 << 20
#: A buffer that has grown beyond this, for a payload of its own chunk, is not kept.
BUFFER_BYTES: Final = 4 * CHUNK_BYTES
#: Chunks that one bitmap keeps track of: a key of at most a kilobyte.
PAGE_BITS: Final = 8192
#: How long a chunk is remembered after the last one of its page.
APPLIED_TTL_S: Final = 3600
#: How long the answer to a call is kept for a repeat of it; a key each, so not for longer.
ANSWER_TTL_S: Final = 600
#: Nothing is sent again after this, so no repeat can come after its answer was forgotten.
MAX_REQUEST_TIMEOUT_S: Final = ANSWER_TTL_S / 2
#: How long the id of an immediate job stays unique, unless the caller says otherwise.
UNIQUE_FOR_S: Final = 86_400
_MAX_UNIQUE_FOR_S: Final = 10 * 365 * 86_400
#: What turns kinds as bytes into their digits.
_DIGITS: Final = bytes(range(ord("0"), ord("8"))).ljust(256)

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
    data: list[Any] | None = None  # what the payloads were made of: callers change their lists
    trace: str = ""  # the context of all of them; needs `kinds` and `dues`
    owner: ResultSource | None = None  # where the jobs that an add returns can be waited for

    def jobs(self, ids: list[str], created_at_ms: int) -> list[Job]:
        """The jobs that an add returns, in order; none where nobody said what they are made of."""
        if self.data is None:
            return []
        return job_slots.make(
            len(ids), ids, self.names, self.data, 0, created_at_ms, True, self.owner, None
        )

    def draw_ids(self, now_ms: int) -> list[str]:
        """The ids of all its jobs, from now on for good."""
        given = self.ids or [None] * len(self.payloads)
        ids = [ulids.next(now_ms) if one is None else one for one in given]
        self.ids = list(ids)
        return ids

    def draw_delayed_ids(self, now_ms: int, kinds: list[int]) -> None:
        """Ids of delayed jobs are part of their keys, so they must be known before the frame."""
        ids: list[str | None] = self.ids or [None] * len(self.payloads)
        self.ids = draw_delayed_ids(ulids, now_ms, kinds, ids)

    def slices(self, most_jobs: int = CHUNK_JOBS) -> list[slice]:
        """The batch cut into chunks."""
        return cut(self.payloads, most_jobs, CHUNK_BYTES)

    @property
    def is_chunk(self) -> bool:
        """Whether all of it goes into one chunk."""
        return len(self.payloads) <= CHUNK_JOBS and len(self.slices()) == 1

    def immediate(self, part: slice | None = None) -> int:
        """How many of its jobs go straight into the stream; by our clock, where one decides."""
        part = part or slice(0, len(self.payloads))
        if self.kinds is None:
            return int(part.stop - part.start)
        assert self.dues is not None
        now_ms = time.time_ns() // 1_000_000
        return sum(
            not kind & DELAYED or (not kind & RELATIVE and due_ms <= now_ms)
            for kind, due_ms in zip(self.kinds[part], self.dues[part], strict=True)
        )


@dataclass(slots=True)  # not frozen: one is made for each add, and to freeze takes as long again
class Added:
    """The outcome of an add: per job its id, and the job itself if the batch had data.

    If it had none, `taken` is how many of the ids earlier jobs have."""

    ids: list[str]
    created_at_ms: int
    jobs: list[Job]
    taken: int = 0


@dataclass(frozen=True, slots=True)
class AddOptions:
    """What a call says about all its jobs."""

    max_backlog: int | None = None
    #: Wait until the add is on the server's disk or on a replica.
    durable: Durable | None = None
    #: None: UNIQUE_FOR_S, and for a delayed job an hour past its due time.
    unique_for_s: int | None = None


PLAIN: Final = AddOptions()


@dataclass(frozen=True, slots=True)
class AddSettings:
    """What a queue says about all its adds."""

    max_backlog: int | None = None
    on_full: OnFull = "raise"
    durable: Durable | bool = False

    def __post_init__(self) -> None:
        limit = self.max_backlog
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_COUNT
        ):
            raise ValueError(f"max_backlog must be a positive int or None, got {shown(limit)}")
        if self.on_full not in ("raise", "wait"):
            raise ValueError(f"on_full must be 'raise' or 'wait', got {shown(self.on_full)}")
        if not isinstance(self.durable, bool) and self.durable not in ("disk", "replica"):
            raise ValueError(
                f"durable must be a bool, 'disk' or 'replica', got {shown(self.durable)}"
            )

    def options(self, unique_for: float | None) -> AddOptions:
        """The same as options of one call."""
        if unique_for is None:
            if self.max_backlog is None and self.durable is False:
                return PLAIN
            unique_for_s = None
        else:
            if isinstance(unique_for, bool) or not isinstance(unique_for, int | float):
                raise TypeError(f"unique_for must be seconds, got {type(unique_for).__name__}")
            if not 1 <= unique_for <= _MAX_UNIQUE_FOR_S:
                raise ValueError(
                    f"unique_for must be from 1 to {_MAX_UNIQUE_FOR_S} seconds, "
                    f"got {shown(unique_for)}"
                )
            unique_for_s = math.ceil(unique_for)
        durable: Durable | None = "disk" if self.durable is True else self.durable or None
        return AddOptions(self.max_backlog, durable, unique_for_s)

    def check_fits(self, batch: Batch) -> None:
        """Refuse to wait for room that can never be."""
        limit = self.max_backlog
        if limit is not None and self.on_full == "wait" and batch.immediate() > limit:
            raise ValueError(
                f"{batch.immediate()} jobs at once never fit into max_backlog={self.max_backlog}"
            )


def full_waits_s() -> Iterator[float]:
    """How long to wait each time that a queue was found full."""
    wait_s = 0.02
    while True:
        yield wait_s
        wait_s = min(wait_s * 2, 0.5)


def check_request_timeout(value: float) -> float:
    """How long a request may take: not so long that the server forgets it was here before."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"request_timeout_s must be seconds, got {type(value).__name__}")
    if not 0 < value <= MAX_REQUEST_TIMEOUT_S:
        raise ValueError(
            f"request_timeout_s must be above 0 and at most {MAX_REQUEST_TIMEOUT_S:g}, "
            f"got {shown(value)}"
        )
    return value


class Numbering:
    """What one producer sends to one queue, numbered and encoded. Any thread may call it.

    A forked child is a producer of its own: with its parent's numbers it would be taken for a
    repeat, and its jobs for added ones.
    """

    def __init__(self, keys: Keys, maxlen: int | str) -> None:
        self._keys = keys
        self._maxlen = maxlen
        #: Of each process its id and its numbers.
        self._own: dict[int, tuple[str, itertools.count[int]]] = {}
        #: The page of the last plain chunk, with the keys of it.
        self._page: tuple[tuple[str, int], list[bytes]] | None = None
        # Buffers that nobody uses right now: a working one is not among them.
        self._buffers: list[CommandBuffer] = []

    @property
    def producer_id(self) -> str:
        return self._identity()[0]

    def number(self) -> Number:
        """The number of a chunk that is to be made more than once."""
        producer_id, numbers = self._identity()
        return producer_id, next(numbers)

    def mark(self, batch: Batch, of: Number) -> Request:
        """Asks whether the batch's chunk of this number is in: the reply is 1 if it is."""
        keys, (producer_id, number) = self._keys, of
        if batch.kinds is None:
            page, bit = divmod(number, PAGE_BITS)
            return commands(("GETBIT", keys.applied(producer_id, page), bit), effect=Effect.READ)
        return commands(("EXISTS", keys.flags(producer_id, number)), effect=Effect.READ)

    def answer_key(self) -> bytes:
        """Where the answer to one call is kept for its repeats."""
        return self._keys.flags(*self.number())

    def chunk(
        self,
        batch: Batch,
        part: slice,
        options: AddOptions,
        now_ms: int,
        ids: list[str],
        limit: int | None = None,
        of: Number | None = None,
    ) -> Request:
        """One script call for one slice of the batch; appends the ids of its jobs.

        `limit` is the backlog beyond which the server refuses it. With the number `of` an earlier
        one it is that one once more, if all ids were drawn before.
        """
        payloads, names, part_ids, retries = batch.payloads, batch.names, batch.ids, batch.retries
        kinds, due_ms = batch.kinds, batch.dues
        if part.stop - part.start != len(payloads):
            payloads = payloads[part]
            names = names if isinstance(names, str) else names[part]
            part_ids = None if part_ids is None else part_ids[part]
            retries = None if retries is None else retries[part]
            kinds = None if kinds is None else kinds[part]
            due_ms = None if due_ms is None else due_ms[part]
        producer_id, number = of or self.number()
        full: int | str = "" if limit is None else limit
        own_names: str | list[str] | None = names
        if kinds is None:
            script, due_ms = scripts.ADD, None
            script_keys = self._page_keys(producer_id, number // PAGE_BITS)
            bit = number % PAGE_BITS
            name = names if isinstance(names, str) else shared(names)
            if name is not None:
                # Once for all of them: with names of their own the server takes 7 % longer.
                arguments: list[Any] = [bit, APPLIED_TTL_S, self._maxlen, full, 1, name]
                own_names = None
            else:
                arguments = [bit, APPLIED_TTL_S, self._maxlen, full, 0]
        else:
            keys = self._keys
            assert due_ms is not None
            assert part_ids is not None
            script = scripts.ADD_MIXED
            script_keys = [
                keys.stream,
                keys.delayed,
                keys.flags(producer_id, number),
                keys.wake,
                *([keys.traces] if batch.trace else ()),
                *keys.of_jobs(kinds, part_ids, is_traced=bool(batch.trace)),
            ]
            arguments = [
                ANSWER_TTL_S,
                self._maxlen,
                full,
                options.unique_for_s or UNIQUE_FOR_S,
                options.unique_for_s or 0,
                bytes(kinds).translate(_DIGITS),
                batch.trace,
                now_ms,
            ]
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = CommandBuffer()
        ids += evalsha_jobs(
            buffer,
            script.sha,
            script_keys,
            arguments,
            ulids,
            now_ms,
            payloads,
            own_names,
            part_ids,
            retries,
            due_ms,
        )
        request = Request(bytes(buffer), Effect.IDEMPOTENT, script=script)
        if buffer.capacity <= BUFFER_BYTES:
            buffer.clear()
            self._buffers.append(buffer)
        return request

    def _page_keys(self, producer_id: str, page: int) -> list[bytes]:
        """The keys of a plain chunk, the same for all of a page."""
        last, asked = self._page, (producer_id, page)
        if last is None or last[0] != asked:  # in one go: other threads are here too
            last = self._page = asked, [self._keys.stream, self._keys.applied(*asked)]
        return last[1]

    def _identity(self) -> tuple[str, "itertools.count[int]"]:
        """What this process numbers with, the same for all its threads: two that begin at once must
        not have the same numbers. Without a lock: one held at a fork stays held for ever."""
        pid = os.getpid()
        own = self._own.get(pid)
        if own is None:
            own = self._own.setdefault(pid, (str(uuid.uuid4()), itertools.count()))
            for other in self._own.keys() - {pid}:
                self._own.pop(other, None)  # a child may get the pid of one that is gone
        return own


def check_all(replies: list[Any], *, had_some: bool) -> None:
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
    why = str(first) or repr(first)
    raise OutcomeUnknownError(
        f"{len(failures)} of {len(replies)} chunks of the batch failed ({why}): "
        "some of its jobs may have been added"
    ) from first
