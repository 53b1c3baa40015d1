"""The same queue without an event loop: for scripts, threads, web workers, forked children.

Nothing runs between two calls, no thread and no loop; see blocking.py for what a call does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from chasqui import dlq, drafts, repeatables, retention
from chasqui.adding import (
    Added,
    AddOptions,
    AddSettings,
    Batch,
    Durable,
    OnFull,
    check_request_timeout,
    full_waits_s,
)
from chasqui.blocking import BlockingConnection
from chasqui.model.config import AnyCredentialProvider, Endpoint, check_credential_provider
from chasqui.dlq import DeadJob, Selection
from chasqui.producing.job_options import BackoffLike, DelayMsLike, JobEntry, MissedFiresLike, RepeatLike
from chasqui.producing.shared_wait import BlockingDurableConnection
from chasqui.events.job_end_watcher import GRACE_LOOKS, GRACE_S, raise_if_dead
from chasqui.errors import ClosedError, QueueFullError
from chasqui.events.blocking_job_end_watcher import Follower
from chasqui.model.job import Job, RepeatableMeta
from chasqui.model.keys import DEFAULT_GROUP, Keys, check_job_id
from chasqui.plans import Counts, Plans, ResultWait
from chasqui.transport.recovery import REQUEST_TIMEOUT_S
from chasqui.events.stream import CLIENT_NAME
from chasqui.events.stream import BlockingQueueEvents as QueueEvents
from chasqui.transport.request import Plan
from chasqui.managing.retention import Log, Retention
from chasqui.producing.tracing import Tracing, add, check_tracing

__all__ = ["Queue", "QueueEvents"]

T = TypeVar("T")

#: So many connections are kept for threads that wait for jobs, while none of them does.
_SPARE_CONNECTIONS = 16


class Queue:
    """Adds jobs to a named queue and looks after them: `chasqui.Queue`, without `await`.

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
        keys = Keys(name)
        self.name = name
        self._settings = AddSettings(max_backlog, on_full, durable)
        check_tracing(tracing)
        check_credential_provider(credential_provider)
        self._tracing = tracing
        self._credential_provider = credential_provider
        # Connections for threads that wait for jobs: those that no thread uses right now.
        self._spare: list[BlockingConnection] = []
        self._plans = Plans(keys, max_stream_len)
        self._max_delay_s = drafts.check_max_delay(max_delay_secs)
        endpoint = Endpoint.parse(redis_url, tls=tls)
        options: dict[str, Any] = {
            "key": keys.stream,
            "client_name": "chasqui-producer",
            "credential_provider": credential_provider,
            "request_timeout_s": check_request_timeout(request_timeout_s),
        }
        self._connection = BlockingConnection(endpoint, **options)
        #: For adds that wait for the disk or a replica: nothing else waits behind them.
        self._durable: BlockingConnection | None = None
        if self._settings.durable:
            self._durable = BlockingDurableConnection(endpoint, **options)

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._connection.close()
        if self._durable is not None:
            self._durable.close()
        self._close_spare(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Add one job. With a `job_id` that another job had within `unique_for` seconds nothing is
        added, and the returned job's `is_new` is False. Unless told otherwise an id stays taken for
        a day, and that of a delayed job until an hour past its due time."""
        if repeat is not None:
            drafts.refuse_unrepeated(delay_ms, delay, unique_for)
            return self.upsert_repeatable_job(
                name,
                data,
                repeat=repeat,
                attempts=attempts,
                backoff=backoff,
                missed_fires=missed_fires,
            )
        drafts.refuse_useless(missed_fires, unique_for, job_id)
        batch = drafts.single(
            name,
            data,
            delay_ms=delay_ms,
            delay=delay,
            attempts=attempts,
            backoff=backoff,
            job_id=job_id,
            max_delay_s=self._max_delay_s,
        )
        options = self._settings.options(unique_for)
        return self._add(batch, options).jobs[0]

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
        self, jobs: Sequence[JobEntry | Mapping[str, Any]], *, unique_for: float | None = None
    ) -> list[Job]:
        """Add many jobs in one pipeline; each entry has `name`, `data` and any option of `add` but
        `repeat` and `missed_fires`, which `upsert_repeatable_job` takes. `unique_for` is for all.

        One bad entry and nothing is sent; the error names its index.
        """
        batch = drafts.bulk(jobs, self._max_delay_s, unique_for=unique_for)
        added = self._add(batch, self._settings.options(unique_for))
        return added.jobs

    def _add(self, batch: Batch, options: AddOptions) -> Added:
        self._settings.check_fits(batch)
        waits_s = full_waits_s()
        while True:
            try:
                return self._run(add(self._tracing, self._plans, batch, options), self._durable)
            except QueueFullError:
                if self._settings.on_full == "raise":
                    raise
                time.sleep(next(waits_s))

    # ── Delayed jobs ────────────────────────────────────────────────────────────────────────────

    def cancel_delayed(self, job_id: str) -> bool:
        """Take a job back that is delayed or waits for its retry; False if there was none.

        The id of one that has run stays taken.
        """
        return (self.cancel_delayed_bulk([job_id]))[0]

    def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        """The same for many; per job whether there was one."""
        return self._run(self._plans.cancel(job_ids))

    def reschedule(
        self, job_id: str, *, delay_ms: DelayMsLike | None = None, delay: timedelta | None = None
    ) -> bool:
        """Give a job that is delayed or waits for its retry another due time; False if it is not
        delayed any more."""
        due_ms, is_relative = drafts.new_due(delay_ms, delay, self._max_delay_s)
        plan = self._plans.reschedule(job_id, due_ms, is_relative=is_relative)
        return self._run(plan)

    def free_job_id(self, job_id: str) -> bool:
        """Let an id be used again, whatever became of the job that took it; False if it was free.

        That job stays where it is: do it where you know that it is gone."""
        return self._run(self._plans.free_job_id(job_id))

    # ── The dead-letter queue ───────────────────────────────────────────────────────────────────

    def peek_dlq(self, limit: int = 20) -> list[dict[str, Any]]:
        """The oldest dead jobs, as dicts; `iter_dlq` gives more of each, and all of them."""
        found = self._run(dlq.peek(self._plans.keys, limit))
        return [job.to_dict() for job in found]

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
        """Every dead job that is meant, oldest first, page by page."""
        selection = Selection(ids, name, reason, since, until, where)
        pages = dlq.Pages(self._plans.keys, selection)
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
        """Run dead jobs again, oldest first, with their attempts reset; how many were moved.

        Only those that meet every condition given; with `dry_run` they are counted, not moved.
        """
        selection = Selection(ids, name, reason, since, until, where)
        return self._run(dlq.replay(self._plans, limit, selection, dry_run=dry_run))

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
        """Delete dead jobs for good, oldest first; how many, less those whose answer was lost.
        Their ids may be used again at once."""
        selection = Selection(ids, name, reason, since, until, where)
        return self._run(dlq.delete(self._plans.keys, limit, selection, dry_run=dry_run))

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
        key = self._run(repeatables.upsert(self._plans, spec))
        return Job(key, name, data, 0, time.time_ns() // 1_000_000)

    def get_repeatable_jobs(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs, soonest fire first."""
        return self._run(repeatables.listing(self._plans.keys, limit))

    def remove_repeatable_by_key(self, key: str) -> bool:
        """Forget a repeatable job; False if there was none."""
        return self._run(repeatables.remove(self._plans, key))

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def get_job_result(self, job_id: str) -> Any:
        """What the job's handler returned; None if nothing is stored."""
        return (self.get_job_result_bulk([job_id]))[0]

    def get_job_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one pipeline; the error names a job whose result is unreadable."""
        return self._run(self._plans.results(ids))

    def wait_for_result(
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
        wait = ResultWait(job_id, timeout, poll_interval, since_ms)
        with self._following(job_id, since_ms) as follower:
            while True:
                end = follower.end
                if (value := self.get_job_result(job_id)) is not None:
                    return value
                if end is not None and end.is_dead:
                    self._run(raise_if_dead(self._plans.keys, job_id, end))
                    end = follower.end = None
                # Done is told once; who wants a result all the same looks on by himself.
                (follower.wait if end is None else time.sleep)(wait.next_s())

    def wait_for_end(
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
        wait = ResultWait(job_id, timeout, poll_interval, since_ms)
        looks = GRACE_LOOKS
        with self._following(job_id, since_ms) as follower:
            while True:
                end = follower.end
                if (value := self.get_job_result(job_id)) is not None:
                    return value
                if end is None:
                    follower.wait(wait.next_s(warns=False))
                elif end.is_dead:
                    self._run(raise_if_dead(self._plans.keys, job_id, end))
                    follower.end = None
                elif looks == 0:
                    return None
                else:
                    looks -= 1
                    time.sleep(GRACE_S)

    @contextmanager
    def _following(self, job_id: str, since_ms: int | None) -> Iterator[Follower]:
        """A reader of the job's events, on a connection that no other thread uses meanwhile."""
        try:
            connection = self._spare.pop()
        except IndexError:
            connection = BlockingConnection(
                self._connection.endpoint,
                key=self._plans.keys.events,
                client_name=CLIENT_NAME,
                credential_provider=self._credential_provider,
            )
        try:
            yield Follower(connection, self._plans.keys, job_id, since_ms)
        finally:
            self._spare.append(connection)
            self._close_spare(0 if self.is_closed else _SPARE_CONNECTIONS)

    def _close_spare(self, left: int) -> None:
        """Keep so many. Other threads may take and close some meanwhile."""
        while len(self._spare) > left:
            with suppress(IndexError):
                self._spare.pop().close()

    # ── The queue as a whole ────────────────────────────────────────────────────────────────────

    def counts(self, group: str = DEFAULT_GROUP) -> Counts:
        """How many jobs wait, run, are delayed or dead, in one round trip."""
        return Counts.of(self._run(self._plans.counts(group)))

    def pause(self) -> None:
        """Let workers read nothing new, until `resume`; what they have, they finish."""
        self._run(self._plans.pause())

    def resume(self) -> None:
        self._run(self._plans.resume())

    def is_paused(self) -> bool:
        return self._run(self._plans.is_paused())

    def set_events_max_len(self, max_len: int | None) -> None:
        """Keep about so many events of this queue, whoever writes them; None: the default of
        100,000. Processes that run take it over within seconds. chasquimq's workers know nothing of
        it: they keep 100,000."""
        self._run(retention.set_max_len(Log.events(self._plans.keys), max_len))

    def get_events_retention(self) -> Retention:
        """How many events are kept, how many there are, and who reads them and how far."""
        return self._run(retention.look(Log.events(self._plans.keys)))

    def forget_events_reader(self, reader: str) -> bool:
        """Hold no events back for a reader any more, and do not list it; False if there was none.
        One that lives is back with its next sign of life."""
        return self._run(retention.forget(Log.events(self._plans.keys), reader))

    def set_history_max_len(self, max_len: int | None) -> None:
        """Keep about so many finished jobs, where workers write history; None: the default of
        100,000."""
        self._run(retention.set_max_len(Log.history(self._plans.keys), max_len))

    def get_history_retention(self) -> Retention:
        """How many finished jobs are kept, how many there are, and who reads them and how far."""
        return self._run(retention.look(Log.history(self._plans.keys)))

    def forget_history_reader(self, reader: str) -> bool:
        """Hold no finished jobs back for a reader any more; False if there was none."""
        return self._run(retention.forget(Log.history(self._plans.keys), reader))

    def obliterate(self, *, force: bool = False) -> int:
        """Delete the queue with all it holds; the number of keys deleted, as far as it was told.

        Without `force` it is refused while there are jobs: waiting, running, delayed or dead. A job
        that is added while it works may be deleted too.
        """
        return self._run(self._plans.obliterate(DEFAULT_GROUP, force=force))

    def _run(self, plan: Plan[T], connection: BlockingConnection | None = None) -> T:
        if self._connection.is_closed:
            raise ClosedError(f"queue {self.name!r} is closed")
        return (connection or self._connection).run(plan)
