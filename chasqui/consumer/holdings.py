"""What a consumer has in hand, and whether it is still its own.

Read by the heartbeat's thread while the event loop changes it: every method here takes a snapshot,
none needs a lock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context
from typing import Final

from chasqui import clock
from chasqui._core.entry import Entry

#: How many names of jobs a log line shows.
SHOWN_NAMES: Final = 5


class Slot:
    """A place for one running job, or for one batch of them."""

    __slots__ = ("context", "entries", "entry", "name", "started_ns")

    def __init__(self) -> None:
        self.entry: Entry | None = None
        #: Where jobs run in batches: those that run now.
        self.entries: tuple[Entry, ...] = ()
        #: Of the job that runs or, if none does, of the last one.
        self.name = ""
        self.started_ns = 0
        #: What the context of every run starts as: that in which the worker runs, and this slot.
        self.context = copy_context()
        self.context.run(running_slot.set, self)


#: The slot whose run this is. Set once for each slot, so that no run pays for it.
running_slot: ContextVar[Slot] = ContextVar("running_slot")


class Holdings:
    """Entries delivered to this consumer and not yet gone from the stream."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        #: Delivered, not started.
        self.waiting: deque[Entry] = deque()
        #: When so few are left, the reader wants to know.
        self.low_water = 0
        self.slots: list[Slot] = []
        #: Each gives the ids that a part of the engine still has business with: acks, moves.
        self.others: list[Callable[[], Iterable[bytes]]] = []
        #: Taken over by somebody else while we had them, or their handlers were told so.
        self.lost: set[bytes] = set()
        #: What the last beat that missed any did not find: acknowledged meanwhile, or taken over.
        self.missing: set[bytes] = set()
        #: The highest id that ever came in hand.
        self._highest = (0, 0)
        self._sure_until_s = 0.0
        #: Until then, by `clock.boot_ns`, nobody can have taken over what is in hand.
        self.alive_until_ns = 0
        self.renewed(clock.boot_s())

    @property
    def sure_for_s(self) -> float:
        """How long all that is in hand is certainly ours, so that no fence is needed.

        Leases are renewed at a third of their time. Here two thirds count, so that a command sent
        on the strength of this arrives within the lease.
        """
        return self._sure_until_s - clock.boot_s()

    def renewed(self, at_s: float) -> None:
        """All that was in hand at this moment, by `clock.boot_s`, has been renewed since."""
        self._sure_until_s = at_s + self.lease_s * 2 / 3
        self.alive_until_ns = int((at_s + self.lease_s) * 1e9)

    def is_lost(self, entry_id: bytes) -> bool:
        """True if somebody else may own the entry by now. A run that is told so ends as lost, even
        if nobody took the entry: its handler may have stopped halfway."""
        if entry_id in self.lost:
            return True
        if self.is_alive:
            return False
        if entry_id in self.running_ids():
            self.lost.add(entry_id)
        return True

    @property
    def is_alive(self) -> bool:
        """False once the whole lease has gone by without a renewal."""
        return clock.boot_ns() < self.alive_until_ns

    @property
    def running(self) -> int:
        return sum(len(slot.entries) or slot.entry is not None for slot in self.slots)

    def oldest_running_s(self) -> float:
        """How long the longest run has been going on; 0 if nothing runs."""
        started = [slot.started_ns for slot in self.slots if slot.entry or slot.entries]
        return (clock.boot_ns() - min(started)) / 1e9 if started else 0.0

    def running_entries(self) -> list[Entry]:
        single = [entry for slot in self.slots if (entry := slot.entry) is not None]
        return single + [entry for slot in self.slots for entry in slot.entries]

    def running_ids(self) -> list[bytes]:
        return [entry.id for entry in self.running_entries()]

    def running_names(self, since_ns: int) -> list[str]:
        """Names of running jobs or, if none runs, of jobs that began after `since_ns`; a few."""
        running = {slot.name for slot in self.slots if slot.entry or slot.entries}
        begun = {slot.name for slot in self.slots if slot.started_ns > since_ns}
        return sorted(running or begun)[:SHOWN_NAMES]

    def busy_ids(self) -> list[bytes]:
        """All but those that wait for a slot: they cannot be handed back."""
        ids = self.running_ids()
        for others in self.others:
            ids += others()
        return ids

    def waiting_ids(self) -> list[bytes]:
        # A deque that grows or shrinks meanwhile refuses to be walked: try again. What came or
        # went in between is young, or of no interest any more.
        while True:
            try:
                return [entry.id for entry in self.waiting]
            except RuntimeError:
                continue

    def ids(self) -> list[bytes]:
        """Everything in hand."""
        return self.waiting_ids() + self.busy_ids()

    def are_above(self, entries: Sequence[Entry | None]) -> bool:
        """Whether what is new in a delivery, which comes last and in order, is above all that ever
        came in hand, so that none of it can be in hand.

        It is, unless the server forgot what it had delivered: after a failover, a lost tail of its
        log, or when the group was made again or set back.
        """
        before = self._highest
        are_above = True
        for entry in entries:
            if entry is not None:
                number = number_of(entry.id)
                self._highest = max(self._highest, number)
                if not entry.idle_ms:
                    are_above = number > before
                    break
        if (last := entries[-1] if entries else None) is not None:
            self._highest = max(self._highest, number_of(last.id))
        return are_above

    def take_away(self, entry_ids: list[bytes]) -> list[bytes]:
        """Note that somebody else owns these; those of them that have not been run to the end, and
        of which that was not known."""
        self.missing = missing = set(entry_ids)
        # An entry that is done may be missing because we acknowledged it.
        lost = missing & {*self.waiting_ids(), *self.running_ids()} - self.lost
        self.lost.update(lost)
        return list(lost)

    def lose_to(self, entry: Entry) -> None:
        """Take what is in hand under this id for lost if it is another job: a server that
        forgot what it had, and whose clock is behind, gives ids a second time."""
        for held in (*self.waiting, *self.running_entries()):
            if held.id == entry.id and held.job_id != entry.job_id:
                self.lost.add(entry.id)

    def make_way(self, entry_id: bytes) -> bool:
        """Drop the copy of a lost entry that waits here, for it has been delivered to us anew.

        False if that one may not run yet: an earlier run goes on or is being settled, and ends as
        lost, for its handler may know that it is and have done nothing.
        """
        if entry_id in self.busy_ids():
            return False
        for entry in self.waiting:
            if entry.id == entry_id:
                self.waiting.remove(entry)
                break
        self.lost.discard(entry_id)
        return True


def number_of(entry_id: bytes) -> tuple[int, int]:
    """An entry id as what it is compared by."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence)
