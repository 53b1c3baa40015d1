"""WorkerGroup: the workers of several queues, run by one process as one thing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

from chasqui.consuming import burst
from chasqui.consuming.engine import Health
from chasqui.consuming.shared_slots import SharedSlots
from chasqui.errors import ChasquiError, ClosedError
from chasqui.model.words import meant, near
from chasqui.worker import Worker

__all__ = ["Lifespan", "Table", "UnknownQueueError", "WorkerGroup", "choose"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Makes what surrounds the work of a process: entered before the first job is read.
Lifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]

#: The parts of a `Health` of which a group shows the worst; of the other numbers it shows the sum.
_AGES = ("last_read_age_s", "oldest_running_s")


@dataclass(frozen=True, slots=True)
class Table:
    """Facts about what a group serves, which `chasqui worker` shows when it starts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | None, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of table {self.title!r} does not fit its columns: {row}")


class UnknownQueueError(ValueError):
    """A queue was asked for that the app does not have."""


def choose(queues: Sequence[str] | None, known: Sequence[str], *, what: str) -> list[str]:
    """The queues that were asked for, in the order of `known`; None asks for all.

    Raises UnknownQueueError for one that `what`, such as "app shop", does not have.
    """
    for queue in queues or ():
        if queue not in known:
            names = [repr(name) for name in near(queue, known) or known[:3]]
            raise UnknownQueueError(f"{what} has no queue {queue!r}{meant(names)}")
    return [queue for queue in known if queues is None or queue in queues]


def checked_lifespan(made: T) -> T:
    """What a lifespan returned, if it is an async context manager; else TypeError."""
    if not hasattr(made, "__aenter__"):
        raise TypeError(
            f"lifespan must return an async context manager, got {type(made).__name__}: "
            "is it a generator without @asynccontextmanager?"
        )
    return made


