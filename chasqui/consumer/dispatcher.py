"""The dispatcher: a fixed number of slots, each taking the next entry and awaiting its handler.

There is no task, queue or future per job. A slot whose handlers never wait runs one job after the
other and gives the loop a turn now and then. Each run has context variables of its own: a slot goes
on in a new task, with a fresh context, after a run that left its context changed.
"""

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable
from typing import Any, Final

from chasqui import clock
from chasqui._core.entry import Entry
from chasqui.consumer.acker import Acker
from chasqui.consuming.throttled_log import Complaints
from chasqui.consumer.config import ConsumerConfig
from chasqui.consuming.fate import (
    DECODE_FAILED,
    GONE,
    UNRECOVERABLE,
    Bury,
    Failure,
    Run,
    RunAgain,
    on_arrival,
    on_failure,
)
from chasqui.consuming.handlers import Handlers
from chasqui.consumer.holdings import Holdings, Slot
from chasqui.consumer.moves import Move
from chasqui.consumer.relocator import Relocator
from chasqui.consuming.runs import (
    NotBegunError,
    current_task,
    described,
    in_short,
    text_of,
    traceback_of,
    within,
)
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.errors import LeaseLostError, PayloadError, Retry, UnrecoverableError
from chasqui.events.writer import EventWriter
from chasqui.metrics import (
    DlqRouted,
    JobOutcome,
    MetricsSink,
    OutcomeKind,
    ReaderBatch,
    RetryScheduled,
)
from chasqui.model.words import count, some

logger = logging.getLogger(__name__)

#: Jobs that one slot runs in a row before the loop gets a turn.
TURN_JOBS: Final = 64
#: How often to see whether leases hold again.
LAPSED_POLL_S: Final = 0.05
#: How many failed runs, or dead jobs, with errors of one type are logged one by one.
TOLD_JOBS: Final = 10
#: How long a slot that ended stays closed, so that one that ends again and again costs little.
REOPEN_S: Final = 0.1
NO_HANDLER: Final = "no handler"


