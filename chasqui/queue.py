"""Queue: what programs hold to add jobs and to look after them, on asyncio."""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from chasqui import dlq, drafts, payload, repeatables
from chasqui.config import CredentialProvider
from chasqui.connection import REQUEST_TIMEOUT_S
from chasqui.dlq import DeadJob, Selection
from chasqui.drafts import BackoffLike, DelayMsLike, JobEntry, MissedFiresLike, RepeatLike
from chasqui.errors import ClosedError, NotSupportedError, QueueFullError
from chasqui.job import Job, RepeatableMeta
from chasqui.keys import DEFAULT_GROUP, check_job_id, check_queue_name
from chasqui.plans import UNIQUE_FOR_S, Added, AddOptions, Batch
from chasqui.producer import Producer
from chasqui.request import Plan

T = TypeVar("T")

#: How often a full queue is tried again, at first and at most.
_FULL_MIN_S, _FULL_MAX_S = 0.02, 0.5

OnFull = Literal["raise", "wait"]
Durable = Literal["disk", "replica"]


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
        length, pending, delayed, dead, repeats, oldest_ms, paused = numbers
        return cls(length - pending, pending, delayed, dead, repeats, oldest_ms, bool(paused))

    def refuse_if_any(self, queue: str) -> None:
        """Raise if the queue holds jobs that are still to run."""
        if self.waiting or self.pending or self.delayed:
            raise NotSupportedError(
                f"queue {queue!r} holds {self.waiting} waiting, {self.pending} pending and "
                f"{self.delayed} delayed jobs: obliterate(force=True) deletes them too"
            )


