"""Slots that the queues of one process share, and the order in which their jobs get them.

No I/O and no clock. A free slot is granted to one queue at a time: to one whose entries wait here,
or to one whose reader asks the server for more. So a reader takes no entries that cannot begin. A
grant that finds no entry goes to the next queue.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Final, Literal, TypeAlias

from chasqui.consuming.config import MAX_CONCURRENCY
from chasqui.model.config import check_int
from chasqui.model.words import meant, near

Mode: TypeAlias = Literal["strict", "weight"]

MAX_WEIGHT: Final = 1000


def _nothing() -> None:
    """In place of what a worker does when it is woken."""


class Lane:
    """The part that one queue has in shared slots."""

    def __init__(self, slots: "SharedSlots", queue: str, stride: int) -> None:
        self._slots = slots
        self.queue = queue
        #: How much later its turn comes after each start; the queue with the least has the turn.
        self.stride = stride
        self.turn = stride // 2
        self.is_open = False
        #: Entries that wait here.
        self.waiting: Sized = ()
        #: How many runs the worker itself allows, and how many entries one run takes.
        self.limit = 0
        self.batch = 1
        #: Runs that have a slot, and slots that it may use but has not used yet.
        self.running = 0
        self.granted = 0
        #: Whether the server may have entries for which the reader would ask now.
        self.can_ask = False
        #: The last answer of the server was that there are no more.
        self.is_empty = False
        self.had_work = False
        self._wake_slot: Callable[[], None] = _nothing
        self._wake_reader: Callable[[], None] = _nothing

    @property
    def unused(self) -> int:
        """How many slots of all queues have no job: free, or kept for what a reader asks for. If
        only free ones counted, idle queues would hand them round for ever."""
        return self._slots.unused

    @property
    def wanted(self) -> int:
        """How many runs the entries that wait here would be."""
        return -(-len(self.waiting) // self.batch)

    def has_work(self) -> bool:
        """Whether it could use one more slot."""
        return (
            self.is_open
            and self.running + self.granted < self.limit
            and (self.can_ask or self.wanted > self.granted)
        )

    # ── What a dispatcher tells ─────────────────────────────────────────────────────────────────

    def open(
        self,
        waiting: Sized,
        *,
        limit: int,
        batch: int = 1,
        wake_slot: Callable[[], None] = _nothing,
        wake_reader: Callable[[], None] = _nothing,
    ) -> None:
        """Take part from now on."""
        self.waiting, self.limit, self.batch = waiting, limit, batch
        self._wake_slot, self._wake_reader = wake_slot, wake_reader
        self.is_open = True
        self._slots.allot()

    def close(self) -> None:
        """Start nothing more. Runs that have a slot keep it until their end."""
        self.is_open = self.can_ask = False
        self.settle()

    def take(self) -> bool:
        """Use a grant for a run that begins now; False if there is none."""
        if not self.granted:
            return False
        self.granted -= 1
        self.running += 1
        return True

    def give_back(self) -> None:
        """A run is over. Its worker looks for the next one by itself."""
        self.running -= 1
        self._slots.allot(awake=self)

    def offered(self) -> None:
        """Entries came: wake a slot for each that may begin."""
        for _ in range(min(self.granted, self.wanted)):
            self._wake_slot()
        self._slots.allot()

    def settle(self) -> None:
        """Return grants that nothing here can use."""
        if not self.can_ask:
            surplus = self.granted - (self.wanted if self.is_open else 0)
            if surplus > 0:
                self.granted -= surplus
                self.turn -= surplus * self.stride
        self._slots.allot()

    # ── What a reader tells ─────────────────────────────────────────────────────────────────────

    def stand_by(self) -> None:
        """The reader would ask the server, if there is a slot for what comes."""
        self.can_ask, self.is_empty = True, False
        self._slots.allot()

    def rest(self) -> None:
        """The reader does not ask now: it knows that there is nothing, or cannot."""
        self.can_ask = False
        self.settle()

    def grant(self, *, is_awake: bool) -> None:
        """One more slot may be used."""
        self.granted += 1
        self.turn += self.stride
        if self.granted > self.wanted:
            self._wake_reader()
        elif not is_awake:
            self._wake_slot()


class SharedSlots:
    """A number of slots for several queues.

    `queues` names them in their order, or with their weights. With mode `strict` a job begins only
    if no earlier queue has one that waits. With mode `weight` queues that have jobs begin them in
    the ratio of their weights, in turns as even as they can be; a queue that had none saves
    nothing up.
    """

    def __init__(
        self, total: int, queues: Mapping[str, int] | Iterable[str], *, mode: Mode = "strict"
    ) -> None:
        check_int("slots", total, 1, MAX_CONCURRENCY)
        if mode not in ("strict", "weight"):
            raise ValueError(f"mode must be 'strict' or 'weight', got {mode!r}")
        if isinstance(queues, str):
            raise TypeError("queues must be names of queues, got a str: write them as a list")
        weights = dict(queues) if isinstance(queues, Mapping) else dict.fromkeys(queues, 1)
        if not weights:
            raise ValueError("queues is empty: name at least one")
        for queue, weight in weights.items():
            check_int(f"the weight of queue {queue!r}", weight, 1, MAX_WEIGHT)
        self.total = total
        self.mode: Mode = mode
        self._weights = weights
        # Twice the least common multiple, so that a turn may begin in the middle of a stride.
        whole = 2 * math.lcm(*weights.values())
        self._lanes = {
            queue: Lane(self, queue, whole // weight) for queue, weight in weights.items()
        }
        self._now = 0

    @property
    def queues(self) -> dict[str, int]:
        """The queues in their order, with their weights."""
        return dict(self._weights)

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return self.total - sum(lane.running + lane.granted for lane in self._lanes.values())

    @property
    def unused(self) -> int:
        """How many slots have no job that runs or is about to begin."""
        lanes = self._lanes.values()
        return self.total - sum(lane.running + min(lane.granted, lane.wanted) for lane in lanes)

    def lane(self, queue: str) -> Lane:
        """The part of one queue."""
        lane = self._lanes.get(queue)
        if lane is None:
            names = [repr(name) for name in near(queue, self._lanes)]
            raise ValueError(f"the shared slots do not name queue {queue!r}{meant(names)}")
        return lane

    def allot(self, awake: Lane | None = None) -> None:
        """Grant the free slots. `awake` looks for its next job without being woken."""
        while self.free > 0 and (lane := self._next()) is not None:
            lane.grant(is_awake=lane is awake)
            if lane is awake:
                awake = None

    def _next(self) -> Lane | None:
        """The queue that gets the next slot."""
        chosen: Lane | None = None
        for lane in self._lanes.values():
            has_work = lane.has_work()
            if has_work and not lane.had_work:
                lane.turn = max(lane.turn, self._now)
            lane.had_work = has_work
            if not has_work:
                continue
            if chosen is None or (self.mode == "weight" and lane.turn < chosen.turn):
                chosen = lane
        if chosen is not None:
            self._now = max(self._now, chosen.turn)
        return chosen
