"""Plain jobs that asyncio adds without a plan: their chunk is the only request.

A plan would cost such a call more than its chunk: without one a bulk of 50 takes a quarter less of
the client. Single adds of one turn of the event loop share chunks.
"""

import asyncio
import time
from typing import Any, Final

from chasqui.errors import ClosedError, OutcomeUnknownError
from chasqui.model.job import Job
from chasqui.producing.chunks import ChunkEncoder
from chasqui.producing.new_jobs import CHUNK_BYTES, NewJobs
from chasqui.transport.connection import Connection

#: Single adds that leave together: the server works on them while the next ones are made. With 100
#: tasks that add, 50 gave 250k jobs/s, all that meet in a turn 163k, 25 at a time 216k.
TURN_JOBS: Final = 50


class PendingAdds:
    """Single adds that met in a turn of the event loop: a chunk, with one reply for all of them."""

    __slots__ = (
        "created_at_ms", "futures", "ids", "loop", "names", "payloads", "retries", "size"
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.payloads: list[bytes] = []
        self.names: list[str] = []
        self.retries: list[bytes | None] = []
        #: Bytes of all payloads.
        self.size = 0
        self.futures: list[asyncio.Future[tuple[str, int]]] = []
        #: Of the jobs, once they are encoded.
        self.ids: list[str] = []
        self.created_at_ms = 0

    # Loops, not `any` and `all` of a generator: mostly there is one future, and one look is enough.

    def drop_cancelled(self) -> None:
        """Forget the adds whose callers were cancelled: they were never sent."""
        for future in self.futures:
            if future.done():
                break
        else:
            return
        kept = [i for i, future in enumerate(self.futures) if not future.done()]
        self.payloads = [self.payloads[i] for i in kept]
        self.names = [self.names[i] for i in kept]
        self.retries = [self.retries[i] for i in kept]
        self.futures = [self.futures[i] for i in kept]

    def done(self) -> bool:
        for future in self.futures:  # noqa: SIM110
            if not future.done():
                return False
        return True

    def set_result(self, reply: Any, /) -> None:
        for future, job_id in zip(self.futures, self.ids, strict=True):
            if not future.done():
                future.set_result((job_id, self.created_at_ms))

    def set_exception(self, error: Exception, /) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class PlainAdds:
    """Adds jobs without a delay, an id of their own or options of the queue, on one event loop."""

    def __init__(self, connection: Connection, encoder: ChunkEncoder) -> None:
        self._connection = connection
        self._encoder = encoder
        self._pending: PendingAdds | None = None

    def add(
        self, payload: bytes, name: str = "", retry: bytes | None = None
    ) -> asyncio.Future[tuple[str, int]]:
        """Add one checked job; the future of its id and creation time.

        Adds of one turn of the event loop share chunks, of TURN_JOBS at most.
        """
        pending, size = self._pending, len(payload)
        if (
            pending is None
            or pending.loop is not asyncio.get_running_loop()
            or len(pending.payloads) == TURN_JOBS
            or pending.size + size > CHUNK_BYTES
        ):
            pending = self._next_turn()
        future: asyncio.Future[tuple[str, int]] = pending.loop.create_future()
        pending.payloads.append(payload)
        pending.size += size
        pending.names.append(name)
        pending.retries.append(retry)
        pending.futures.append(future)
        return future

    async def add_chunk(self, jobs: NewJobs) -> list[Job]:
        """Add jobs that fit into one chunk; the jobs."""
        connection = self._connection
        loop = connection.check_owner()
        if connection.is_congested:
            await connection.room()
        now_ms = time.time_ns() // 1_000_000
        ids: list[str] = []
        reply: asyncio.Future[Any] = loop.create_future()
        try:
            request, ids = self._encoder.encode(jobs, now_ms)
            connection.send(request, reply)
            added = jobs.jobs(ids, now_ms)  # while the server works on them
            await reply
        except MemoryError as error:
            if not ids:
                raise  # nothing was sent
            raise OutcomeUnknownError(
                "no memory is left for the result: the jobs were sent"
            ) from error
        finally:
            reply.cancel()  # unless it is done: the caller has stopped waiting for it
        return added

    def _next_turn(self) -> PendingAdds:
        loop = self._connection.check_owner()
        if self._connection.is_closed:
            raise ClosedError("the producer was shut down")
        if self._pending is not None:
            self._send()
        pending = self._pending = PendingAdds(loop)
        loop.call_soon(self._send)
        return pending

    def _send(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.drop_cancelled()
        if not pending.payloads:
            return
        retries = pending.retries if any(pending.retries) else None
        jobs = NewJobs(pending.payloads, pending.names, None, retries)
        pending.created_at_ms = now_ms = time.time_ns() // 1_000_000
        try:
            self._connection.check_owner()  # a fork may lie between the turn's begin and its end
            request, pending.ids = self._encoder.encode(jobs, now_ms)
            self._connection.send(request, pending)
        except Exception as error:
            pending.set_exception(error)
