"""The entries that a worker holds, whether they are still its own, and what its parts signal each
other about them.

The heartbeat's thread reads this while the event loop changes it: every method takes a snapshot,
and none needs a lock.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from typing import Final, Protocol

from chasqui._core.entry import Entry
from chasqui.consuming.current import CURRENT, running_slot
from chasqui.consuming.fate import Limits
from chasqui.model import clock
from chasqui.model.job import Job

logger = logging.getLogger(__name__)

#: How many names of jobs a log line shows.
SHOWN_NAMES: Final = 5


class Slot:
    """One of a worker's `concurrency` places to run a handler: on one job, or on a batch."""

    __slots__ = (
        "context", "entries", "entry", "has_set_current", "job", "name", "started_ns", "task"
    )  # fmt: skip

    def __init__(self) -> None:
        self.entry: Entry | None = None
        #: The job that runs, for `current_job`.
        self.job: Job | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_set_current = False
        #: The batch that runs, where jobs run in batches.
        self.entries: tuple[Entry, ...] = ()
        #: The name of the job that runs, or else of the last one that ran.
        self.name = ""
        self.started_ns = 0
        #: The context that every run starts with: that of the worker, and this slot.
        self.context = copy_context()
        self.context.run(running_slot.set, self)
        self.context.run(CURRENT.set, None)


class Settling(Protocol):
    """Settles entries, and keeps them until the server has answered."""

    @property
    def waiting(self) -> int: ...
    def ids(self) -> Iterable[bytes]: ...


