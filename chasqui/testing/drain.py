"""A drain: real workers run everything to the end; when nothing is left to run, the clock moves."""

import asyncio
from datetime import timedelta
from types import TracebackType
from typing import Any

from chasqui import App, WorkerGroup
from chasqui.managing import dlq
from chasqui.managing.dead_jobs import DeadJob
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.model.words import count, some
from chasqui.testing.apps import app_of, used_queues
from chasqui.testing.clock import Look, Moves, QueueClock, now_ms
from chasqui.testing.drained import Dead, Drained, DrainError, Observer
from chasqui.testing.server import ServerOfTests
from chasqui.transport.connection import Connection


class Drain:
    """One drain, from its begin to its end."""

    def __init__(
        self,
        server: ServerOfTests,
        moves: Moves,
        *,
        until: timedelta | None,
        raises: bool,
        app: App[Any] | None,
    ) -> None:
        self._server = server
        self._moves = moves
        self._left_ms = None if until is None else round(until.total_seconds() * 1000)
        self._moved_ms = 0
        self._raises = raises
        self._app = app
        self._observer = Observer(raises=raises)
        endpoint = Endpoint.parse(server.url)
        self._connection = Connection(endpoint, key=b"", client_name="chasqui-testing")
        self._clocks: dict[str, QueueClock] = {}
        #: How many dead jobs each queue had before.
        self._dead_before: dict[str, int] = {}
        self._is_begun = False
        self._groups: dict[App[Any], WorkerGroup] = {}
        self._runs: dict[asyncio.Task[BaseException | None], WorkerGroup] = {}

    async def __aenter__(self) -> "Drain":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._observer.is_over = True
        for group in self._groups.values():
            if kind is None:
                await group.close()
            else:
                group.stop_now()
        await asyncio.gather(*self._runs, return_exceptions=True)
        await self._connection.close()

    async def run(self) -> Drained:
        """Run everything; raises DrainError where that cannot be done."""
        self._add_queues(self._server.queues())
        self._is_begun = True
        while True:
            self._observer.changed.clear()
            self._raise_failure()
            self._add_queues(used_queues())
            looks = await self._look()
            if any(look.is_busy for look in looks.values()):
                await self._run_on(looks)
            elif self._observer.changed.is_set():
                continue  # a run of one queue may have added to another that was looked at before
            elif not await self._move_on(looks):
                break
        drained = self._observer.drained
        drained.moved = timedelta(milliseconds=self._moved_ms)
        drained.count([one for queue in self._clocks for one in await self._dead(queue)])
        return drained

    def _add_queues(self, names: Any) -> bool:
        """Look after these queues too; whether one of them is new."""
        new = [name for name in names if name not in self._clocks]
        for name in new:
            self._clocks[name] = QueueClock(self._connection, Keys(name))
            if self._is_begun:
                self._dead_before[name] = 0  # it was empty when the drain began
        return bool(new)

    async def _look(self) -> dict[str, Look]:
        found = await asyncio.gather(*(clock.look() for clock in self._clocks.values()))
        looks = dict(zip(self._clocks, found, strict=True))
        for queue, look in looks.items():
            before = self._dead_before.setdefault(queue, look.counts.dlq)
            if self._raises and look.counts.dlq > before:
                await self._raise_buried(queue)
        return looks

    # ── While jobs wait or run ──────────────────────────────────────────────────────────────────

    async def _run_on(self, looks: dict[str, Look]) -> None:
        """Wait until something has changed: a run began or ended. If none runs, the workers are
        about to begin or to settle: the next look tells."""
        for queue, look in looks.items():
            if not look.is_busy:
                continue
            if look.counts.is_paused and look.counts.waiting:
                raise DrainError(
                    f"queue {queue!r} is paused, and {count(look.counts.waiting, 'job')} in it "
                    "would wait for ever: resume it before the drain"
                )
            app = app_of(queue, self._app)
            if app is None:
                raise DrainError(await self._why_nobody_runs(queue))
            self._start(app)
        if self._observer.running:
            changed = asyncio.ensure_future(self._observer.changed.wait())
            try:
                waits = {changed, *self._runs}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    def _start(self, app: App[Any]) -> None:
        if app in self._groups:
            return
        group = app.worker_group(
            outermost=self._observer.hook, delayed_enabled=False, run_scheduler=False
        )
        self._groups[app] = group
        self._runs[asyncio.ensure_future(_outcome(group))] = group

    def _raise_failure(self) -> None:
        if self._observer.failure is not None:
            raise self._observer.failure
        for run, group in self._runs.items():
            if not run.done():
                continue
            error = run.result()
            if isinstance(error, Exception):
                raise error
            why = "it was closed" if error is None else repr(error)
            raise DrainError(f"the worker {group.name} ended before the drain: {why}") from error

    async def _why_nobody_runs(self, queue: str) -> str:
        from chasqui.testing.enqueued import enqueued  # it needs what is here

        names = sorted({repr(job.name) for job in enqueued(self._server, self._moves, [queue])})
        whose = "no app of this process has a task" if self._app is None else "the app has no task"
        return f"queue {queue!r} holds jobs ({some(names)}), and {whose} on that queue"

    # ── When nothing is left to run ─────────────────────────────────────────────────────────────

    async def _move_on(self, looks: dict[str, Look]) -> bool:
        """Move the clock to the next delayed job and promote it; False if the drain is over."""
        dues = {
            queue: look.next_due_ms for queue, look in looks.items() if look.next_due_ms is not None
        }
        if not dues:
            # A handler may have added to a queue that no app has opened.
            return self._add_queues(self._server.queues())
        by_ms = min(dues.values())
        if self._left_ms is not None and by_ms > self._left_ms:
            await self._move(list(dues), self._left_ms)
            return False
        counts = await self._move(list(dues), by_ms)
        first = [queue for queue, due_ms in dues.items() if due_ms == by_ms]
        await asyncio.gather(*(self._clocks[queue].promote(counts[queue]) for queue in first))
        return True

    async def _move(self, queues: list[str], by_ms: int) -> dict[str, int]:
        """Move the clock; for each queue how many jobs are due first."""
        at_ms = now_ms()
        counts = await asyncio.gather(*(self._clocks[queue].move(by_ms) for queue in queues))
        if by_ms:
            await self._moves.note(at_ms, by_ms)
        self._moved_ms += by_ms
        if self._left_ms is not None:
            self._left_ms -= by_ms
        return dict(zip(queues, counts, strict=True))

    # ── Dead jobs ───────────────────────────────────────────────────────────────────────────────

    async def _dead(self, queue: str) -> list[Dead]:
        """The jobs of a queue that died in this drain."""
        found: list[DeadJob] = await self._connection.run(dlq.peek(Keys(queue), 1_000_000))
        return [Dead.of(queue, job) for job in found[self._dead_before.get(queue, 0) :]]

    async def _raise_buried(self, queue: str) -> None:
        """Raise for a job that died without a failure of its handler."""
        if self._observer.failure is not None:
            return
        dead = (await self._dead(queue))[0]
        text = f"job {dead.id} ({dead.name}) of queue {queue!r} is dead: {dead.error}"
        if dead.error == "no handler":
            names = [repr(name) for app in self._groups for name in app.tasks_of(queue)]
            text = f"no task takes job {dead.id} of queue {queue!r}: its name is {dead.name!r}, "
            text += f"and there are {some(names)}"
        raise DrainError(text)


async def _outcome(group: WorkerGroup) -> BaseException | None:
    """What a group raised. SystemExit would break the event loop if a task raised it."""
    try:
        await group.run()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None
