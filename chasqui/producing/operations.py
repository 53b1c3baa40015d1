"""What a producer does to a queue, as plans: encoded and read back, without I/O.

`Queue` awaits them, `sync.Queue` runs them; each rule has one home, here.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from chasqui.errors import NotSupportedError, QueueFullError, ServerError
from chasqui.model.keys import Keys, check_ids
from chasqui.producing.chunks import ChunkEncoder, check_all
from chasqui.producing.durable import confirmed, wait_words
from chasqui.producing.new_jobs import CHUNK_JOBS, Added, NewJobs
from chasqui.producing.settings import PLAIN, AddOptions, Durable, check_positive
from chasqui.producing.tracing import Tracing, safely
from chasqui.scripts import adding
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import warn_if_early


class QueueOperations:
    """The plans of one producer on one queue. Any thread may make them."""

    def __init__(self, keys: Keys, max_stream_len: int | None = None) -> None:
        check_positive("max_stream_len", max_stream_len)
        self.keys = keys
        self.max_stream_len = max_stream_len
        self.encoder = ChunkEncoder(keys, max_stream_len)
        #: What this server is known to confirm.
        self._confirms: set[Durable] = set()

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    def add(self, jobs: NewJobs, options: AddOptions = PLAIN) -> Plan[Added]:
        """Add jobs: each once, however often the link drops on the way."""
        add = self._add if options.durable is None else self._add_durably
        if options.tracing is None or not jobs.payloads:
            return add(jobs, options)
        return self._traced(options.tracing, jobs, partial(add, jobs, options))

    def _traced(
        self, tracing: Tracing, jobs: NewJobs, add: Callable[[], Plan[Added]]
    ) -> Plan[Added]:
        """Add jobs within a span, and put its context on them."""
        # Before the jobs are encoded, so that the span can name them.
        ids = jobs.draw_ids(time.time_ns() // 1_000_000)
        with safely(tracing.sending, self.keys.queue, ids) as context:
            if context is not None:
                jobs.trace = context
                jobs.flags = jobs.flags or [0] * len(ids)
                jobs.due_ms = jobs.due_ms or [0] * len(ids)
            return (yield from add())

    def _add(self, jobs: NewJobs, options: AddOptions) -> Plan[Added]:
        now_ms = time.time_ns() // 1_000_000
        added = Added([], now_ms, [])
        if not jobs.payloads:
            return added
        jobs.draw_delayed_ids(now_ms)
        parts = jobs.slices()
        first, others = options.of_chunks(jobs, parts[0])
        replies: list[Any] = []

        def encode(part: slice, options: AddOptions) -> Request:
            request, ids = self.encoder.encode(jobs.chunk(part), now_ms, options)
            added.ids += ids
            return request

        if first is not others and len(parts) > 1:
            replies.append(self._unless_full((yield encode(parts.pop(0), first)), options))
            first = others
        had_some = bool(replies)

        def requests() -> Iterator[Request]:
            for part in parts:
                yield encode(part, first)
            added.jobs = jobs.jobs(added.ids, now_ms)  # while the server works on them

        try:
            replies += yield requests()
        except Exception as error:
            replies.append(error)
        check_all(replies, had_some=had_some)
        return self._outcome(jobs, options, added, replies)

    def _add_durably(self, jobs: NewJobs, options: AddOptions) -> Plan[Added]:
        """The same, and wait for the disk or a replica."""
        now_ms = time.time_ns() // 1_000_000
        if not jobs.payloads:
            return Added([], now_ms, [])
        durable = options.durable
        assert durable is not None
        yield from self.ensure_durable(durable)
        ids = jobs.draw_ids(now_ms)
        parts = jobs.slices()
        numbers = [self.encoder.next_number() for _ in parts]
        first, others = options.of_chunks(jobs, parts[0])

        def encode(i: int, options: AddOptions) -> Request:
            return self.encoder.encode(jobs.chunk(parts[i]), now_ms, options, numbers[i])[0]

        had_some = first is not others and len(parts) > 1
        if had_some:
            self._unless_full((yield encode(0, first)), options)
            first = others
        chunks = [partial(encode, i, first) for i in range(len(parts))]
        replies = yield from confirmed(chunks, self.encoder.mark(jobs, numbers[-1]), durable)
        check_all(replies, had_some=had_some)
        return self._outcome(jobs, options, Added(ids, now_ms, []), replies)

    def _outcome(
        self, jobs: NewJobs, options: AddOptions, added: Added, replies: list[Any]
    ) -> Added:
        """What an add came to, by the replies to its chunks."""
        for reply in replies:
            self._unless_full(reply, options)
        if not added.jobs:
            added.jobs = jobs.jobs(added.ids, added.created_at_ms)
        if jobs.flags is not None:
            flags = b"".join(replies)
            if not added.jobs:
                added.taken = flags.count(b"0")
            elif flags != b"1" * len(added.jobs):  # as they are made, all are new
                for job, flag in zip(added.jobs, flags, strict=True):
                    job.is_new = flag == ord("1")
        return added

    def _unless_full(self, reply: Any, options: AddOptions) -> Any:
        """A chunk's reply, if the queue had room for the chunk."""
        if isinstance(reply, list):
            raise QueueFullError(self.keys.queue, reply[0], options.max_backlog or 0)
        return reply

    def ensure_durable(self, durable: Durable) -> Plan[None]:
        """Before the first durable add: can this server promise it at all?"""
        if durable in self._confirms:
            return
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
        self._confirms.add(durable)

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    def cancel(self, job_ids: Iterable[str]) -> Plan[list[bool]]:
        """Take delayed jobs back; per job whether there was one to take."""
        job_ids = check_ids(job_ids)
        parts = [job_ids[i : i + CHUNK_JOBS] for i in range(0, len(job_ids), CHUNK_JOBS)]
        if not parts:
            return []
        replies = yield [adding.cancel(self.keys, self.encoder.reply_key(), part) for part in parts]
        check_all(replies, had_some=False)
        return [flag == ord("1") for reply in replies for flag in reply]

    def reschedule(self, job_id: str, due_ms: int, *, is_relative: bool) -> Plan[bool]:
        """Give a delayed job another due time; False if it is no longer delayed."""
        check_ids([job_id])
        reply_key = self.encoder.reply_key()
        reply = yield adding.reschedule(
            self.keys, reply_key, job_id, due_ms, is_relative=is_relative
        )
        return bool(reply)

    def free_job_id(self, job_id: str) -> Plan[bool]:
        """Let an id be used again, whatever became of the job that took it; False if it was free.

        If the reply is lost on the way, the id is free and the result is False.
        """
        check_ids([job_id])
        markers = (self.keys.unique(job_id), self.keys.dlid(job_id))
        reply = yield commands(("DEL", *markers), effect=Effect.IDEMPOTENT)
        return bool(reply)
