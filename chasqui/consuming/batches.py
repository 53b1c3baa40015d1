"""Batch handlers: a slot gathers entries and runs them as a list; each still has its own fate."""

import asyncio
import contextlib
from typing import Any, Final

from chasqui._core.entry import Entry
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.held import Slot
from chasqui.consuming.runs import NotBegunError, run_with_timeout
from chasqui.errors import BatchError, UnreadableError
from chasqui.model import clock

#: The name under which the handler and the timeout of batches are looked up.
ANY: Final = ""


class BatchDispatcher(Dispatcher):
    """A dispatcher whose slots each run one batch at a time.

    Only one slot gathers at a time, and it takes every entry that comes meanwhile: so one batch is
    full before the next begins.
    """

    #: What the slot that gathers waits for.
    _more: asyncio.Future[None] | None = None

    async def stop(self, deadline_s: float) -> None:
        self._is_stopping = True
        self._wake()
        await super().stop(deadline_s)

    def _wake(self) -> None:
        if self._more is None:
            super()._wake()
        elif not self._more.done():
            self._more.set_result(None)

    async def _run(self, slot: Slot, entry: Entry) -> None:
        if self._more is not None:  # another slot gathers: the entry belongs to its batch
            self._held.waiting.appendleft(entry)
            self._wake()
            await self._rest()
            return
        slot.started_ns = clock.boot_ns()
        slot.name = entry.name
        try:
            slot.entries = entries = await self._gather(slot, entry)
            held = self._held
            if held.lost or clock.boot_ns() > held.alive_until_ns:
                # In the same turn of the loop as the run: an entry that is dropped must not look as
                # if it ran.
                if not await self._leases_hold():
                    return
                slot.entries = entries = tuple(
                    [entry for entry in entries if not self._drop_if_lost(entry)]
                )
            await self._run_batch(entries)
        finally:
            slot.entries = ()

    async def _gather(self, slot: Slot, first: Entry) -> tuple[Entry, ...]:
        """Up to a batch of entries. Waits a little for the batch to become full."""
        size = self._config.batch or 1
        held = self._held
        waiting = held.waiting
        taken = [first]
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.batch_linger_ms / 1000):
                try:
                    while True:
                        while waiting and len(taken) < size:
                            taken.append(waiting.popleft())
                        slot.entries = tuple(taken)  # in hand as soon as they leave the deque
                        held.open_places = size - len(taken)
                        if not held.open_places or self._is_stopping:
                            break
                        self._more = loop.create_future()
                        held.room.set()
                        await self._more
                finally:
                    self._more, held.open_places = None, 0
        if waiting:
            self._wake()
        return tuple(taken)

    async def _run_batch(self, entries: tuple[Entry, ...]) -> None:
        jobs: list[Any] = []
        good: list[Entry] = []
        for entry in entries:
            try:
                jobs.append(self._make_job(entry))
                good.append(entry)
            except UnreadableError as error:
                self._failures.bury_unreadable(entry, error)
        if not good:
            return
        if self._events is not None:
            for entry in good:
                self._events.active(entry)
        started_ns = clock.boot_ns()
        run, limit_s = self._handlers.find(ANY)
        assert run is not None  # a batch handler is a single one
        failures: dict[str, BaseException] = {}
        results: list[Any] = [None] * len(jobs)
        try:
            returned = await (
                run(jobs) if limit_s is None else run_with_timeout(limit_s, run(jobs), self._queue)
            )
            if isinstance(returned, list) and len(returned) == len(jobs):
                results = returned
            elif returned is not None and self._config.store_results:
                self.log.warning(
                    "queue %s: a batch handler returned no list of one result for each job: "
                    "nothing is stored",
                    self._queue,
                )
        except NotBegunError:
            return
        except BatchError as error:
            failures = dict(error.failures)
            results = [error.results.get(job.id) for job in jobs]
            if unknown := {*failures, *error.results} - {job.id for job in jobs}:
                self.log.warning(
                    "queue %s: BatchError names jobs that were not in the batch: %s",
                    self._queue,
                    ", ".join(map(repr, list(unknown)[:5])),
                    jobs=len(unknown),
                )
        except BaseException as error:
            handled = [self._failed(entry, error, started_ns) for entry in good]
            if not all(handled):
                raise
            return
        for entry, job, result in zip(good, jobs, results, strict=True):
            failure = failures.get(job.id)
            if failure is None:
                self._returned(entry, job.id, result, started_ns)
            else:
                self._failed(entry, failure, started_ns)
