"""Runs with spans around them, in the traces that their jobs were added in."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from chasqui.connection import Connection
from chasqui.consumer.handlers import Handlers, Runner
from chasqui.errors import ChasquiError
from chasqui.keys import Keys
from chasqui.request import Effect, commands
from chasqui.tracing import TRACE_TTL_S, Tracing

logger = logging.getLogger(__name__)

#: A run does not wait longer for its context.
LOOK_S: Final = 1.0


class TracedHandlers(Handlers):
    """Other handlers, with a span around each run."""

    def __init__(
        self,
        handlers: Handlers,
        tracing: Tracing,
        keys: Keys,
        group: str,
        connection: Callable[[], Connection],
    ) -> None:
        self._inner = handlers
        self._tracing = tracing
        self._keys = keys
        self._group = group
        self._connection = connection

    def find(self, name: str) -> tuple[Runner | None, float | None]:
        run, limit_s = self._inner.find(name)
        if run is None:
            return None, limit_s

        async def traced(job: Any) -> Any:
            return await self._run(run, job)

        return traced, limit_s

    def close(self) -> None:
        self._inner.close()

    async def _run(self, run: Runner, job: Any) -> Any:
        """One run, of a job or of a batch of them."""
        jobs: Sequence[Any] = job if isinstance(job, list) else [job]
        carried = await self._look(jobs)
        context: str | None = None
        try:
            with self._tracing.processing(self._keys.queue, self._group, jobs, carried) as context:
                result = await run(job)
        except BaseException:
            self._note(
                ("SET", self._keys.trace(one.id), f"{origin[0]} {context}", "EX", TRACE_TTL_S)
                for one, origin in zip(jobs, carried, strict=True)
                if origin and context is not None
            )
            raise
        self._note(
            ("DEL", self._keys.trace(one.id))
            for one, origin in zip(jobs, carried, strict=True)
            if origin
        )
        return result

    async def _look(self, jobs: Sequence[Any]) -> list[list[str]]:
        """What is kept for each job: where it was added, and its last run."""
        words = ("MGET", *(self._keys.trace(one.id) for one in jobs))
        try:
            async with asyncio.timeout(LOOK_S):
                found = await self._connection().execute(*words, effect=Effect.READ)
        except (ChasquiError, TimeoutError) as error:
            logger.debug("traces of queue %s cannot be read: %s", self._keys.queue, error)
            return [[] for _ in jobs]
        return [[] if one is None else one.decode(errors="replace").split() for one in found]

    def _note(self, calls: Iterable[tuple[Any, ...]]) -> None:
        """Send without waiting: it is of no consequence for the job."""
        listed = list(calls)
        if listed:
            request = commands(*listed, effect=Effect.IDEMPOTENT, raises=False)
            with contextlib.suppress(ChasquiError):
                self._connection().submit(request).add_done_callback(_forget)


def _forget(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