class Queue:
    """Adds jobs to a named queue and looks after them. Connects when first used.

    `max_backlog` bounds how many jobs may be in the stream: beyond it `add` raises QueueFullError,
    or waits with `on_full="wait"`. `durable="disk"` confirms an add only when the server has it on
    disk, `"replica"` when a replica has it. `max_stream_len` trims the stream, which loses jobs.
    """

    def __init__(
        self,
        name: str,
        *,
        redis_url: str | None = None,
        tls: bool = False,
        max_stream_len: int | None = None,
        max_delay_secs: int | None = None,
        credential_provider: CredentialProvider | None = None,
        max_backlog: int | None = None,
        on_full: OnFull = "raise",
        durable: Durable | bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.name = check_queue_name(name)
        self._settings = AddSettings(max_backlog, on_full, durable)
        self._producer = Producer(
            redis_url,
            name,
            max_stream_len=max_stream_len,
            max_delay_secs=max_delay_secs,
            credential_provider=credential_provider,
            tls=tls,
            request_timeout_s=request_timeout_s,
        )

    @property
    def is_closed(self) -> bool:
        return self._producer.is_closed

    async def close(self) -> None:
        """Close the connection. A second call does nothing."""
        await self._producer.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self._producer.connection.endpoint})"

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    async def add(
        self,
        name: str,
        data: Any,
        *,
        delay_ms: DelayMsLike | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: BackoffLike | None = None,
        job_id: str | None = None,
        repeat: RepeatLike | None = None,
        missed_fires: MissedFiresLike | None = None,
        unique_for: float | None = None,
    ) -> Job:
        """Add one job. With a `job_id` that another job had within `unique_for` seconds (a day
        unless told otherwise) nothing is added, and the returned job's `is_new` is False."""
        if repeat is not None:
            return await self.upsert_repeatable_job(
                name,
                data,
                repeat=repeat,
                attempts=attempts,
                backoff=backoff,
                job_id=job_id,
                missed_fires=missed_fires,
            )
        drafts.refuse_missed_fires(missed_fires)
        batch = drafts.single(
            name,
            data,
            delay_ms=delay_ms,
            delay=delay,
            attempts=attempts,
            backoff=backoff,
            job_id=job_id,
            max_delay_s=self._producer.max_delay_s,
        )
        options = self._settings.options(unique_for)
        if batch.kinds is None and options.is_plain:
            self._check_open()
            retry = None if batch.retries is None else batch.retries[0]
            new_id, created_at_ms = await self._producer.add_one(batch.payloads[0], name, retry)
            return Job(new_id, name, data, 0, created_at_ms, True, self)
        added = await self._add(batch, options)
        is_new = added.is_new is None or added.is_new[0]
        return Job(added.ids[0], name, data, 0, added.created_at_ms, is_new, self)

    async def add_unique(
        self,
        name: str,
        data: Any,
        *,
        job_id: str,
        delay_ms: DelayMsLike | None = None,
        delay: timedelta | None = None,
        attempts: int | None = None,
        backoff: BackoffLike | None = None,
        repeat: RepeatLike | None = None,
        unique_for: float | None = None,
    ) -> Job:
        """Add one job unless its id is taken, exactly, across processes: see `add`."""
        check_job_id(job_id)
        return await self.add(
            name,
            data,
            delay_ms=delay_ms,
            delay=delay,
            attempts=attempts,
            backoff=backoff,
            job_id=job_id,
            repeat=repeat,
            unique_for=unique_for,
        )

    async def add_bulk(
        self, jobs: Sequence[JobEntry | Mapping[str, Any]], *, unique_for: float | None = None
    ) -> list[Job]:
        """Add many jobs in one pipeline; each entry has `name`, `data` and any option of `add`.

        One bad entry and nothing is sent; the error names its index.
        """
        batch = drafts.bulk(jobs, self._producer.max_delay_s)
        added = await self._add(batch, self._settings.options(unique_for))
        return drafts.jobs_of(jobs, added, self)

    async def _add(self, batch: Batch, options: AddOptions) -> Added:
        wait_s = _FULL_MIN_S
        while True:
            try:
                return await self._run(self._producer.plans.add(batch, options))
            except QueueFullError:
                if self._settings.on_full == "raise":
                    raise
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _FULL_MAX_S)

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    async def cancel_delayed(self, job_id: str) -> bool:
        """Take a delayed job back before it is due; False if there was none."""
        return (await self.cancel_delayed_bulk([job_id]))[0]

    async def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        """The same for many; per job whether there was one."""
        self._check_open()
        return await self._producer.cancel_delayed_bulk(job_ids)

    async def reschedule(
        self, job_id: str, *, delay_ms: DelayMsLike | None = None, delay: timedelta | None = None
    ) -> bool:
        """Give a delayed job another due time; False if it is not delayed any more."""
        due_ms, is_relative = drafts.new_due(delay_ms, delay, self._producer.max_delay_s)
        plan = self._producer.plans.reschedule(job_id, due_ms, is_relative=is_relative)
        return await self._run(plan)

    # ── The dead-letter queue ───────────────────────────────────────────────────────────────────

    async def peek_dlq(self, limit: int = 20) -> list[dict[str, Any]]:
        """The oldest dead jobs, as dicts; `iter_dlq` gives more of each and goes on past any size."""
        found = await self._run(dlq.peek(self._producer.keys, limit))
        return [job.to_dict() for job in found]

    async def iter_dlq(
        self,
        *,
        ids: Sequence[str] | None = None,
        name: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        where: Callable[[DeadJob], bool] | None = None,
    ) -> AsyncIterator[DeadJob]:
        """Every dead job that is meant, oldest first, page by page."""
        selection = Selection(ids, name, reason, since, until, where)
        after: str | None = None
        while True:
            page, after = await self._run(dlq.read_page(self._producer.keys, selection, after))
            for job, _ in page:
                if selection.takes(job):
                    yield job
            if after is None:
                return

    async def replay_dlq(
        self,
        limit: int = 100,
        *,
        ids: Sequence[str] | None = None,
        name: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        where: Callable[[DeadJob], bool] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Run dead jobs again, oldest first, with their attempts reset; how many were moved.

        Only those that meet every condition given; with `dry_run` they are counted, not moved.
        """
        selection = Selection(ids, name, reason, since, until, where)
        return await self._run(dlq.replay(self._producer.plans, limit, selection, dry_run=dry_run))

    async def delete_dlq(
        self,
        limit: int = 100,
        *,
        ids: Sequence[str] | None = None,
        name: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        where: Callable[[DeadJob], bool] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete dead jobs for good, oldest first; how many."""
        selection = Selection(ids, name, reason, since, until, where)
        return await self._run(dlq.delete(self._producer.keys, limit, selection, dry_run=dry_run))

    # ── Repeatable jobs ─────────────────────────────────────────────────────────────────────────

    async def upsert_repeatable_job(
        self,
        name: str,
        data: Any,
        *,
        repeat: RepeatLike,
        limit: int | None = None,
        start_after_ms: int | None = None,
        end_before_ms: int | None = None,
        attempts: int | None = None,
        backoff: BackoffLike | None = None,
        job_id: str | None = None,
        missed_fires: MissedFiresLike | None = None,
    ) -> Job:
        """Write a repeat spec, or overwrite the one of the same key; the returned job's id is the
        key: `job_id` if given, else made of name and pattern."""
        spec = repeatables.spec_of(
            name,
            data,
            repeat=repeat,
            limit=limit,
            start_after_ms=start_after_ms,
            end_before_ms=end_before_ms,
            attempts=attempts,
            backoff=backoff,
            key=job_id,
            missed_fires=missed_fires,
        )
        key = await self._run(repeatables.upsert(self._producer.keys, spec))
        return Job(key, name, data, 0, time.time_ns() // 1_000_000, True, self)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs, soonest fire first."""
        return await self._run(repeatables.listing(self._producer.keys, limit))

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Forget a repeatable job; False if there was none."""
        return await self._run(repeatables.remove(self._producer.keys, key))

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    async def get_job_result(self, job_id: str) -> Any:
        """What the job's handler returned; None if nothing is stored."""
        return (await self.get_job_result_bulk([job_id]))[0]

    async def get_job_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one round trip."""
        self._check_open()
        values = await self._producer.get_result_bulk(ids)
        return [None if value is None else payload.decode(value) for value in values]

    async def wait_for_result(self, job_id: str, *, timeout: float, poll_interval: float) -> Any:
        """What the job's handler returned, once it is stored; TimeoutError if that takes too long."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        has_warned = False
        while True:
            (value,) = await self._producer.get_result_bulk([job_id])
            if value is not None:
                return payload.decode(value)
            waited_s = loop.time() - started_s
            if waited_s >= timeout:
                raise TimeoutError(f"job {job_id} has no result after {timeout:g} s")
            if waited_s > 1 and not has_warned:
                has_warned = True
                warnings.warn(
                    "wait_for_result has been waiting for more than 1 s: does the worker have "
                    "store_results=True, and does its handler return something?",
                    RuntimeWarning,
                    stacklevel=3,
                )
            await asyncio.sleep(min(poll_interval, timeout - waited_s))

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    async def counts(self, group: str = DEFAULT_GROUP) -> Counts:
        """How many jobs wait, run, are delayed or dead, in one round trip."""
        return Counts.of(await self._run(self._producer.plans.counts(group)))

    async def pause(self) -> None:
        """Let workers read nothing new, until `resume`; what they have, they finish."""
        await self._run(self._producer.plans.pause())

    async def resume(self) -> None:
        await self._run(self._producer.plans.resume())

    async def is_paused(self) -> bool:
        return await self._run(self._producer.plans.is_paused())

    async def obliterate(self, *, force: bool = False) -> int:
        """Delete the queue with all it holds; the number of keys deleted.

        Without `force` it is refused while there are jobs, waiting, running or delayed.
        """
        if not force:
            (await self.counts()).refuse_if_any(self.name)
        return await self._run(self._producer.plans.obliterate())

    async def _run(self, plan: Plan[T]) -> T:
        self._check_open()
        return await self._producer.run(plan)

    def _check_open(self) -> None:
        if self._producer.is_closed:
            raise ClosedError(f"queue {self.name!r} is closed")


@dataclass(frozen=True, slots=True)
class AddSettings:
    """What a queue says about all its adds."""

    max_backlog: int | None = None
    on_full: OnFull = "raise"
    durable: Durable | bool = False

    def __post_init__(self) -> None:
        limit = self.max_backlog
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 1
        ):
            raise ValueError(f"max_backlog must be a positive int or None, got {limit!r}")
        if self.on_full not in ("raise", "wait"):
            raise ValueError(f"on_full must be 'raise' or 'wait', got {self.on_full!r}")
        if self.durable not in (True, False, "disk", "replica"):
            raise ValueError(f"durable must be a bool, 'disk' or 'replica', got {self.durable!r}")

    def options(self, unique_for: float | None) -> AddOptions:
        """The same as options of one call."""
        if unique_for is None:
            if self.max_backlog is None and self.durable is False:
                return _PLAIN
            unique_for = UNIQUE_FOR_S
        if isinstance(unique_for, bool) or not isinstance(unique_for, int | float):
            raise TypeError(f"unique_for must be seconds, got {type(unique_for).__name__}")
        if not 1 <= unique_for <= 10 * 365 * 86_400:
            raise ValueError(f"unique_for must be at least 1 second, got {unique_for}")
        durable = "disk" if self.durable is True else self.durable or None
        return AddOptions(self.max_backlog, durable, int(unique_for))


_PLAIN = AddOptions()
