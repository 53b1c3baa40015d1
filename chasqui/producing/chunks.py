"""How jobs leave a producer: as numbered chunks, each applied once however often it is sent.

The server knows a chunk that is sent again after a lost reply by its number. So a retry never
doubles a job, and its reply says what the first arrival did. Nothing is sent from here.
"""

import itertools
import os
import uuid
from typing import Any, Final, TypeAlias

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import common_name, evalsha_jobs
from chasqui.errors import OutcomeUnknownError
from chasqui.model.keys import Keys
from chasqui.producing.new_jobs import CHUNK_BYTES, NewJobs, ulids
from chasqui.producing.settings import PLAIN, AddOptions
from chasqui.scripts import adding
from chasqui.transport.request import Effect, Request, commands

#: Which chunk: the id of its producer, and its number among that producer's chunks.
Number: TypeAlias = tuple[str, int]

#: A buffer that one large payload has made grow beyond this is not kept.
BUFFER_BYTES: Final = 4 * CHUNK_BYTES
#: Chunks that one bitmap keeps track of: a key of at most a kilobyte.
PAGE_BITS: Final = 8192


class ChunkEncoder:
    """Numbers and encodes what one producer sends to one queue. Any thread may call it.

    A forked child is another producer: under its parent's numbers the server would take its jobs
    for added ones.
    """

    def __init__(self, keys: Keys, max_stream_len: int | None = None) -> None:
        self._keys = keys
        self._max_len = max_stream_len
        #: By process: its producer id and its numbers.
        self._own: dict[int, tuple[str, itertools.count[int]]] = {}
        #: The page of the last plain chunk, and its keys.
        self._page: tuple[tuple[str, int], list[bytes]] | None = None
        # Buffers that no thread uses right now.
        self._buffers: list[CommandBuffer] = []

    @property
    def producer_id(self) -> str:
        return self._identity()[0]

    def next_number(self) -> Number:
        """The number of the next chunk."""
        producer_id, numbers = self._identity()
        return producer_id, next(numbers)

    def reply_key(self) -> bytes:
        """Where the server keeps the reply to one call for its repeats."""
        return self._keys.flags(*self.next_number())

    def mark(self, jobs: NewJobs, number: Number) -> Request:
        """Asks whether a chunk of these jobs is in: the reply is 1 if it is."""
        keys, (producer_id, chunk) = self._keys, number
        if jobs.flags is None:
            page, bit = divmod(chunk, PAGE_BITS)
            return commands(("GETBIT", keys.applied(producer_id, page), bit), effect=Effect.READ)
        return commands(("EXISTS", keys.flags(producer_id, chunk)), effect=Effect.READ)

    def encode(
        self,
        jobs: NewJobs,
        now_ms: int,
        options: AddOptions = PLAIN,
        number: Number | None = None,
    ) -> tuple[Request, list[str]]:
        """The script call that adds these jobs, which fit into one chunk; and the ids of the jobs.

        With the `number` of an earlier call it is the same chunk again, if all ids were drawn
        before that one.
        """
        producer_id, chunk = number or self.next_number()
        names: str | list[str] | None = jobs.names
        if jobs.flags is None:
            name = jobs.names if isinstance(jobs.names, str) else common_name(jobs.names)
            if name is not None:
                names = None  # the script has it once: a name per job costs the server 7 % more
            keys = self._page_keys(producer_id, chunk // PAGE_BITS)
            bit = chunk % PAGE_BITS
            call = adding.add(keys, bit, self._max_len, options.max_backlog, name)
        else:
            assert jobs.ids is not None
            call = adding.add_mixed(
                self._keys,
                self._keys.flags(producer_id, chunk),
                jobs.flags,
                jobs.ids,
                trace=jobs.trace,
                created_at_ms=now_ms,
                max_len=self._max_len,
                max_backlog=options.max_backlog,
                unique_for_s=options.unique_for_s,
            )
        script, keys, arguments = call
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = CommandBuffer()
        ids = evalsha_jobs(
            buffer,
            script.sha,
            keys,
            arguments,
            ulids,
            now_ms,
            jobs.payloads,
            names,
            jobs.ids,
            jobs.retries,
            jobs.due_ms,
        )
        request = Request(bytes(buffer), Effect.IDEMPOTENT, script=script)
        if buffer.capacity <= BUFFER_BYTES:
            buffer.clear()
            self._buffers.append(buffer)
        return request, ids

    def _page_keys(self, producer_id: str, page: int) -> list[bytes]:
        """The keys of a plain chunk, the same for all chunks of a page."""
        last, asked = self._page, (producer_id, page)
        if last is None or last[0] != asked:  # one assignment: other threads are here too
            last = self._page = asked, [self._keys.stream, self._keys.applied(*asked)]
        return last[1]

    def _identity(self) -> tuple[str, "itertools.count[int]"]:
        """The producer id and the numbers of this process, the same for all its threads: two that
        begin at once must not have the same numbers. No lock: one held at a fork stays held."""
        pid = os.getpid()
        own = self._own.get(pid)
        if own is None:
            own = self._own.setdefault(pid, (str(uuid.uuid4()), itertools.count()))
            for other in self._own.keys() - {pid}:
                self._own.pop(other, None)  # a child may get the pid of a process that is gone
        return own


def check_all(replies: list[Any], *, had_some: bool) -> None:
    """Raise what went wrong with the chunks of a call; `had_some`: earlier ones were added.

    If the server refused all of them, nothing was added, and its refusal is raised. Otherwise some
    jobs may be in, and OutcomeUnknownError says so.
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
        f"{len(failures)} of {len(replies)} chunks of the call failed ({why}): "
        "some of its jobs may have been added"
    ) from first
