"""The drain: how a worker ends. It stops reading, gives back what has not begun, finishes what has,
and settles it. Handlers have their own deadline; a server that is gone gets little time."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, Final

from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.held import Held
from chasqui.consuming.reader import Reader, release
from chasqui.consuming.settler import Settler
from chasqui.errors import ChasquiError
from chasqui.events.writer import EventWriter
from chasqui.model.words import count
from chasqui.scripts.settling import Consumer, leave
from chasqui.transport.connection import Connection
from chasqui.transport.server import is_group_gone

logger = logging.getLogger(__name__)

#: How long a drain may take beyond its handlers, for all of acks, moves and leader locks.
FLUSH_DEADLINE_S: Final = 4.0
#: How long a drain that was cancelled waits, in all, for a server that is gone.
CANCELLED_S: Final = 1.0
#: How long it may take to leave the group of a server that answers.
LEAVE_S: Final = 1.0


class Drain:
    """The end of one worker."""

    def __init__(
        self,
        connection: Connection,
        consumer: Consumer,
        held: Held,
        *,
        reader: Reader,
        dispatcher: Dispatcher,
        settlers: tuple[Settler[Any], Settler[Any]],
        events: EventWriter | None,
        shutdown_deadline_s: float,
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._queue = consumer.keys.queue
        self._held = held
        self._reader = reader
        self._dispatcher = dispatcher
        self._settlers = settlers
        self._events = events
        self._shutdown_deadline_s = shutdown_deadline_s
        self._is_cut_short = asyncio.Event()
        #: When the drain is over, come what may, by the monotonic clock.
        self._ends_s = math.inf
        #: How long it still waits for a server that is gone, and the wait that goes on.
        self._patience_s = math.inf
        self._waiting: asyncio.Timeout | None = None
        #: A link may be open to a server that says nothing.
        self._is_silent = False
        #: Set once no handler runs any more: leader loops end then.
        self.are_handlers_done = asyncio.Event()
        #: A part of the drain failed, and the log says so.
        self.is_incomplete = False

    def hurry(self) -> None:
        """Have little patience from now on with a server that is gone: what it does not know of is
        given up."""
        self._patience_s = CANCELLED_S
        waiting = self._waiting
        if waiting is not None and not waiting.expired() and not self._connection.is_connected:
            at_s = asyncio.get_running_loop().time() + CANCELLED_S
            waiting.reschedule(min(at_s, waiting.when() or at_s))

    def cut_short(self) -> None:
        """Cancel handlers that still run."""
        self._is_cut_short.set()
        self._ends_s = min(self._ends_s, time.monotonic() + FLUSH_DEADLINE_S)

    async def run(
        self,
        reading: asyncio.Task[None],
        connection: Connection,
        leader_loops: list[asyncio.Task[None]],
    ) -> None:
        """Stop `reading`, over its `connection`; give back what has not begun, finish what has,
        settle all of it and leave the group. Then wait for the `leader_loops` to end."""
        patience_s = 0.0 if self._is_cut_short.is_set() else self._shutdown_deadline_s
        deadline_s = time.monotonic() + patience_s
        self._ends_s = min(self._ends_s, deadline_s + FLUSH_DEADLINE_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        # The read may have delivered entries in a reply that we no longer wait for: whatever the
        # server counts as ours and does not run goes back.
        await connection.close()
        in_hand = self._held.ids()
        self._held.waiting.clear()
        # Handlers keep to their deadline whatever the server does.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._best_effort(self._give_back(in_hand), FLUSH_DEADLINE_S))
            await self._finish(deadline_s)
            self.are_handlers_done.set()
        flush_s = max(FLUSH_DEADLINE_S, deadline_s - time.monotonic())
        await self._best_effort(self._flush(), flush_s)
        # What the deadline cut short is still ours: let others have it now.
        await self._best_effort(self._give_back(in_hand), FLUSH_DEADLINE_S)
        if self._connection.is_connected and not self._is_silent:
            await self._leave()
        if leader_loops:
            await asyncio.wait(leader_loops, timeout=self._limit_s(FLUSH_DEADLINE_S))

    def _limit_s(self, limit_s: float) -> float:
        """How long a part of the drain may take, if it should take no longer than `limit_s`."""
        limit_s = max(0.0, min(limit_s, self._ends_s - time.monotonic()))
        is_there = self._connection.is_connected and not self._is_silent
        return limit_s if is_there else min(limit_s, self._patience_s)

    async def _finish(self, deadline_s: float) -> None:
        """Let handlers come to their end, until the deadline or until the drain is cut short."""
        left_s = deadline_s - time.monotonic()
        finishing = asyncio.ensure_future(self._dispatcher.stop(left_s))
        cut_short = asyncio.ensure_future(self._is_cut_short.wait())
        try:
            await asyncio.wait([finishing, cut_short], return_when=asyncio.FIRST_COMPLETED)
            if finishing.done():
                finishing.result()
                return
        finally:
            finishing.cancel()
            cut_short.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        await self._dispatcher.stop(0)

    async def _give_back(self, in_hand: list[bytes]) -> None:
        """Let others have what is not in our hands any more, and what is left of `in_hand`."""
        kept, wake = self._held.busy_ids(), self._reader.has_claim
        give_back = functools.partial(release, self._connection, self._consumer)
        released = await give_back(freed=in_hand, kept=kept, wake=wake)
        if released and wake:
            # Behind a proxy our own read may not be over yet. It is woken like others, and takes
            # back what is ours; but only once.
            await give_back(freed=[], kept=kept, wake=wake)
        not_begun = released - len(self._dispatcher.cut_short.keys() - set(kept))
        if not_begun > 0:
            logger.info(
                "queue %s: %s that had not begun %s back to it",
                self._queue,
                count(not_begun, "job"),
                "goes" if not_begun == 1 else "go",
                extra={"queue": self._queue, "entries": not_begun},
            )

    async def _flush(self) -> None:
        for settler in self._settlers:
            await settler.drain()
        if self._events is not None:
            self._events.run_once()

    async def _leave(self) -> None:
        """Leave the group, unless entries that we gave back still have our name. If it fails, the
        leader deletes the consumer later."""
        try:
            async with asyncio.timeout(self._limit_s(LEAVE_S)):
                await self._connection.submit(leave(self._consumer))
        except (ChasquiError, TimeoutError) as error:
            if not is_group_gone(error):
                text = "queue %s: its group still lists this worker: %r"
                logger.info(text, self._queue, error, extra={"queue": self._queue})

    async def _best_effort(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s(limit_s)) as self._waiting:
                await work
        except Exception as error:
            self._is_silent = isinstance(error, TimeoutError)
            self._report_incomplete(error)
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        finally:
            self._waiting = None

    def _report_incomplete(self, error: Exception) -> None:
        if self.is_incomplete:
            return  # what follows fails for the same reason, mostly
        self.is_incomplete = True
        logger.warning(
            "queue %s: the drain is incomplete: %s; jobs that could not be handed back run when "
            "their leases are over",
            self._queue,
            "the server did not answer" if isinstance(error, TimeoutError) else error,
            extra={"queue": self._queue},
        )

    def report_given_up(self) -> None:
        """Log how many entries could not be settled in time."""
        moved = "put aside for a retry or into the dead-letter queue"
        kinds = ("finished job", "acknowledged"), ("failed job", moved)
        for settler, (what, done) in zip(self._settlers, kinds, strict=True):
            if number := settler.waiting:
                text = "queue %s: %s could not be %s in time, and may run again"
                fields = {"queue": self._queue, "jobs": number}
                logger.warning(text, self._queue, count(number, what), done, extra=fields)
