"""Spans around runs, in the traces in which their jobs were added."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from chasqui._core.entry import Entry
from chasqui.consuming.handlers import Handlers, Runner
from chasqui.model.keys import RUN_BEFORE
from chasqui.producing.tracing import Tracing, carried_by, safely

MakeJob: TypeAlias = Callable[[Any, Entry], Any]


class TracedHandlers(Handlers):
    """The same handlers, with a span around each run."""

    def __init__(self, handlers: Handlers, tracing: Tracing, queue: str, group: str) -> None:
        self._inner = handlers
        self.names = handlers.names
        self._tracing = tracing
        self._queue = queue
        self._group = group
        # The entries of jobs that are about to run, by the identity of the jobs. Each stays here
        # from when its job is made until the run begins, in the same turn of the loop. Others that
        # are still here belong to jobs that never ran.
        self._entries: dict[int, Entry] = {}

    def make_job(self, make_job: MakeJob) -> MakeJob:
        """The same function, which also remembers the entries of jobs that carry a trace."""

        def make(engine: Any, entry: Entry) -> Any:
            job = make_job(engine, entry)
            if entry.extra is not None:
                self._entries[id(job)] = entry
            return job

        return make

    def find(self, name: str) -> tuple[Runner | None, float | None]:
        run, limit_s = self._inner.find(name)
        if run is None:
            return None, limit_s

        def traced(job: Any) -> Awaitable[Any]:
            jobs: Sequence[Any] = job if isinstance(job, list) else [job]
            entries = [self._entries.get(id(one)) for one in jobs]
            self._entries.clear()
            return self._run(run, job, jobs, entries)

        return traced, limit_s

    def stop(self) -> None:
        self._inner.stop()

    async def close(self) -> None:
        await self._inner.close()

    async def _run(
        self, run: Runner, job: Any, jobs: Sequence[Any], entries: Sequence[Entry | None]
    ) -> Any:
        """Run one job or batch."""
        carried = [
            [] if one is None else [text.decode() for text in carried_by(one)] for one in entries
        ]
        context: str | None = None
        try:
            span = safely(self._tracing.processing, self._queue, self._group, jobs, carried)
            with span as context:
                return await run(job)
        except BaseException:
            if context is not None:
                for entry in entries:
                    if entry is not None and entry.extra is not None:
                        entry.extra[RUN_BEFORE] = context.encode()  # a retry carries it along
            raise
