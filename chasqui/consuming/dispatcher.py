"""The dispatcher: a fixed number of slots, which take entries and await their handlers.

No job has a task, a queue or a future of its own. A slot whose handlers never wait runs one job
after the other and gives the loop a turn now and then. Each run has its own context variables: a
slot continues in a new task, with a fresh context, after a run that changed the context.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from typing import Any, Final

from chasqui._core.entry import Entry
from chasqui.consuming.acker import Acker
from chasqui.consuming.arrivals import Arrivals
from chasqui.consuming.config import ConsumerConfig
from chasqui.consuming.current import CURRENT
from chasqui.consuming.failures import UNSTORABLE, Failures
from chasqui.consuming.fate import UNRECOVERABLE, Bury, Failure
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.held import Held, Slot
from chasqui.consuming.relocator import Relocator
from chasqui.consuming.runs import NotBegunError, current_task, in_short, run_with_timeout
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import LeaseLostError, UnreadableError
from chasqui.events.writer import EventWriter
from chasqui.metrics import MetricsSink
from chasqui.model import clock
from chasqui.model.keys import STEP_MARK
from chasqui.model.steps import StepId, step_of
from chasqui.model.words import count, some

logger = logging.getLogger(__name__)

#: Jobs that one slot runs in a row before the loop gets a turn.
TURN_JOBS: Final = 64
#: How often to check whether leases hold again.
LAPSED_POLL_S: Final = 0.05
#: How many failed runs, or dead jobs, with errors of one type are logged one by one.
LOGGED_JOBS: Final = 10
#: How long a slot that ended by mistake stays closed, so that one that keeps ending costs little.
REOPEN_S: Final = 0.1
NO_HANDLER: Final = "no handler"


class Dispatcher:
    """Runs handlers on entries, and passes on how each run ended."""

    def __init__(
        self,
        config: ConsumerConfig,
        held: Held,
        handlers: Handlers,
        acker: Acker,
        relocator: Relocator,
        events: EventWriter | None,
        metrics: MetricsSink | None,
        *,
        queue: str,
        make_job: Callable[[Entry], Any],
        encode_result: Callable[[Any], bytes | None],
        encode_step_result: Callable[[Any], bytes | None],
        on_exit: Callable[[], None],
    ) -> None:
        self._config = config
        self._held = held
        self._handlers = handlers
        self._acker = acker
        self._events = events
        #: Whether it matters how long a run took.
        self._is_timed = events is not None or metrics is not None or config.history
        self._queue = queue
        self._make_job = make_job
        self._encode_result = encode_result
        self._encode_step_result = encode_step_result
        self.log = ThrottledLog(logger, queue, burst=LOGGED_JOBS)
        self._failures = Failures(config.limits, relocator, events, metrics, self.log)
        self._arrivals = Arrivals(held, config.limits, self._failures, metrics, self.log)
        self._idle = held.idle
        self._waking = 0
        self._is_stopping = False
        #: Called when the last run is over and nothing waits.
        self.on_quiet: Callable[[], None] | None = None
        #: Set when a handler asked the process to end.
        self.exit: BaseException | None = None
        self._on_exit = on_exit
        #: Runs the worker: when it is cancelled, so are the tasks of the slots.
        self._owner: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Entries whose runs our end cut short, by their ids.
        self.cut_short: dict[bytes, Entry] = {}
        self._logged_cut_short = 0

    # ── Entries come in ─────────────────────────────────────────────────────────────────────────

    def offer(self, entries: list[Entry | None], is_fresh: bool) -> None:
        """Take delivered entries: bad ones are buried, the others wait for a slot."""
        try:
            self._arrivals.sort(entries, is_fresh)
        finally:
            self._wake()

    def _wake(self) -> None:
        """Wake a resting slot, unless two wake up already: each wakes another if there is more."""
        while self._idle and self._waking < 2:
            future = self._idle.pop()
            if not future.done():
                self._waking += 1
                future.set_result(None)
                return

    # ── Slots ───────────────────────────────────────────────────────────────────────────────────

    def start(self, owner: asyncio.Task[Any]) -> None:
        """Open the slots; `owner` is the task that runs the worker."""
        self._owner = owner
        for _ in range(self._config.concurrency):
            slot = Slot()
            self._held.slots.append(slot)
            self._open(slot)

    def _open(self, slot: Slot) -> None:
        if self._is_stopping:
            return
        context = slot.context.copy()
        task = asyncio.get_running_loop().create_task(self._work(slot, context), context=context)
        slot.task, slot.has_set_current = task, False
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._closed(slot, task))

    def _closed(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """Open a slot again that has ended, unless the worker ends. Its last run changed the
        context, or a handler cancelled the task of its slot, or the slot failed by our fault."""
        self._tasks.discard(task)
        if self._is_ending():
            return
        if not task.cancelled() and task.exception() is None:
            self._open(slot)  # it ended to get a fresh context
            return
        error = None if task.cancelled() else task.exception()
        self.log.warning(
            "queue %s: a slot ended and is opened again: %s",
            self._queue,
            "it was cancelled" if error is None else in_short(error),
        )
        slot.entry, slot.entries = None, ()
        self._held.must_recover = True
        asyncio.get_running_loop().call_later(REOPEN_S, self._open, slot)

    def _is_ending(self) -> bool:
        return self._is_stopping or (self._owner is not None and self._owner.cancelling() > 0)

    async def stop(self, deadline_s: float) -> None:
        """Start nothing more and let running handlers finish; cancel them at the deadline."""
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
        # Those that ignore it run until the process ends.
        self.cut_short |= {entry.id: entry for entry in self._held.running_entries()}
        self._log_cut_short()

    def _log_cut_short(self) -> None:
        entries = list(self.cut_short.values())[self._logged_cut_short :]
        self._logged_cut_short += len(entries)
        if entries:
            logger.warning(
                "queue %s: %s cut short by the end of the worker, and will run again: %s",
                self._queue,
                f"{count(len(entries), 'job')} {'was' if len(entries) == 1 else 'were'}",
                some([f"{entry.job_id} ({entry.name})" for entry in entries]),
                extra={"queue": self._queue, "jobs": len(entries)},
            )

    async def _work(self, slot: Slot, context: contextvars.Context) -> None:
        """Run one job after the other until we stop, or until a run has changed the context of the
        task: a variable cannot be unset without its token, so the slot needs another task then."""
        held, fresh = self._held, slot.context
        waiting = held.waiting
        in_a_row = 0
        while not self._is_stopping:
            if not waiting:
                await self._rest()
                in_a_row = 0
                continue
            entry = waiting.popleft()
            if len(waiting) == held.low_water:
                held.room.set()
            if waiting and self._idle and self._waking < 2:
                self._wake()
            try:
                await self._run(slot, entry)
            except Exception as error:
                # Our fault, not the handler's. The entry is taken over when its lease is over.
                slot.entry = None
                self.log.error(
                    "queue %s: entry %s could not be settled, and runs again when its lease is "
                    "over: %s",
                    self._queue,
                    entry.id.decode(),
                    in_short(error),
                    error=error,
                    **self._failures.fields(entry),
                )
            slot.job = None
            if slot.has_set_current:
                slot.has_set_current = False
                CURRENT.set(None)
            try:
                if context != fresh:  # cheap: contexts that share all their variables are equal
                    return
            except Exception:  # raised by the comparison of a value that was set
                return
            in_a_row += 1
            if in_a_row >= TURN_JOBS:
                in_a_row = 0
                await asyncio.sleep(0)

    async def _rest(self) -> None:
        """Wait for entries."""
        if len(self._idle) == self._config.concurrency - 1:
            self._acker.run_once()  # nothing else runs whose ack could share the command
            if self.on_quiet is not None:
                self.on_quiet()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        self._held.room.set()
        try:
            await future
        finally:
            if future.cancelled():
                if future in self._idle:
                    self._idle.remove(future)
            elif self._waking:
                self._waking -= 1

    async def _run(self, slot: Slot, entry: Entry) -> None:
        """Run one job from its entry to its end."""
        name = entry.name
        run, limit_s = self._handlers.find(name)
        if run is None:
            self._failures.bury(entry, Bury(UNRECOVERABLE, NO_HANDLER), attempt=entry.attempt + 1)
            return
        events = self._events
        held = self._held
        slot.started_ns = started_ns = clock.boot_ns()
        slot.name = name
        slot.entry = entry
        if (held.lost or started_ns > held.alive_until_ns) and not await self._is_ours(entry):
            slot.entry = None
            return
        try:
            slot.job = job = self._make_job(entry)
            if events is not None:
                events.active(entry)
            result = await (
                run(job) if limit_s is None else run_with_timeout(limit_s, run(job), self._queue)
            )
        except UnreadableError as error:
            self._failures.bury_unreadable(entry, error)
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
        """Wait until it is known whether we may run the entry. If not, it has another owner, or
        the drain gives it back."""
        return await self._leases_hold() and not self._drop_if_lost(entry)

    async def _leases_hold(self) -> bool:
        """Wait until the leases are renewed, after a pause that was longer than they last; False
        if we stop before that."""
        while not self._held.is_alive:
            if self._is_stopping:
                return False
            self._held.must_renew.set()
            await asyncio.sleep(LAPSED_POLL_S)
        return True

    def _drop_if_lost(self, entry: Entry) -> bool:
        """True if the entry was lost: then forget it, for its new owner settles it."""
        lost = self._held.lost
        if entry.id not in lost:
            return False
        lost.discard(entry.id)
        self._held.must_recover = True
        return True

    # ── Runs that are over ──────────────────────────────────────────────────────────────────────

    def _returned(self, entry: Entry, job_id: str, result: Any, started_ns: int) -> None:
        """Settle a run that returned."""
        # Of a ULID it is never true: what has no part in a flow pays one comparison.
        if job_id > STEP_MARK and (place := step_of(entry.job_id)) is not None:
            self._step_returned(entry, place, result, started_ns)
            return
        try:
            encoded = self._encode_result(result)
        except Exception as error:
            self._failed(entry, error, started_ns, UNSTORABLE)
            return
        held = self._held
        held.finished += 1
        if held.lost and self._drop_if_lost(entry):
            return  # its new owner runs it, and reports how it ended
        if encoded is None and not self._is_timed:
            self._acker.done(entry.id)
            return
        duration_us = (clock.boot_ns() - started_ns) // 1000
        if encoded is None:
            self._acker.done_with_report(entry, duration_us)
        else:
            self._acker.done_with_result(entry, duration_us, job_id, encoded)

    def _step_returned(self, entry: Entry, place: StepId, result: Any, started_ns: int) -> None:
        """The same for a step of a flow: its result is always wanted."""
        try:
            encoded = self._encode_step_result(result)
        except Exception as error:
            self._failed(entry, error, started_ns, UNSTORABLE)
            return
        self._held.finished += 1
        if not self._drop_if_lost(entry):
            duration_us = (clock.boot_ns() - started_ns) // 1000
            stores = self._config.store_results
            self._acker.done_step(entry, place, duration_us, encoded, stores=stores)

    def _failed(
        self,
        entry: Entry,
        error: BaseException,
        started_ns: int,
        failure: Failure | None = None,
    ) -> bool:
        """Settle a failed run; False if the exception comes from our own shutdown and not from the
        handler. `failure` is what the exception means, where its type does not say."""
        if not isinstance(error, Exception):
            task = current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                if self._is_ending():
                    self.cut_short[entry.id] = entry
                    return False
                # A handler cancelled the task of the slot, in this run or an earlier one.
                while task.uncancel():
                    pass
            if isinstance(error, GeneratorExit) and task not in self._tasks:
                return False  # the loop is gone, and Python closes the coroutine
        self._held.finished += 1
        duration_us = (clock.boot_ns() - started_ns) // 1000
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # The handler wants the process to end. That counts as a failed run, so that a job
            # cannot end every process that takes it for ever.
            logger.warning(
                "queue %s: job %s (%s) raised %r: the worker stops",
                self._queue,
                entry.job_id,
                entry.name,
                error,
                extra=self._failures.fields(entry),
            )
            self.exit = error
            self._on_exit()
        self._failures.report(entry, error, duration_us)
        # The new owner of a lost entry runs it. One whose handler raised LeaseLostError is left to
        # lapse, so that each time counts as a delivery.
        if not self._drop_if_lost(entry) and not isinstance(error, LeaseLostError):
            self._failures.settle(entry, error, duration_us, failure)
        return True
