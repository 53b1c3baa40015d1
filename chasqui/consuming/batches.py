"""Batch handlers: a slot gathers entries and hands them over as a list; each keeps its own fate."""

import asyncio
import contextlib
from typing import Any, Final

from chasqui import clock
from chasqui._core.entry import Entry
from chasqui.consumer.dispatcher import Dispatcher, UnreadableError
from chasqui.consumer.holdings import Slot
from chasqui.consuming.runs import NotBegunError, within
from chasqui.errors import BatchError

#: The name under which the handler and the timeout of batches are looked up.
ANY: Final = ""


class BatchDispatcher(Dispatcher):
    """A dispatcher whose slots each run one batch at a time.

    One slot at a time gathers, and takes every entry that comes meanwhile: one batch is full before
    the next one begins.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: What the slot that gathers waits for, and how many entries it still has room for.
        self._more: asyncio.Future[None] | None = None
        self._missing = 0

    def idle_slots(self) -> int:
        return len(self._idle) * (self._config.batch or 1) + self._missing

    async def stop(self, deadline_s: float) -> None:
        self._is_stopping = True
        self._wake(1)
        await super().stop(deadline_s)

    def _wake(self, count: int) -> None:
        if self._more is None:
            super()._wake(count)
        elif not self._more.done():
            self._more.set_result(None)

    async def _run(self, slot: Slot, entry: Entry) -> None:
        if self._more is not None:  # it came for the slot that gathers
            self._holdings.waiting.appendleft(entry)
            self._wake(1)
            await self._rest()
            return
        slot.started_ns = clock.boot_ns()
        slot.name = entry.name
        try:
            slot.entries = entries = await self._gather(slot, entry)
            holdings = self._holdings
            if holdings.lost or clock.boot_ns() > holdings.alive_until_ns:
                # All in one turn of the loop: what is let go must not look as if it ran.
                if not await self._leases_hold():
                    return
                slot.entries = entries = tuple(
                    [entry for entry in entries if not self._is_let_go(entry)]
                )
            await self._run_batch(entries)
        finally:
            slot.entries = ()

    async def _gather(self, slot: Slot, first: Entry) -> tuple[Entry, ...]:
        """Up to a batch of entries, waiting a little for it to become full."""
        size = self._config.batch or 1
        waiting = self._holdings.waiting
        taken = [first]
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.batch_linger_ms / 1000):
                try:
                    while True:
                        while waiting and len(taken) < size:
                            taken.append(waiting.popleft())
                        slot.entries = tuple(taken)  # in hand from when they left the deque
                        self._missing = size - len(taken)
                        if not self._missing or self._is_stopping:
                            break
                        self._more = loop.create_future()
                        self.on_low()
                        await self._more
                finally:
                    self._more, self._missing = None, 0
        if waiting:
            self._wake(1)
        return tuple(taken)

    async def _run_batch(self, entries: tuple[Entry, ...]) -> None:
        jobs: list[Any] = []
        good: list[Entry] = []
        for entry in entries:
            try:
                jobs.append(self._make_job(entry))
                good.append(entry)
            except UnreadableError as error:
                self._refuse(entry, error)
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
                run(jobs) if limit_s is None else within(limit_s, run(jobs), self._queue)
            )
            if isinstance(returned, list) and len(returned) == len(jobs):
                results = returned
            elif returned is not None and self._config.store_results:
                self.complaints.warn(
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
                self.complaints.warn(
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
