"""Queue: what programs hold to add jobs and to look after them, on asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from chasqui import dlq, drafts, payload, repeatables, retention
from chasqui.adding import (
    PLAIN,
    Added,
    AddOptions,
    AddSettings,
    Batch,
    Durable,
    OnFull,
    full_waits_s,
)
from chasqui.model.config import CredentialProvider
from chasqui.transport.connection import REQUEST_TIMEOUT_S, Connection
from chasqui.dlq import DeadJob, Selection
from chasqui.producing.job_options import BackoffLike, DelayMsLike, JobEntry, MissedFiresLike, RepeatLike
from chasqui.producing.shared_wait import DurableConnection
from chasqui.events.job_end_watcher import GRACE_LOOKS, GRACE_S, JobEnds, added_ms, raise_if_dead
from chasqui.errors import ClosedError, QueueFullError
from chasqui.model.job import Job, RepeatableMeta
from chasqui.model.keys import DEFAULT_GROUP, check_job_id, check_job_name, check_queue_name
from chasqui.plans import Counts as Counts
from chasqui.plans import ResultWait
from chasqui.producer import Producer
from chasqui.transport.request import Plan
from chasqui.managing.retention import Log, Retention
from chasqui.producing.tracing import Tracing, add, check_tracing

T = TypeVar("T")


class Queue:
    """Adds jobs to a named queue and looks after them. Connects when first used.

    `max_backlog` bounds how many jobs may be in the stream: beyond it `add` raises QueueFullError,
    or waits with `on_full="wait"`. A bulk asks for room for all its jobs with its first 250; what
    others add before the rest has arrived goes beyond the bound. `durable="disk"` confirms an add
    only when the server has it on disk, `"replica"` when a replica has it. `max_stream_len` trims
    the stream, which loses jobs.
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
        tracing: Tracing | None = None,
    ) -> None:
        self.name = check_queue_name(name)
        self._settings = AddSettings(max_backlog, on_full, durable)
        check_tracing(tracing)
        self._tracing = tracing
        #: Whether jobs without options of their own are added by their chunk alone.
        self._is_plain = tracing is None and self._settings.options(None) is PLAIN
        self._producer = Producer(
            redis_url,
            name,
            max_stream_len=max_stream_len,
            max_delay_secs=max_delay_secs,
            credential_provider=credential_provider,
            tls=tls,
            request_timeout_s=request_timeout_s,
        )
        self._credential_provider = credential_provider
        #: For adds that wait for the disk or a replica: nothing else waits behind them.
        self._durable: DurableConnection | None = None
        if self._settings.durable:
            self._durable = DurableConnection(
                self._producer.connection.endpoint,
                key=self._producer.keys.stream,
                client_name="chasqui-producer",
                credential_provider=credential_provider,
                request_timeout_s=request_timeout_s,
            )
        self._ends = JobEnds(self._producer.keys, self._connect, self._run)

    @property
    def is_closed(self) -> bool:
        return self._producer.is_closed

    async def close(self) -> None:
        """Close the connection. A second call does nothing."""
        async with AsyncExitStack() as stack:  # cancelled at one of them, it still does the others
            stack.push_async_callback(self._producer.shutdown)
            if self._durable is not None:
                stack.push_async_callback(self._durable.close)
            stack.push_async_callback(self._ends.close)

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
        """Add one job. With a `job_id` that another job had within `unique_for` seconds nothing is
        added, and the returned job's `is_new` is False. Unless told otherwise an id stays taken for
        a day, and that of a delayed job until an hour past its due time."""
        if repeat is not None:
            drafts.refuse_unrepeated(delay_ms, delay, unique_for)
            return await self.upsert_repeatable_job(
                name,
                data,
                repeat=repeat,
                attempts=attempts,
                backoff=backoff,
                missed_fires=missed_fires,
            )
        if missed_fires is not None or unique_for is not None:
            drafts.refuse_useless(missed_fires, unique_for, job_id)
        if delay_ms is None and delay is None and job_id is None and self._is_plain:
            self._check_open()
            checked = check_job_name(name)
            retry = drafts.retry_of(attempts, backoff)
            encoded = payload.encode(data)
            if self._producer.connection.is_congested:
                await self._producer.connection.room()
            new_id, created_at_ms = await self._producer.put(encoded, checked, retry)
            return Job(new_id, checked, data, 0, created_at_ms, True, self)
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
        return (await self._add(batch, self._settings.options(unique_for))).jobs[0]

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
        """Add many jobs in one pipeline; each entry has `name`, `data` and any option of `add` but
        `repeat` and `missed_fires`, which `upsert_repeatable_job` takes. `unique_for` is for all.

        One bad entry and nothing is sent; the error names its index.
        """
        batch = drafts.bulk(jobs, self._producer.max_delay_s, unique_for=unique_for)
        if self._is_plain and batch.kinds is None and batch.is_chunk:
            self._check_open()
            batch.owner = self
            return await self._producer.put_chunk(batch)
        added = await self._add(batch, self._settings.options(unique_for))
        return added.jobs

    def _add(self, batch: Batch, options: AddOptions) -> Awaitable[Added]:
        batch.owner = self
        if self._settings.on_full == "wait":
            return self._add_with_room(batch, options)
        return self._run(add(self._tracing, self._producer.plans, batch, options), self._durable)

    async def _add_with_room(self, batch: Batch, options: AddOptions) -> Added:
        self._settings.check_fits(batch)
        waits_s = full_waits_s()
        while True:
            plan = add(self._tracing, self._producer.plans, batch, options)
            try:
                return await self._run(plan, self._durable)
            except QueueFullError:
                await asyncio.sleep(next(waits_s))

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    async def cancel_delayed(self, job_id: str) -> bool:
        """Take a job back that is delayed or waits for its retry; False if there was none.

        The id of one that has run stays taken.
        """
        return (await self.cancel_delayed_bulk([job_id]))[0]

    async def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        """The same for many; per job whether there was one."""
        return await self._run(self._producer.plans.cancel(job_ids))

    async def reschedule(
        self, job_id: str, *, delay_ms: DelayMsLike | None = None, delay: timedelta | None = None
    ) -> bool:
        """Give a job that is delayed or waits for its retry another due time; False if it is not
        delayed any more."""
        due_ms, is_relative = drafts.new_due(delay_ms, delay, self._producer.max_delay_s)
        plan = self._producer.plans.reschedule(job_id, due_ms, is_relative=is_relative)
        return await self._run(plan)

    async def free_job_id(self, job_id: str) -> bool:
        """Let an id be used again, whatever became of the job that took it; False if it was free.

        That job stays where it is: do it where you know that it is gone."""
        return await self._run(self._producer.plans.free_job_id(job_id))

    # ── The dead-letter queue ───────────────────────────────────────────────────────────────────

    async def peek_dlq(self, limit: int = 20) -> list[dict[str, Any]]:
        """The oldest dead jobs, as dicts; `iter_dlq` gives more of each, and all of them."""
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
        pages = dlq.Pages(self._producer.keys, selection)
        while not pages.are_over:
            for job in selection.jobs(await self._run(pages.read())):
                yield job

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
        """Delete dead jobs for good, oldest first; how many, less those whose answer was lost.
        Their ids may be used again at once."""
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
        key: str | None = None,
    ) -> Job:
        """Write a repeat spec, or overwrite the one of the same key; the returned job's id is the
        key, made of name and pattern unless given. `job_id` changes nothing, as in chasquimq:
        each fire has an id of its own."""
        spec = repeatables.spec_of(
            name,
            data,
            repeat=repeat,
            limit=limit,
            start_after_ms=start_after_ms,
            end_before_ms=end_before_ms,
            attempts=attempts,
            backoff=backoff,
            key=key,
            missed_fires=missed_fires,
        )
        key = await self._run(repeatables.upsert(self._producer.plans, spec))
        return Job(key, name, data, 0, time.time_ns() // 1_000_000, True, self)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs, soonest fire first."""
        return await self._run(repeatables.listing(self._producer.keys, limit))

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Forget a repeatable job; False if there was none."""
        return await self._run(repeatables.remove(self._producer.plans, key))

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    async def get_job_result(self, job_id: str) -> Any:
        """What the job's handler returned; None if nothing is stored."""
        return (await self.get_job_result_bulk([job_id]))[0]

    async def get_job_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one pipeline; the error names a job whose result is unreadable."""
        return await self._run(self._producer.plans.results(ids))

    async def wait_for_result(
        self,
        job_id: str,
        *,
        timeout: float = 30.0,
        poll_interval: float = 0.1,
        since_ms: int | None = None,
    ) -> Any:
        """What the job's handler returned, once it is stored; TimeoutError after `timeout`.

        Raises JobFailedError as soon as the job is in the dead-letter queue. `since_ms` is when it
        was added: how it ended before that is of no interest.
        """
        self._check_open()
        wait = ResultWait(job_id, timeout, poll_interval, since_ms)
        from_ms = await self._run(added_ms(self._producer.keys, job_id, since_ms))
        with self._ends.watch(job_id, from_ms) as watch:
            while True:
                end = watch.end
                if (value := await self.get_job_result(job_id)) is not None:
                    return value
                if end is not None and end.is_dead:
                    await self._run(raise_if_dead(self._producer.keys, job_id, end))
                    self._ends.forget(job_id, end)
                    end = None
                # Done is told once; who wants a result all the same looks on by himself.
                await (watch.wait if end is None else asyncio.sleep)(wait.next_s())

    async def wait_for_end(
        self,
        job_id: str,
        *,
        timeout: float | None = 30.0,
        poll_interval: float = 0.1,
        since_ms: int | None = None,
    ) -> Any:
        """The same, and None as soon as the job is done without a stored result.

        That is told by its worker's events; where they are off, only a stored result is seen.
        """
        self._check_open()
        wait = ResultWait(job_id, timeout, poll_interval, since_ms)
        looks = GRACE_LOOKS
        from_ms = await self._run(added_ms(self._producer.keys, job_id, since_ms))
        with self._ends.watch(job_id, from_ms) as watch:
            while True:
                end = watch.end
                if (value := await self.get_job_result(job_id)) is not None:
                    return value
                if end is None:
                    await watch.wait(wait.next_s(warns=False))
                elif end.is_dead:
                    await self._run(raise_if_dead(self._producer.keys, job_id, end))
                    self._ends.forget(job_id, end)
                elif looks == 0:
                    return None
                else:
                    looks -= 1
                    await asyncio.sleep(GRACE_S)

    def _connect(self) -> Connection:
        """A connection of its own for who has to wait for replies."""
        return Connection(
            self._producer.connection.endpoint,
            key=self._producer.keys.events,
            client_name="chasqui-events",
            credential_provider=self._credential_provider,
        )

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

    async def set_events_max_len(self, max_len: int | None) -> None:
        """Keep about so many events of this queue, whoever writes them; None: the default of
        100,000. Processes that run take it over within seconds. chasquimq's workers know nothing of
        it: they keep 100,000."""
        await self._run(retention.set_max_len(Log.events(self._producer.keys), max_len))

    async def get_events_retention(self) -> Retention:
        """How many events are kept, how many there are, and who reads them and how far."""
        return await self._run(retention.look(Log.events(self._producer.keys)))

    async def forget_events_reader(self, reader: str) -> bool:
        """Hold no events back for a reader any more, and do not list it; False if there was none.
        One that lives is back with its next sign of life."""
        return await self._run(retention.forget(Log.events(self._producer.keys), reader))

    async def set_history_max_len(self, max_len: int | None) -> None:
        """Keep about so many finished jobs, where workers write history; None: the default of
        100,000."""
        await self._run(retention.set_max_len(Log.history(self._producer.keys), max_len))

    async def get_history_retention(self) -> Retention:
        """How many finished jobs are kept, how many there are, and who reads them and how far."""
        return await self._run(retention.look(Log.history(self._producer.keys)))

    async def forget_history_reader(self, reader: str) -> bool:
        """Hold no finished jobs back for a reader any more; False if there was none."""
        return await self._run(retention.forget(Log.history(self._producer.keys), reader))

    async def obliterate(self, *, force: bool = False) -> int:
        """Delete the queue with all it holds; the number of keys deleted, as far as it was told.

        Without `force` it is refused while there are jobs: waiting, running, delayed or dead. A job
        that is added while it works may be deleted too.
        """
        return await self._run(self._producer.plans.obliterate(DEFAULT_GROUP, force=force))

    def _run(self, plan: Plan[T], connection: Connection | None = None) -> Awaitable[T]:
        # No coroutine of its own: each one on the way is felt.
        self._check_open()
        return (connection or self._producer.connection).run(plan)

    def _check_open(self) -> None:
        if self._producer.is_closed:
            raise ClosedError(f"queue {self.name!r} is closed")