class Dispatcher:
    """Runs handlers on entries and sees to what becomes of them."""

    def __init__(
        self,
        config: ConsumerConfig,
        holdings: Holdings,
        handlers: Handlers,
        acker: Acker,
        relocator: Relocator,
        events: EventWriter | None,
        metrics: MetricsSink | None,
        *,
        queue: str,
        make_job: Callable[[Entry], Any],
        encode_result: Callable[[Any], bytes | None],
    ) -> None:
        self._config = config
        self._holdings = holdings
        self._handlers = handlers
        self._acker = acker
        self._relocator = relocator
        self._events = events
        self._metrics = metrics
        #: Whether anybody wants to know how long a run took.
        self._is_told = events is not None or metrics is not None or config.history
        self._queue = queue
        self._make_job = make_job
        self._encode_result = encode_result
        self.complaints = Complaints(logger, queue, burst=TOLD_JOBS)
        self._idle: list[asyncio.Future[None]] = []
        self._waking = 0
        self._is_stopping = False
        self.finished = 0
        #: Called when few entries are left waiting.
        self.on_low: Callable[[], None] = lambda: None
        #: Set when a handler asked the process to end.
        self.exit: BaseException | None = None
        self.on_exit: Callable[[], None] = lambda: None
        #: Called while the leases have lapsed and work waits for them.
        self.on_lapsed: Callable[[], None] = lambda: None
        #: Called when an entry that was lost is let go.
        self.on_let_go: Callable[[], None] = lambda: None
        #: Whether all tasks of the loop are being cancelled, and the slots' with them.
        self.is_ending: Callable[[], bool] = lambda: False
        self._tasks: set[asyncio.Task[None]] = set()
        #: Entries whose runs our end cut short, by their ids.
        self.cut_short: dict[bytes, Entry] = {}
        self._told_cut_short = 0

    # ── Entries come in ─────────────────────────────────────────────────────────────────────────

    def idle_slots(self) -> int:
        return len(self._idle)

    def offer(self, entries: list[Entry | None], is_fresh: bool) -> None:
        """Entries were delivered. Bad ones are buried here, the others wait for a slot."""
        try:
            self._sort(entries, is_fresh)
        finally:
            self._wake(1)

    def _sort(self, entries: list[Entry | None], is_fresh: bool) -> None:
        holdings, limits = self._holdings, self._config.limits
        waiting = holdings.waiting
        are_above = holdings.are_above(entries) or not is_fresh
        reclaimed = 0
        in_hand: set[bytes] | None = None
        gone: list[bytes] = []
        taken_over: list[Entry] = []
        for entry in entries:
            if entry is None:
                continue
            if are_above and entry.is_new:
                waiting.append(entry)
                continue
            if entry.fault == GONE:
                gone.append(entry.id)
                continue
            if is_fresh and (entry.idle_ms or not are_above):
                reclaimed += entry.deliveries > 0
                if in_hand is None:
                    in_hand = set(holdings.ids())
                if 0 < entry.idle_ms < HANDED_BACK_MS and entry.id not in in_hand:
                    taken_over.append(entry)
                if not are_above and entry.id in in_hand:
                    holdings.lose_to(entry)
                if entry.id in holdings.lost and holdings.make_way(entry.id):
                    in_hand.discard(entry.id)
            verdict = on_arrival(
                entry, limits, is_in_hand=in_hand is not None and entry.id in in_hand
            )
            if isinstance(verdict, Run):
                waiting.append(entry)
            elif isinstance(verdict, Bury):
                self._bury(entry, verdict, attempt=0)
        if gone:
            logger.error(
                "queue %s: %d entries were deleted from the stream while they were pending, "
                "and their jobs are lost: %s",
                self._queue,
                len(gone),
                ", ".join(entry_id.decode() for entry_id in gone[:5]),
                extra={"queue": self._queue, "entries": len(gone)},
            )
        if taken_over:
            ids = [entry.job_id or entry.id.decode() for entry in taken_over]
            self.complaints.warn(
                "queue %s: took over %s from workers that were lost: %s",
                self._queue,
                count(len(ids), "job"),
                some(ids),
                jobs=len(ids),
            )
        if self._metrics is not None and entries:
            self._metrics.reader_batch(ReaderBatch(len(entries), reclaimed))

    def _wake(self, count: int) -> None:
        while count > 0 and self._idle and self._waking < 2:
            future = self._idle.pop()
            if not future.done():
                self._waking += 1
                future.set_result(None)
                count -= 1

    # ── Slots ───────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Open the slots."""
        for _ in range(self._config.concurrency):
            slot = Slot()
            self._holdings.slots.append(slot)
            self._open(slot)

    def _open(self, slot: Slot) -> None:
        if self._is_stopping:
            return
        context = slot.context.copy()
        task = asyncio.get_running_loop().create_task(self._work(slot, context), context=context)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._closed(slot, task))

    def _closed(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """A slot ended. If that was not us, it was a handler that cancelled the task it had run in,
        or an error of ours: the slot is opened again, for nobody else would serve in its place."""
        self._tasks.discard(task)
        if self._is_our_end():
            return
        if not task.cancelled() and task.exception() is None:
            self._open(slot)  # it ended for the sake of a fresh context
            return
        error = None if task.cancelled() else task.exception()
        self.complaints.warn(
            "queue %s: a slot ended and is opened again: %s",
            self._queue,
            "it was cancelled" if error is None else in_short(error),
        )
        slot.entry, slot.entries = None, ()
        self.on_let_go()
        asyncio.get_running_loop().call_later(REOPEN_S, self._open, slot)

    def _is_our_end(self) -> bool:
        return self._is_stopping or self.is_ending()

    async def stop(self, deadline_s: float) -> None:
        """Start nothing more, let what runs finish; what the deadline cuts short is told."""
        self._is_stopping = True
        self._handlers.stop()
        while self._idle:
            future = self._idle.pop()
            if not future.done():
                future.set_result(None)
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=max(0.0, deadline_s))
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending, timeout=1.0)
        # Those that take no notice run until the process ends.
        self.cut_short |= {entry.id: entry for entry in self._holdings.running_entries()}
        self._tell_cut_short()

    def _tell_cut_short(self) -> None:
        entries = list(self.cut_short.values())[self._told_cut_short :]
        self._told_cut_short += len(entries)
        if entries:
            logger.warning(
                "queue %s: %s cut short by the end of the worker, and will run again: %s",
                self._queue,
                f"{count(len(entries), 'job')} {'was' if len(entries) == 1 else 'were'}",
                some([f"{entry.job_id} ({entry.name})" for entry in entries]),
                extra={"queue": self._queue, "jobs": len(entries)},
            )

    async def _work(self, slot: Slot, context: contextvars.Context) -> None:
        """Run one job after the other, until we stop or a run has changed the task's context: a
        variable cannot be unset without its token, so the slot then continues in another task."""
        holdings, fresh = self._holdings, slot.context
        waiting = holdings.waiting
        in_a_row = 0
        while not self._is_stopping:
            if not waiting:
                await self._rest()
                in_a_row = 0
                continue
            entry = waiting.popleft()
            if len(waiting) == holdings.low_water:
                self.on_low()
            if waiting and self._idle and self._waking < 2:
                self._wake(1)
            try:
                await self._run(slot, entry)
            except Exception as error:
                # Ours, not the handler's: the entry is reclaimed when its lease is over.
                slot.entry = None
                self.complaints.fail(
                    "queue %s: entry %s could not be seen to, and runs again when its lease is "
                    "over: %s",
                    self._queue,
                    entry.id.decode(),
                    in_short(error),
                    error=error,
                    **self._fields(entry),
                )
            try:
                if context != fresh:  # contexts that share all they have are equal at a glance
                    return
            except Exception:  # raised by a value that was set and is compared
                return
            in_a_row += 1
            if in_a_row >= TURN_JOBS:
                in_a_row = 0
                await asyncio.sleep(0)

    async def _rest(self) -> None:
        """Wait for entries."""
        if len(self._idle) == self._config.concurrency - 1:
            self._acker.run_once()  # nothing runs: nobody to share the command with
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        self.on_low()
        try:
            await future
        finally:
            if future.cancelled():
                self._idle = [other for other in self._idle if other is not future]
            elif self._waking:
                self._waking -= 1

    async def _run(self, slot: Slot, entry: Entry) -> None:
        """One job from its entry to its end."""
        name = entry.name
        run, limit_s = self._handlers.find(name)
        if run is None:
            self._bury(entry, Bury(UNRECOVERABLE, NO_HANDLER), attempt=entry.attempt + 1)
            return
        events = self._events
        holdings = self._holdings
        slot.started_ns = started_ns = clock.boot_ns()
        slot.name = name
        slot.entry = entry
        if (holdings.lost or started_ns > holdings.alive_until_ns) and not await self._is_ours(
            entry
        ):
            slot.entry = None
            return
        try:
            job = self._make_job(entry)
            if events is not None:
                events.active(entry)
            result = await (run(job) if limit_s is None else within(limit_s, run(job), self._queue))
        except UnreadableError as error:
            self._refuse(entry, error)
            slot.entry = None
            return
        except NotBegunError:
            slot.entry = None
            return
        except BaseException as error:
            try:
                if not self._failed(entry, error, started_ns):
                    raise
            finally:
                slot.entry = None
            return
        self._returned(entry, job.id, result, started_ns)
        slot.entry = None

    async def _is_ours(self, entry: Entry) -> bool:
        """Whether the entry is to be run, once that is known; else somebody else owns it now, or it
        is to be handed back."""
        return await self._leases_hold() and not self._is_let_go(entry)

    async def _leases_hold(self) -> bool:
        """Wait until leases are known to hold again, after a pause that was longer than they are;
        False if we stop before that."""
        while not self._holdings.is_alive:
            if self._is_stopping:
                return False
            self.on_lapsed()
            await asyncio.sleep(LAPSED_POLL_S)
        return True

    def _is_let_go(self, entry: Entry) -> bool:
        """Whether the entry was lost; then that is over with, and its new owner answers for it."""
        lost = self._holdings.lost
        if entry.id not in lost:
            return False
        lost.discard(entry.id)
        self.on_let_go()
        return True

    # ── Runs that are over ──────────────────────────────────────────────────────────────────────

    def _returned(self, entry: Entry, job_id: str, result: Any, started_ns: int) -> None:
        """See to a run that returned."""
        try:
            encoded = self._encode_result(result)
        except Exception as error:
            self._failed(entry, error, started_ns, UNSTORABLE)
            return
        self.finished += 1
        if self._holdings.lost and self._is_let_go(entry):
            return  # its new owner runs it, and says how it ended
        if encoded is None and not self._is_told:
            self._acker.done(entry.id)
            return
        duration_us = (clock.boot_ns() - started_ns) // 1000
        if encoded is None:
            self._acker.done_and_told(entry, duration_us)
        else:
            self._acker.done_with_result(entry, duration_us, job_id, encoded)

    def _failed(
        self,
        entry: Entry,
        error: BaseException,
        started_ns: int,
        failure: Failure | None = None,
    ) -> bool:
        """See to a failed run; False if the exception is our own shutdown's, not the handler's.
        `failure` says what it means, where the exception does not."""
        if not isinstance(error, Exception):
            task = current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                if self._is_our_end():
                    self.cut_short[entry.id] = entry
                    return False
                while task.uncancel():  # by the handler, now or in a run before: the slot goes on
                    pass
            if isinstance(error, GeneratorExit) and task not in self._tasks:
                return False  # the loop is gone, and the slot is taken apart
        self.finished += 1
        duration_us = (clock.boot_ns() - started_ns) // 1000
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # The handler wants the process to end. That is a failed run like others, so that a
            # job that ends every process that takes it does not do so for ever.
            logger.warning(
                "queue %s: job %s (%s) raised %r: the worker stops",
                self._queue,
                entry.job_id,
                entry.name,
                error,
                extra=self._fields(entry),
            )
            self.exit = error
            self.on_exit()
        attempt = entry.attempt + 1
        kind = OutcomeKind.ERR if isinstance(error, Exception) else OutcomeKind.PANIC
        if self._metrics is not None:
            self._metrics.job_outcome(JobOutcome(kind, attempt, duration_us, entry.name))
        if self._events is not None:
            raised, text = type(error).__name__, text_of(error)
            self._events.failed(entry, raised, text, duration_us)
        if self._is_let_go(entry):
            return True  # its new owner runs it
        if isinstance(error, LeaseLostError):
            return True  # not by our word: its lease runs out, so that each time is a delivery
        failure = failure or failure_of(error)
        verdict = on_failure(entry, failure, self._config.limits, random.random())
        if isinstance(verdict, RunAgain):
            self._run_again(entry, verdict, error)
        else:
            self._bury(entry, verdict, attempt=attempt, error=error, duration_us=duration_us)
        return True

    def _run_again(self, entry: Entry, verdict: RunAgain, error: BaseException) -> None:
        def moved() -> None:
            if self._metrics is not None:
                self._metrics.retry_scheduled(
                    RetryScheduled(verdict.attempt + 1, verdict.delay_ms, entry.name)
                )
            if self._events is not None:
                self._events.retry_scheduled(entry, verdict.attempt + 1, verdict.delay_ms)
            if isinstance(error, Retry):  # no failure: the handler asked for it
                text = "queue %s: job %s (%s) asked in run %d of %d to run again, in %d ms: %s"
                self.complaints.inform(text, about=about)
            else:
                text = "queue %s: job %s (%s) failed, run %d of %d, and runs again in %d ms: %s"
                kind = type(error)
                if not self.complaints.leaves_out(text, kind, about):
                    self.complaints.warn(text, about=about, kind=kind, raised=error)

        def about() -> tuple[tuple[Any, ...], dict[str, Any]]:
            most = self._config.limits.attempts_of(entry)
            run = self._queue, entry.job_id, entry.name, verdict.attempt, most
            return (*run, verdict.delay_ms, in_short(error)), self._fields(entry) | {
                "backoff_ms": verdict.delay_ms
            }

        self._relocator.move(
            Move(entry, verdict.attempt, delay_ms=verdict.delay_ms, on_moved=moved)
        )

    def _refuse(self, entry: Entry, error: "UnreadableError") -> None:
        """Bury an entry whose payload cannot be read: it never ran."""
        self._bury(entry, Bury(DECODE_FAILED, str(error)), attempt=0)

    def _bury(
        self,
        entry: Entry,
        verdict: Bury,
        *,
        attempt: int,
        error: BaseException | None = None,
        duration_us: int | None = None,
    ) -> None:
        def moved() -> None:
            if self._metrics is not None:
                self._metrics.dlq_routed(DlqRouted(verdict.reason, attempt, entry.name))
            text = "queue %s: job %s (%s) went to the dead-letter queue, %s: %s"
            kind = verdict.reason if error is None else type(error)
            if not self.complaints.leaves_out(text, kind, about):
                self.complaints.fail(text, about=about, kind=kind, raised=error)

        def about() -> tuple[tuple[Any, ...], dict[str, Any]]:
            reason, why = verdict.reason, verdict.detail or "it never ran"
            if error is not None:
                reason += f" in run {attempt} of {self._config.limits.attempts_of(entry)}"
                detail = f"{verdict.detail}: " if verdict.detail else ""
                why = detail + in_short(error)
            facts = self._queue, entry.job_id, entry.name, reason, why
            return facts, self._fields(entry) | {"reason": verdict.reason}

        self._relocator.move(
            Move(
                entry,
                entry.attempt + (error is not None),
                attempt=attempt,
                reason=verdict.reason,
                detail=verdict.detail,
                error=None if error is None else described(error),
                traceback=None if error is None else traceback_of(error),
                duration_us=duration_us,
                on_moved=moved,
            )
        )

    def _fields(self, entry: Entry) -> dict[str, Any]:
        """What a log record about an entry's run carries."""
        return {
            "queue": self._queue,
            "job_id": entry.job_id,
            "job_name": entry.name,
            "attempt": entry.attempt + 1,
        }


def failure_of(error: BaseException) -> Failure:
    """What an exception says about the run that raised it."""
    if isinstance(error, UnrecoverableError):
        return Failure(is_final=True, reason=UNRECOVERABLE)
    if isinstance(error, Retry):
        return Failure(delay_ms=error.delay_ms)
    return _PLAIN


_PLAIN: Final = Failure()
#: What the handler did is done: it must not run again for the sake of what it returned.
UNSTORABLE: Final = Failure(
    is_final=True, detail="the handler ran to its end; its result could not be stored"
)


class UnreadableError(PayloadError):
    """The envelope is good and the payload in it is not: no run will ever read it."""
