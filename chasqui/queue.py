"""Queue: adds jobs and manages them, on asyncio. `make sync` generates chasqui/sync.py from it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

from chasqui.errors import ClosedError, QueueFullError
from chasqui.events.job_end import EndWait, ResultWait, raise_if_dead
from chasqui.events.job_end_watcher import JobEndWatcher
from chasqui.managing import dlq, results, retention, state
from chasqui.managing.dead_jobs import DeadJob, Selection
from chasqui.managing.retention import Log, Retention
from chasqui.managing.state import Counts as Counts
from chasqui.model import payload
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.model.job import Job, RepeatableMeta, job_factory
from chasqui.model.keys import DEFAULT_GROUP, Keys, check_job_id, check_job_name
from chasqui.producing import flows, job_options, settings
from chasqui.producing.coalescing import PlainAdds
from chasqui.producing.flows import EncodedFlow, Flow, FlowPlan
from chasqui.producing.job_options import (
    BackoffLike,
    DelayMsLike,
    JobDict,
    MissedFiresLike,
    RepeatLike,
)
from chasqui.producing.new_jobs import Added, NewJobs
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import PLAIN, AddSettings, Durable, Immediate, OnFull, full_waits_s
from chasqui.producing.shared_wait import DurableConnection
from chasqui.producing.tracing import Tracing
from chasqui.timed import repeatables
from chasqui.transport.connection import Connection
from chasqui.transport.recovery import REQUEST_TIMEOUT_S
from chasqui.transport.request import Plan

T = TypeVar("T")


class Queue:
    """Adds jobs to a named queue and manages them. Connects when first used.

    `max_backlog` bounds how many jobs may be in the stream: beyond it `add` raises QueueFullError,
    or waits with `on_full="wait"`. A bulk asks for room for all its jobs with its first 250; jobs
    that others add before the rest arrives go beyond the bound. `durable="disk"` confirms an add
    only when the server has it on disk, `"replica"` when a replica has it. `max_stream_len` trims
    the stream, which loses jobs."""

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
        self._keys = keys = Keys(name)
        self.name = name
        self._settings = AddSettings(max_backlog, on_full, durable, tracing)
        self._operations = QueueOperations(keys, max_stream_len)
        self._max_delay_s = job_options.check_max_delay(max_delay_secs)
        endpoint = Endpoint.parse(redis_url, tls=tls)
        options = settings.connection_options(keys, credential_provider, request_timeout_s)
        self._connection = Connection(endpoint, **options)
        #: For adds that wait for the disk or a replica: nothing else waits behind them.
        self._durable: Connection | None = None
        if self._settings.durable:
            self._durable = DurableConnection(endpoint, **options)
        self._ends = JobEndWatcher(keys, self._connection, credential_provider)
        #: The short way for jobs without options, if the queue has none either.
        self._plain: PlainAdds | None = None  # async only
        if self._settings.options(None) is PLAIN:  # async only
            self._plain = PlainAdds(self._connection, self._operations.encoder)

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        async with AsyncExitStack() as stack:  # if one raises or is cancelled, the others follow
            stack.push_async_callback(self._connection.close)
            if self._durable is not None:
                stack.push_async_callback(self._durable.close)
            stack.push_async_callback(self._ends.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self._connection.endpoint})"

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
        """Add one job. If another job had its `job_id` within `unique_for` seconds, nothing is
        added, and the returned job's `is_new` is False. By default an id stays taken for a day, and
        that of a delayed job until an hour past its due time."""
        if repeat is not None:
            job_options.refuse_unrepeated(delay_ms, delay, unique_for)
            return await self.upsert_repeatable_job(
                name,
                data,
                repeat=repeat,
                attempts=attempts,
                backoff=backoff,
                missed_fires=missed_fires,
            )
        if missed_fires is not None or unique_for is not None:
            job_options.refuse_useless(missed_fires, unique_for, job_id)
        if delay_ms is None and delay is None and job_id is None and self._plain:  # async only
            self._check_open()
            checked = check_job_name(name)
            retry = job_options.retry_of(attempts, backoff)
            encoded = payload.encode(data)
            if self._connection.is_congested:
                await self._connection.room()
            new_id, created_at_ms = await self._plain.add(encoded, checked, retry)
            return Job(new_id, checked, data, 0, created_at_ms, True, self)
        new = job_options.one(
            name, data, delay_ms, delay, attempts, backoff, job_id, self._max_delay_s
        )
        job: Job = (await self._add(new, unique_for)).jobs[0]
        return job

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
        self, jobs: Sequence[JobDict | Mapping[str, Any]], *, unique_for: float | None = None
    ) -> list[Job]:
        """Add many jobs in one pipeline. Each is a dict with `name`, `data` and any option of `add`
        but `repeat` and `missed_fires`: those are for `upsert_repeatable_job`. `unique_for` is for
        all jobs. If one of them is wrong, nothing is sent, and the error names its index."""
        new = job_options.many(jobs, self._max_delay_s, unique_for=unique_for)
        return await self.add_new_jobs(new, unique_for)

    async def add_new_jobs(self, new: NewJobs, unique_for: float | None = None) -> list[Job]:
        """The same for jobs that are checked and encoded: for the tasks of an app."""
        if self._plain and new.flags is None and new.is_chunk:  # async only
            self._check_open()
            new.owner = self
            return await self._plain.add_chunk(new)
        return (await self._add(new, unique_for)).jobs

    async def add_flow(self, plan: FlowPlan, *, flow_id: str | None = None) -> Flow:
        """Begin a flow. With the `flow_id` of one that was begun, add what is missing of it."""
        new, options = EncodedFlow(plan, flow_id), self._settings.options(None)
        new.owner, new.job_kind = self, Job
        await self._add_with_room(new, lambda: flows.begin(self._operations, new, options))
        return new.flow()

    def _add(self, new: NewJobs, unique_for: float | None) -> Awaitable[Added]:
        new.owner, new.factory = self, job_factory
        options = self._settings.options(unique_for)
        if self._settings.on_full == "wait":
            return self._add_with_room(new, lambda: self._operations.add(new, options))
        return self._run(self._operations.add(new, options), self._durable)

    async def _add_with_room(self, new: Immediate, make: Callable[[], Plan[T]]) -> T:
        self._settings.check_fits(new)
        waits_s = full_waits_s()
        while True:
            try:
                return await self._run(make(), self._durable)
            except QueueFullError:
                if self._settings.on_full == "raise":
                    raise
                await asyncio.sleep(next(waits_s))

    async def cancel_delayed(self, job_id: str) -> bool:
        """Take back a job that is delayed or waits for its retry; False if there was none. The id
        of a job that has run stays taken."""
        return (await self.cancel_delayed_bulk([job_id]))[0]

    async def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        """The same for many; for each whether there was one."""
        return await self._run(self._operations.cancel(job_ids))

    async def reschedule(
        self, job_id: str, *, delay_ms: DelayMsLike | None = None, delay: timedelta | None = None
    ) -> bool:
        """Give a job that is delayed or waits for its retry another due time; False if it is not
        delayed any more."""
        due_ms, is_relative = job_options.new_due(delay_ms, delay, self._max_delay_s)
        return await self._run(self._operations.reschedule(job_id, due_ms, is_relative=is_relative))

    async def free_job_id(self, job_id: str) -> bool:
        """Let an id be used again; False if it was free. Call it only when its job is gone."""
        return await self._run(self._operations.free_job_id(job_id))

    # ── The dead-letter queue ───────────────────────────────────────────────────────────────────

    async def peek_dlq(self, limit: int = 20) -> list[dict[str, Any]]:
        """The oldest dead jobs, as dicts; `iter_dlq` gives more of each, and all of them."""
        return [job.to_dict() for job in await self._run(dlq.peek(self._keys, limit))]

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
        """Every dead job that meets all conditions, oldest first, page by page."""
        selection = Selection(ids, name, reason, since, until, where)
        pages = dlq.Pages(self._keys, selection)
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
        """Run dead jobs again, oldest first, with their attempts reset; how many were moved. Only
        those that meet all conditions; with `dry_run` they are counted, not moved."""
        selection = Selection(ids, name, reason, since, until, where)
        return await self._run(dlq.replay(self._operations, limit, selection, dry_run=dry_run))

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
        """Delete dead jobs for good, oldest first; how many, without those whose reply was lost.
        Their ids may be used again at once."""
        selection = Selection(ids, name, reason, since, until, where)
        return await self._run(dlq.delete(self._keys, limit, selection, dry_run=dry_run))

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
        keep_same: bool = False,
    ) -> Job:
        """Write a repeat spec, or overwrite the one with the same key: its next fire is counted
        from now, unless `keep_same` and it says the same already. The returned job's id is the key;
        without one, name and pattern make it. `job_id` changes nothing, as in chasquimq: each fire
        has an id of its own."""
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
        write = repeatables.upsert_changed if keep_same else repeatables.upsert
        key = await self._run(write(self._operations, spec))
        return Job(key, name, data, 0, time.time_ns() // 1_000_000, _queue=self)

    async def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs, soonest fire first."""
        return await self._run(repeatables.listing(self._keys, limit))

    async def remove_repeatable_by_key(self, key: str) -> bool:
        """Remove a repeatable job; False if there was none."""
        return await self._run(repeatables.remove(self._operations, key))

    async def get_job_result(self, job_id: str) -> Any:
        """What the job's handler returned; None if nothing is stored."""
        return (await self.get_job_result_bulk([job_id]))[0]

    async def get_job_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one pipeline; an error names the job whose result is unreadable."""
        return await self._run(results.decoded(self._keys, ids))

    async def wait_for_result(
        self,
        job_id: str,
        *,
        timeout: float = 30.0,
        poll_interval: float = 0.1,
        since_ms: int | None = None,
    ) -> Any:
        """What the job's handler returned, once it is stored; TimeoutError after `timeout`, and
        JobFailedError as soon as the job is in the dead-letter queue. `since_ms` is when you added
        it: earlier ends of jobs with its id do not count."""
        return await self._wait(ResultWait(job_id, timeout, poll_interval, since_ms))

    async def wait_for_end(
        self,
        job_id: str,
        *,
        timeout: float | None = 30.0,
        poll_interval: float = 0.1,
        since_ms: int | None = None,
    ) -> Any:
        """The same, or None as soon as the job is done without a stored result. Its worker's events
        tell that; where they are off, only a stored result ends the wait."""
        return await self._wait(EndWait(job_id, timeout, poll_interval, since_ms))

    async def _wait(self, wait: ResultWait) -> Any:
        self._check_open()
        job_id = wait.job_id
        async with self._ends.watch(job_id, wait.since_ms) as waiter:
            while True:
                end = waiter.end  # first: a result is stored before the end is announced
                if (value := await self.get_job_result(job_id)) is not None:
                    return value
                if end is not None and end.is_dead:
                    await self._run(raise_if_dead(self._keys, job_id, end))
                    waiter.forget(end)
                    end = None
                if (pause_s := wait.pause_s(end)) is None:
                    return None
                # An end is announced once; after that, poll for a late result.
                await (waiter.wait if end is None else asyncio.sleep)(pause_s)

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    async def counts(self, group: str = DEFAULT_GROUP) -> Counts:
        """How many jobs wait, run, are delayed or dead, in one round trip."""
        return await self._run(state.counts(self._keys, group))

    async def pause(self) -> None:
        """Stop workers from reading new jobs, until `resume`; they finish those that they have."""
        await self._run(state.pause(self._keys))

    async def resume(self) -> None:
        await self._run(state.resume(self._keys))

    async def is_paused(self) -> bool:
        return await self._run(state.is_paused(self._keys))

    async def set_events_max_len(self, max_len: int | None) -> None:
        """Keep about so many events of this queue; None: the default of 100,000. Running processes
        follow within seconds; chasquimq's workers always keep 100,000."""
        await self._run(retention.set_max_len(Log.events(self._keys), max_len))

    async def get_events_retention(self) -> Retention:
        """How many events are kept, how many there are, and who reads them and how far."""
        return await self._run(retention.look(Log.events(self._keys)))

    async def forget_events_reader(self, reader: str) -> bool:
        """Keep no more events for a reader; False if there was none. If it lives it comes back."""
        return await self._run(retention.forget(Log.events(self._keys), reader))

    async def set_history_max_len(self, max_len: int | None) -> None:
        """The same for finished jobs, which workers keep if told to write history."""
        await self._run(retention.set_max_len(Log.history(self._keys), max_len))

    async def get_history_retention(self) -> Retention:
        """How many finished jobs are kept, how many there are, and who reads them and how far."""
        return await self._run(retention.look(Log.history(self._keys)))

    async def forget_history_reader(self, reader: str) -> bool:
        """Keep no more finished jobs for a reader; False if there was none."""
        return await self._run(retention.forget(Log.history(self._keys), reader))

    async def obliterate(self, *, force: bool = False) -> int:
        """Delete the queue with all it holds; how many keys were deleted, as far as is known.
        Without `force` it is refused while there are jobs: waiting, running, delayed or dead. A job
        that is added meanwhile may be deleted too."""
        return await self._run(state.obliterate(self._keys, DEFAULT_GROUP, force=force))

    def _run(self, plan: Plan[T], connection: Connection | None = None) -> Awaitable[T]:
        # Not a coroutine: one more on the way of each call is measurable.
        self._check_open()
        return (connection or self._connection).run(plan)

    def _check_open(self) -> None:
        if self._connection.is_closed:
            raise ClosedError(f"queue {self.name!r} is closed")