class WorkerGroup:
    """Runs several workers on one event loop: they start together and drain together.

    `lifespan` returns an async context manager. It is entered once, before any worker reads, and
    left when all of them have drained, also if one failed. `before` runs inside it, before the
    workers. If either raises, no job was taken, and `run` raises that error.

    With `slots` the workers share so many slots, in the order or by the weights given there.

    `facts` are shown when it starts, behind a table of its queues: its tasks, its schedules.

    With `burst` it closes itself as soon as nothing waits or runs and nothing is due within a
    minute: no delayed job and no retry. Jobs that are due later are left, and so are those of a
    queue that is paused; the log says how many.

    A worker that fails, and a handler that raises SystemExit, drain all workers; `run` raises the
    error then.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        name: str,
        lifespan: Lifespan | None = None,
        before: Callable[[], Awaitable[object]] | None = None,
        slots: SharedSlots | None = None,
        burst: bool = False,
        facts: Sequence[Table] = (),
    ) -> None:
        self._workers = _checked(workers)
        self._slots = slots
        self._facts = tuple(facts)
        if slots is not None:
            for worker in self._workers:
                worker.share(slots)
        self.name = name
        self._lifespan = lifespan
        self._before = before
        self.burst = burst
        self._running: asyncio.Task[BaseException | None] | None = None
        self._bursting: asyncio.Task[BaseException | None] | None = None
        self._is_closed = False
        #: Whether `lifespan` or `before` has the turn, so that no worker runs.
        self._is_preparing = False
        #: What `lifespan` or `before` raised: code of the program, whose traceback matters.
        self.program_error: BaseException | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._workers

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(worker.name for worker in self._workers)

    @property
    def label(self) -> str:
        """How log lines call it."""
        return f"queue {self.name}" if self.queues == (self.name,) else f"worker {self.name}"

    @property
    def consumer_ids(self) -> tuple[str, ...]:
        """The names of its consumers, each in the group of its queue."""
        return tuple(worker.consumer_id for worker in self._workers)

    @property
    def shutdown_deadline_s(self) -> float:
        """How long the drain waits for handlers: the longest time of a worker."""
        return max(worker.shutdown_deadline_s for worker in self._workers)

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it runs on; None before `run`."""
        return None if self._running is None else self._running.get_loop()

    async def run(self) -> None:
        """Run jobs until `close()`; returns when all workers have drained and the lifespan is left.
        A second call awaits the first."""
        if self._running is None:
            if self._is_closed:
                return
            self._running = asyncio.ensure_future(self._run())
        running = self._running
        try:
            failure = await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            raise
        if failure is not None:
            # Raised here and not in a task of ours: SystemExit would break the loop there.
            raise failure

    async def close(self) -> None:
        """Begin the drain; `run` returns when it is over. A second call does nothing."""
        self._end()
        for worker in self._workers:
            await worker.close()

    def stop_now(self) -> None:
        """Cut the drain short: cancel handlers that still run, and give their jobs back."""
        self._end()
        for worker in self._workers:
            worker.stop_now()

    def health(self) -> Health | None:
        """How all workers are doing: sums, and the worst ages; None before they run."""
        all_of_them = [health for worker in self._workers if (health := worker.health())]
        return _sum(all_of_them) if len(all_of_them) == len(self._workers) else None

    def describe(self) -> list[Table]:
        """What it serves: its queues with their slots, and the `facts` that it was given."""
        servers = list(dict.fromkeys(worker.server for worker in self._workers))
        rows = tuple((worker.name, self._slots_of(worker)) for worker in self._workers)
        queues = Table(f"{self.name} at {', '.join(servers)}", ("queue", "slots"), rows)
        return [queues, *self._facts]

    def _slots_of(self, worker: Worker) -> str:
        shared = self._slots
        if shared is None:
            return str(worker.concurrency)
        names = list(shared.queues)
        turn = f"turn {names.index(worker.name) + 1}"
        if shared.mode == "weight":
            turn = f"weight {shared.queues[worker.name]}"
        return f"{worker.concurrency} of {shared.total} shared, {turn}"

    def _end(self) -> None:
        was_closed, self._is_closed = self._is_closed, True
        if self._is_preparing and not was_closed and self._running is not None:
            self._running.cancel()  # it may wait for something that never comes
        bursting = self._bursting
        if bursting is not None and not was_closed and bursting is not asyncio.current_task():
            bursting.cancel()

    # ── The run ─────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> BaseException | None:
        """Everything from the lifespan's begin to its end; the error to raise, if there is one."""
        if self._is_closed:
            return None
        failure: BaseException | None = None
        self._is_preparing = True
        try:
            # In one task from its begin to its end: a lifespan may hold a task group.
            async with self._make_lifespan():
                failure = await self._prepare()
                self._is_preparing = False
                if failure is None:
                    failure = await self._work()
        except asyncio.CancelledError:
            if not self._is_given_up():
                raise
            task = asyncio.current_task()
            while task is not None and task.uncancel():
                pass
        except BaseException as error:
            # What workers raise is not raised here: this is the lifespan's, or that of `before`.
            self.program_error = error
            failure = failure or error
        finally:
            self._is_preparing = False
        return failure

    def _is_given_up(self) -> bool:
        """Whether it was told to end before any worker ran."""
        return self._is_preparing and self._is_closed

    def _make_lifespan(self) -> AbstractAsyncContextManager[Any]:
        if self._lifespan is None:
            return nullcontext()
        return checked_lifespan(self._lifespan())

    async def _prepare(self) -> ChasquiError | None:
        """Run `before`. An error of the server is not the program's: it is returned."""
        if self._before is not None:
            try:
                await self._before()
            except ChasquiError as error:
                return error
        return None

    async def _work(self) -> BaseException | None:
        """Run the workers until all of them have ended; the first error of one. It drains the
        others, and so does a cancellation, which is raised afterwards."""
        left = {asyncio.ensure_future(_outcome(worker)) for worker in self._workers}
        if self.burst:
            self._bursting = asyncio.ensure_future(self._close_when_done())
            left.add(self._bursting)
        failure: BaseException | None = None
        is_cancelled = False
        while left:
            try:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                is_cancelled = True
                self._is_closed = True
                for task in left:
                    task.cancel()
                continue
            for task in done:
                error = None if task.cancelled() else task.result()
                if error is None:
                    continue
                if failure is None:
                    failure = error
                    await self.close()
                elif str(error) != str(failure):
                    logger.error("%s: %s", self.label, error, extra={"group": self.name})
        if is_cancelled:
            raise asyncio.CancelledError
        return failure

    async def _close_when_done(self) -> BaseException | None:
        """Close when nothing is left to run; what the server refused, if it did."""
        await asyncio.sleep(0)  # so that the workers have begun
        engines = [worker.engine for worker in self._workers if worker.engine is not None]
        try:
            await burst.until_done(engines)
        except ClosedError:
            return None  # the workers have ended meanwhile
        except Exception as error:
            return error
        await self.close()
        return None


async def _outcome(worker: Worker) -> BaseException | None:
    """Run a worker to its end; what it raised. SystemExit would break the loop if a task raised
    it."""
    try:
        await worker.run()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


def _checked(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    found = tuple(workers)
    if not found:
        raise ValueError("workers is empty: a group needs at least one Worker")
    for worker in found:
        if not isinstance(worker, Worker):
            raise TypeError(f"workers must be Workers, got {type(worker).__name__}")
    names = [worker.name for worker in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"workers has two of queue {name!r}: make one, with more concurrency")
    return found


def _sum(parts: list[Health]) -> Health:
    """One `Health` of several."""
    summed: dict[str, Any] = {}
    for field in fields(Health):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "is_connected":
            summed[field.name] = all(values)
        elif field.name == "is_incomplete":
            summed[field.name] = any(values)
        else:
            summed[field.name] = max(values) if field.name in _AGES else sum(values)
    return Health(**summed)