class Held:
    """Entries delivered to this consumer and not yet gone from the stream."""

    def __init__(
        self, queue: str, lease_s: float, batch: int = 1, limits: Limits | None = None
    ) -> None:
        #: The name of the queue.
        self.queue = queue
        self.lease_s = lease_s
        #: How many runs the job of an entry has.
        self.attempts_of = (limits or Limits()).attempts_of
        #: Entries that wait for a slot.
        self.waiting: deque[Entry] = deque()
        #: When only so many wait, the reader may have room for more.
        self.low_water = 0
        self.slots: list[Slot] = []
        #: The futures that slots without a job wait for.
        self.idle: list[asyncio.Future[None]] = []
        #: How many jobs a slot runs at once, and how many fit into the batch that one gathers now.
        self.batch = batch
        self.open_places = 0
        #: Runs that are over, well or badly.
        self.finished = 0
        #: The parts that settle entries whose runs are over.
        self.settlers: list[Settling] = []
        #: Set when the reader may have room for more.
        self.room = asyncio.Event()
        #: Entries may be ours by the server's account while nothing here holds them: delivered in
        #: a reply that never came, or while an earlier copy was in hand; at first, to a process
        #: that had our name and died. The reader looks for them before its next read.
        self.must_recover = True
        #: Set when the heartbeat is to renew the leases now.
        self.must_renew = threading.Event()
        #: Taken over by others while we held them, or their handlers asked and heard so.
        self.lost: set[bytes] = set()
        self.lost_count = 0
        #: What the last beat that missed any did not find: since acknowledged, or taken over.
        self.missing: set[bytes] = set()
        #: The highest id that was ever delivered to us.
        self._highest = (0, 0)
        self._sure_until_s = 0.0
        #: Until then, by `clock.boot_ns`, no other worker can have taken over what we hold.
        self.alive_until_ns = 0
        self.renewed(clock.boot_s())

    @property
    def sure_for_s(self) -> float:
        """For how long everything that we hold is certainly ours, so that no fence is needed.

        Leases are renewed at a third of their time. Only two thirds count here, so that a command
        that is sent without a fence arrives within the lease.
        """
        return self._sure_until_s - clock.boot_s()

    def renewed(self, at_s: float) -> None:
        """Note that everything held at this moment, by `clock.boot_s`, was renewed since."""
        self._sure_until_s = at_s + self.lease_s * 2 / 3
        self.alive_until_ns = int((at_s + self.lease_s) * 1e9)

    def is_lost(self, entry: Entry) -> bool:
        """True if another worker may own the entry by now. A run that hears so ends as lost, even
        if nobody took the entry: its handler may have stopped halfway."""
        entry_id = entry.id
        if entry_id in self.lost:
            return True
        if self.is_alive:
            return False
        if entry_id in self.running_ids():
            self.lost.add(entry_id)
        return True

    @property
    def is_alive(self) -> bool:
        """False once a whole lease has passed without a renewal."""
        return clock.boot_ns() < self.alive_until_ns

    @property
    def running(self) -> int:
        return sum(len(slot.entries) or slot.entry is not None for slot in self.slots)

    def oldest_running_s(self) -> float:
        """For how long the oldest run has been running; 0 if nothing runs."""
        started = [slot.started_ns for slot in self.slots if slot.entry or slot.entries]
        return (clock.boot_ns() - min(started)) / 1e9 if started else 0.0

    def running_entries(self) -> list[Entry]:
        single = [entry for slot in self.slots if (entry := slot.entry) is not None]
        return single + [entry for slot in self.slots for entry in slot.entries]

    def running_ids(self) -> list[bytes]:
        return [entry.id for entry in self.running_entries()]

    def running_names(self, since_ns: int) -> list[str]:
        """A few names of running jobs or, if none runs, of jobs that began after `since_ns`."""
        running = {slot.name for slot in self.slots if slot.entry or slot.entries}
        begun = {slot.name for slot in self.slots if slot.started_ns > since_ns}
        return sorted(running or begun)[:SHOWN_NAMES]

    def busy_ids(self) -> list[bytes]:
        """Entries that run or are being settled: they cannot be given back."""
        return self.running_ids() + self.settling_ids()

    def settling_ids(self) -> list[bytes]:
        """Entries whose runs are over, and whose settling the server has not confirmed."""
        return [entry_id for settler in self.settlers for entry_id in settler.ids()]

    @property
    def unsettled(self) -> int:
        """How many entries are being settled."""
        return sum(settler.waiting for settler in self.settlers)

    @property
    def idle_places(self) -> int:
        """How many jobs could begin now."""
        return len(self.idle) * self.batch + self.open_places

    def waiting_ids(self) -> list[bytes]:
        # A deque that changes meanwhile cannot be iterated: try again. What came in between is
        # young, and what went is of no interest.
        while True:
            try:
                return [entry.id for entry in self.waiting]
            except RuntimeError:
                continue

    def ids(self) -> list[bytes]:
        """Everything that we hold."""
        return self.waiting_ids() + self.busy_ids()

    def are_above(self, entries: Sequence[Entry | None]) -> bool:
        """Whether the new entries of a delivery, which come last and in order, are above all ids
        that were ever delivered to us, so that we cannot hold any of them.

        They are, unless the server forgot what it had delivered: after a failover, after it lost
        the tail of its log, or when the group was made again or set back.
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
        """Note that others own these entries; returns those whose runs are not over and which were
        not known as lost."""
        self.missing = missing = set(entry_ids)
        # An entry that is done may be missing because we acknowledged it.
        lost = missing & {*self.waiting_ids(), *self.running_ids()} - self.lost
        self.lost.update(lost)
        return list(lost)

    def report_lost(self, entry_ids: list[bytes]) -> None:
        """Count and log entries that were lost. The reader looks whether they came back to us."""
        self.lost_count += len(entry_ids)
        self.must_recover = True
        logger.warning(
            "queue %s: %d entries were taken over by another worker, or went with their group, "
            "while they were in hand: %s",
            self.queue,
            len(entry_ids),
            ", ".join(entry_id.decode() for entry_id in entry_ids[:5]),
            extra={"queue": self.queue, "entries": len(entry_ids)},
        )

    def lose_to(self, entry: Entry) -> None:
        """Take what we hold under this id for lost if it is another job: a server that lost
        entries, and whose clock is behind, gives their ids to others."""
        for other in (*self.waiting, *self.running_entries()):
            if other.id == entry.id and other.job_id != entry.job_id:
                self.lost.add(entry.id)

    def replace_lost_copy(self, entry_id: bytes) -> bool:
        """Drop the copy of a lost entry that waits here: the entry was delivered to us anew.

        False if the new one may not run yet: an earlier run goes on or is being settled. That run
        ends as lost, since its handler may have heard so and stopped halfway.
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
    """An entry id as numbers, to be compared."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence)
