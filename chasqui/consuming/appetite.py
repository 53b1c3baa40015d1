"""How much a worker reads: what its slots can use now, and a little more.

Reading ahead pays while handlers are quick. With slow handlers it gains nothing, and keeps entries
from other workers that could run them: so entries that will not begin soon are given back.
"""

import time
from typing import Final

from chasqui.consuming.config import MAX_READ, PREFETCH_BYTES, ConsumerConfig
from chasqui.consuming.held import Held

#: How much work to hold, in seconds at the present pace.
AHEAD_S: Final = 0.02
#: The pace is an average over about PACE_S, updated at most every PACE_LOOK_S: many runs that end
#: at once do not mean that handlers are quick. If each slot has finished several runs since the
#: last update, they are quick, and only those count.
PACE_S: Final = 0.5
PACE_LOOK_S: Final = 0.05
#: How often waiting entries are judged: those that would not begin within this time go back. A
#: judgment looks at the time since the last one, so an entry that comes just before handlers get
#: stuck waits for two.
HOLD_S: Final = 0.4
#: The most entries of one read while their size is not known.
FIRST_READ: Final = 32


class Appetite:
    """Decides how many entries to ask for, and how many of those that wait to give back."""

    def __init__(self, config: ConsumerConfig, held: Held) -> None:
        self._config = config
        self._held = held
        self._pace = 0.0
        self._paced_at_s = time.monotonic()
        self._paced_count = 0
        self._entry_bytes = 0.0
        self._judge_at_s = 0.0
        self._judged_count = 0

    def wanted(self) -> int:
        """How many entries to ask for now."""
        held = self._held
        waiting = len(held.waiting)
        most = self._most()
        ahead = min(self._ahead(), most)
        held.low_water = low_water = ahead // 2
        return min(ahead + held.idle_places - waiting, most) if waiting <= low_water else 0

    def at_most(self, count: int) -> int:
        """So many entries, or fewer if one read does not take as many."""
        return min(count, self._most())

    def came(self, largest_bytes: int) -> None:
        """Note that entries came in, the largest of so many bytes, and will wait for slots."""
        self._learn_size(64.0 + largest_bytes)
        if not self._held.waiting:
            self._judge_at_s = time.monotonic() + HOLD_S
            self._judged_count = self._held.finished

    def judged_in_s(self) -> float:
        """In how many seconds the waiting entries are judged."""
        return max(0.0, self._judge_at_s - time.monotonic())

    def excess(self) -> int:
        """How many waiting entries would not begin soon; 0 until it is time to judge that."""
        waiting = len(self._held.waiting)
        now_s = time.monotonic()
        if not waiting or now_s < self._judge_at_s:
            return 0
        count = self._held.finished
        pace = (count - self._judged_count) / (now_s - self._judge_at_s + HOLD_S)
        self._judge_at_s, self._judged_count = now_s + HOLD_S, count
        excess = waiting - int(pace * HOLD_S)
        if excess > 0:
            # The pace falls too, so that they are not read again at once.
            self._pace, self._paced_at_s, self._paced_count = pace, now_s, count
        return max(0, excess)

    def _ahead(self) -> int:
        """How many entries to hold beyond those that run."""
        now_s = time.monotonic()
        since_s = now_s - self._paced_at_s
        config = self._config
        at_once = config.concurrency * (config.batch or 1)
        if since_s > PACE_LOOK_S:
            count = self._held.finished
            ended = count - self._paced_count
            weight = 1.0 if ended > 3 * at_once else min(1.0, since_s / PACE_S)
            self._pace += (ended / since_s - self._pace) * weight
            self._paced_at_s, self._paced_count = now_s, count
        ahead = int(self._pace * AHEAD_S)
        # Runs are so short that the next entry begins well before it is judged, even if all of them
        # end at once. With one entry ahead, a slot does not wait for a read.
        if not ahead and self._pace * HOLD_S / 2 >= at_once:
            ahead = 1
        return ahead if config.prefetch is None else min(ahead, config.prefetch)

    def _most(self) -> int:
        """The most entries of one read."""
        most = self._config.read_count
        if not self._entry_bytes:
            return FIRST_READ if most is None else most
        return min(most or MAX_READ, max(1, int(PREFETCH_BYTES / self._entry_bytes)))

    def _learn_size(self, size: float) -> None:
        """Update the expected size: up at once, down little by little."""
        if size >= self._entry_bytes or not self._entry_bytes:
            self._entry_bytes = size
        else:
            self._entry_bytes += (size - self._entry_bytes) / 8
