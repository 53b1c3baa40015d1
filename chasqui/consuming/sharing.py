"""The dispatcher and the reader of a worker that shares its slots with other queues.

A run begins with a grant of its lane and gives the slot back at its end. The reader asks the server
only when a slot is granted for what comes, and does not wait there: so the next queue soon gets
that slot if there is nothing. While slots have no job it waits at the server for the first entry.
"""

import asyncio
from typing import Any, Final

from chasqui._core.entry import Entry
from chasqui.consuming.batches import BatchDispatcher
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.fate import Limits
from chasqui.consuming.held import Held, Slot
from chasqui.consuming.reader import Reader
from chasqui.consuming.shared_slots import Lane

#: For how long slots are kept for the answer to a read: a server that is silent holds up no other
#: queue.
ANSWER_S: Final = 0.1


class SharedHeld(Held):
    """What a worker holds that shares its slots."""

    def __init__(self, queue: str, lease_s: float, batch: int, limits: Limits, lane: Lane) -> None:
        super().__init__(queue, lease_s, batch, limits)
        self.lane = lane

    @property
    def idle_places(self) -> int:
        """How many jobs could begin now: not as many as slots rest, but as are granted."""
        return self.lane.granted * self.batch + self.open_places


class SharedDispatcher(Dispatcher):
    """A dispatcher whose runs need a grant."""

    def __init__(self, config: Any, held: SharedHeld, *parts: Any, **options: Any) -> None:
        super().__init__(config, held, *parts, **options)
        self._lane = held.lane

    def start(self, owner: asyncio.Task[Any]) -> None:
        super().start(owner)
        self._lane.open(
            self._held.waiting,
            limit=self._config.concurrency,
            batch=self._config.batch or 1,
            wake_slot=self._wake_one,
            wake_reader=self._held.room.set,
        )

    async def stop(self, deadline_s: float) -> None:
        self._lane.close()
        await super().stop(deadline_s)

    def offer(self, entries: list[Entry | None], is_fresh: bool) -> None:
        try:
            super().offer(entries, is_fresh)
        finally:
            self._lane.offered()

    def _wake(self) -> None:
        """Nothing: a slot is woken when its run is granted."""

    def _wake_one(self) -> None:
        while self._idle:
            future = self._idle.pop()
            if not future.done():
                self._waking += 1
                future.set_result(None)
                return

    async def _rest(self) -> None:
        self._lane.settle()
        # A grant that came in this very moment found no slot to wake.
        if not (self._held.waiting and self._lane.granted):
            await super()._rest()

    async def _run(self, slot: Slot, entry: Entry) -> None:
        if not self._lane.take():
            self._held.waiting.appendleft(entry)
            await self._rest()
            return
        try:
            await super()._run(slot, entry)
        finally:
            self._lane.give_back()


class SharedBatchDispatcher(SharedDispatcher, BatchDispatcher):
    """The same for batches: one slot gathers at a time, and takes what comes without a grant."""

    def offer(self, entries: list[Entry | None], is_fresh: bool) -> None:
        if self._more is None:
            super().offer(entries, is_fresh)
        else:  # for the batch that is open; what does not fit is offered when it is full
            Dispatcher.offer(self, entries, is_fresh)

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _rest(self) -> None:
        if self._more is None:
            await super()._rest()
        else:
            await Dispatcher._rest(self)

    async def _run(self, slot: Slot, entry: Entry) -> None:
        if self._more is None:
            await super()._run(slot, entry)
        else:
            await BatchDispatcher._run(self, slot, entry)

    async def _gather(self, slot: Slot, first: Entry) -> tuple[Entry, ...]:
        try:
            return await super()._gather(slot, first)
        finally:
            self._lane.settle()
            self._lane.offered()


class SharedReader(Reader):
    """A reader that asks for entries only when slots are granted for them."""

    _room = 0
    _answer: asyncio.TimerHandle | None = None

    @property
    def _lane(self) -> Lane:
        assert isinstance(self._held, SharedHeld)
        return self._held.lane

    async def run_once(self) -> int:
        lane = self._lane
        if not self._has_group or self._held.must_recover:
            lane.rest()
        self._room = 0
        try:
            count = await super().run_once()
        except BaseException:
            lane.rest()
            raise
        finally:
            if self._answer is not None:
                self._answer.cancel()
                self._answer = None
        lane.is_empty = count < self._room
        if lane.is_empty:
            lane.rest()
        return count

    def _wanted(self, is_full: bool) -> int:
        lane = self._lane
        self._blocks = False
        if is_full:
            lane.rest()
            return 0
        room = super()._wanted(is_full)
        if room <= 0 and lane.is_empty and (unused := lane.unused) > 0:
            self._blocks = True
            self._room = self._appetite.at_most(unused * self._held.batch)
            return self._room
        lane.stand_by()
        room = super()._wanted(is_full)
        if room > 0:
            loop = asyncio.get_running_loop()
            self._answer = loop.call_later(ANSWER_S, lane.rest)
        self._room = room
        return room

    async def _give_back(self, count: int) -> None:
        await super()._give_back(count)
        self._lane.is_empty = False

    async def _while_paused(self) -> None:
        self._lane.rest()
        await super()._while_paused()
