# Generated from chasqui/queue.py by `make sync`: edit that file, not this one.
"""The same queue without an event loop: for scripts, threads, web workers, forked children.

Nothing runs between two calls, no thread and no loop; transport/blocking.py says what a call does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

from chasqui.errors import ClosedError, QueueFullError
from chasqui.events.blocking_job_end_watcher import BlockingJobEndWatcher
from chasqui.events.job_end import EndWait, ResultWait, raise_if_dead
from chasqui.events.stream import BlockingQueueEvents as QueueEvents
from chasqui.managing import dlq, results, retention, state
from chasqui.managing.dead_jobs import DeadJob, Selection
from chasqui.managing.retention import Log, Retention
from chasqui.managing.state import Counts as Counts
from chasqui.model.config import AnyCredentialProvider, Endpoint
from chasqui.model.job import RepeatableMeta
from chasqui.model.keys import DEFAULT_GROUP, Keys, check_job_id
from chasqui.model.sync_job import Job, job_factory
from chasqui.producing import flows, job_options, settings
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
from chasqui.producing.settings import AddSettings, Durable, Immediate, OnFull, full_waits_s
from chasqui.producing.shared_wait import BlockingDurableConnection
from chasqui.producing.tracing import Tracing
from chasqui.timed import repeatables
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.recovery import REQUEST_TIMEOUT_S
from chasqui.transport.request import Plan

__all__ = ["Job", "Queue", "QueueEvents"]

T = TypeVar("T")


class Queue:
    """Adds jobs to a named queue and manages them: `chasqui.Queue`, without `await`.

    Any number of threads may share one. After a fork, parent and child have a connection each.
    `credential_provider` may be a plain function.
    """

    def __init__(
        self,
        name: str,
        *,
        redis_url: str | None = None,
        tls: bool = False,
        max_stream_len: int | None = None,
        max_delay_secs: int | None = None,
        credential_provider: AnyCredentialProvider | None = None,
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
        self._connection = BlockingConnection(endpoint, **options)
        #: For adds that wait for the disk or a replica: nothing else waits behind them.
        self._durable: BlockingConnection | None = None
        if self._settings.durable:
            self._durable = BlockingDurableConnection(endpoint, **options)
        self._ends = BlockingJobEndWatcher(keys, self._connection, credential_provider)

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        with ExitStack() as stack:  # if one raises or is cancelled, the others follow
            stack.callback(self._connection.close)
            if self._durable is not None:
                stack.callback(self._durable.close)
            stack.callback(self._ends.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self._connection.endpoint})"

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    def add(
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
            return self.upsert_repeatable_job(
                name,
                data,
                repeat=repeat,
                attempts=attempts,
                backoff=backoff,
                missed_fires=missed_fires,
            )
        if missed_fires is not None or unique_for is not None:
            job_options.refuse_useless(missed_fires, unique_for, job_id)
        new = job_options.one(
            name, data, delay_ms, delay, attempts, backoff, job_id, self._max_delay_s
        )
        job: Job = self._add(new, unique_for).jobs[0]
        return job

    def add_unique(
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
        return self.add(
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

    def add_bulk(
        self, jobs: Sequence[JobDict | Mapping[str, Any]], *, unique_for: float | None = None
    ) -> list[Job]:
        """Add many jobs in one pipeline. Each is a dict with `name`, `data` and any option of `add`
        but `repeat` and `missed_fires`: those are for `upsert_repeatable_job`. `unique_for` is for
        all jobs. If one of them is wrong, nothing is sent, and the error names its index."""
        new = job_options.many(jobs, self._max_delay_s, unique_for=unique_for)
        return self.add_new_jobs(new, unique_for)

    def add_new_jobs(self, new: NewJobs, unique_for: float | None = None) -> list[Job]:
        """The same for jobs that are checked and encoded: for the tasks of an app."""
        return self._add(new, unique_for).jobs

    def add_flow(self, plan: FlowPlan, *, flow_id: str | None = None) -> Flow:
        """Begin a flow. With the `flow_id` of one that was begun, add what is missing of it."""
        new, options = EncodedFlow(plan, flow_id), self._settings.options(None)
        new.owner, new.job_kind = self, Job
        self._add_with_room(new, lambda: flows.begin(self._operations, new, options))
        return new.flow()

    def _add(self, new: NewJobs, unique_for: float | None) -> Added:
        new.owner, new.factory = self, job_factory
        options = self._settings.options(unique_for)
        if self._settings.on_full == "wait":
            return self._add_with_room(new, lambda: self._operations.add(new, options))
        return self._run(self._operations.add(new, options), self._durable)

    def _add_with_room(self, new: Immediate, make: Callable[[], Plan[T]]) -> T:
        self._settings.check_fits(new)
        waits_s = full_waits_s()
        while True:
            try:
                return self._run(make(), self._durable)
            except QueueFullError:
                if self._settings.on_full == "raise":
                    raise
                time.sleep(next(waits_s))

    def cancel_delayed(self, job_id: str) -> bool:
        """Take back a job that is delayed or waits for its retry; False if there was none. The id
        of a job that has run stays taken."""
        return self.cancel_delayed_bulk([job_id])[0]

    def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        """The same for many; for each whether there was one."""
        return self._run(self._operations.cancel(job_ids))

    def reschedule(
        self, job_id: str, *, delay_ms: DelayMsLike | None = None, delay: timedelta | None = None
    ) -> bool:
        """Give a job that is delayed or waits for its retry another due time; False if it is not
        delayed any more."""
        due_ms, is_relative = job_options.new_due(delay_ms, delay, self._max_delay_s)
        return self._run(self._operations.reschedule(job_id, due_ms, is_relative=is_relative))

    def free_job_id(self, job_id: str) -> bool:
        """Let an id be used again; False if it was free. Call it only when its job is gone."""
        return self._run(self._operations.free_job_id(job_id))

    # ── The dead-letter queue ───────────────────────────────────────────────────────────────────

    def peek_dlq(self, limit: int = 20) -> list[dict[str, Any]]:
        """The oldest dead jobs, as dicts; `iter_dlq` gives more of each, and all of them."""
        return [job.to_dict() for job in self._run(dlq.peek(self._keys, limit))]

    def iter_dlq(
        self,
        *,
        ids: Sequence[str] | None = None,
        name: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        where: Callable[[DeadJob], bool] | None = None,
    ) -> Iterator[DeadJob]:
        """Every dead job that meets all conditions, oldest first, page by page."""
        selection = Selection(ids, name, reason, since, until, where)
        pages = dlq.Pages(self._keys, selection)
        while not pages.are_over:
            yield from selection.jobs(self._run(pages.read()))

    def replay_dlq(
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
        return self._run(dlq.replay(self._operations, limit, selection, dry_run=dry_run))

    def delete_dlq(
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
        return self._run(dlq.delete(self._keys, limit, selection, dry_run=dry_run))

    # ── Repeatable jobs ─────────────────────────────────────────────────────────────────────────

    def upsert_repeatable_job(
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
        key = self._run(write(self._operations, spec))
        return Job(key, name, data, 0, time.time_ns() // 1_000_000, _queue=self)

    def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs, soonest fire first."""
        return self._run(repeatables.listing(self._keys, limit))

    def remove_repeatable_by_key(self, key: str) -> bool:
        """Remove a repeatable job; False if there was none."""
        return self._run(repeatables.remove(self._operations, key))

    def get_job_result(self, job_id: str) -> Any:
        """What the job's handler returned; None if nothing is stored."""
        return self.get_job_result_bulk([job_id])[0]

    def get_job_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one pipeline; an error names the job whose result is unreadable."""
        return self._run(results.decoded(self._keys, ids))

    def wait_for_result(
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
        return self._wait(ResultWait(job_id, timeout, poll_interval, since_ms))

    def wait_for_end(
        self,
        job_id: str,
        *,
        timeout: float | None = 30.0,
        poll_interval: float = 0.1,
        since_ms: int | None = None,
    ) -> Any:
        """The same, or None as soon as the job is done without a stored result. Its worker's events
        tell that; where they are off, only a stored result ends the wait."""
        return self._wait(EndWait(job_id, timeout, poll_interval, since_ms))

    def _wait(self, wait: ResultWait) -> Any:
        self._check_open()
        job_id = wait.job_id
        with self._ends.watch(job_id, wait.since_ms) as waiter:
            while True:
                end = waiter.end  # first: a result is stored before the end is announced
                if (value := self.get_job_result(job_id)) is not None:
                    return value
                if end is not None and end.is_dead:
                    self._run(raise_if_dead(self._keys, job_id, end))
                    waiter.forget(end)
                    end = None
                if (pause_s := wait.pause_s(end)) is None:
                    return None
                # An end is announced once; after that, poll for a late result.
                (waiter.wait if end is None else time.sleep)(pause_s)

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    def counts(self, group: str = DEFAULT_GROUP) -> Counts:
        """How many jobs wait, run, are delayed or dead, in one round trip."""
        return self._run(state.counts(self._keys, group))

    def pause(self) -> None:
        """Stop workers from reading new jobs, until `resume`; they finish those that they have."""
        self._run(state.pause(self._keys))

    def resume(self) -> None:
        self._run(state.resume(self._keys))

    def is_paused(self) -> bool:
        return self._run(state.is_paused(self._keys))

    def set_events_max_len(self, max_len: int | None) -> None:
        """Keep about so many events of this queue; None: the default of 100,000. Running processes
        follow within seconds; chasquimq's workers always keep 100,000."""
        self._run(retention.set_max_len(Log.events(self._keys), max_len))

    def get_events_retention(self) -> Retention:
        """How many events are kept, how many there are, and who reads them and how far."""
        return self._run(retention.look(Log.events(self._keys)))

    def forget_events_reader(self, reader: str) -> bool:
        """Keep no more events for a reader; False if there was none. If it lives it comes back."""
        return self._run(retention.forget(Log.events(self._keys), reader))

    def set_history_max_len(self, max_len: int | None) -> None:
        """The same for finished jobs, which workers keep if told to write history."""
        self._run(retention.set_max_len(Log.history(self._keys), max_len))

    def get_history_retention(self) -> Retention:
        """How many finished jobs are kept, how many there are, and who reads them and how far."""
        return self._run(retention.look(Log.history(self._keys)))

    def forget_history_reader(self, reader: str) -> bool:
        """Keep no more finished jobs for a reader; False if there was none."""
        return self._run(retention.forget(Log.history(self._keys), reader))

    def obliterate(self, *, force: bool = False) -> int:
        """Delete the queue with all it holds; how many keys were deleted, as far as is known.
        Without `force` it is refused while there are jobs: waiting, running, delayed or dead. A job
        that is added meanwhile may be deleted too."""
        return self._run(state.obliterate(self._keys, DEFAULT_GROUP, force=force))

    def _run(self, plan: Plan[T], connection: BlockingConnection | None = None) -> T:
        # Not a coroutine: one more on the way of each call is measurable.
        self._check_open()
        return (connection or self._connection).run(plan)

    def _check_open(self) -> None:
        if self._connection.is_closed:
            raise ClosedError(f"queue {self.name!r} is closed")
