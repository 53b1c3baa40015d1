"""How much a worker reads: what its slots can use now, and a little ahead of them.

Reading ahead pays while handlers are quick. Slow handlers gain nothing by it, and an entry that
waits here is kept from other workers that could run it: entries that will not begin soon are handed
back.
"""

import time
from collections.abc import Callable
from typing import Final

from chasqui.consumer.config import MAX_READ, PREFETCH_BYTES, ConsumerConfig
from chasqui.consumer.holdings import Holdings

#: How much work to hold in hand, in seconds at the present pace.
AHEAD_S: Final = 0.02
#: The pace is an average over about PACE_S, updated every PACE_LOOK_S at most: many runs that end
#: at once do not mean quick handlers. If each slot has ended several since the last look, they are
#: quick, and the pace is that of now.
PACE_S: Final = 0.5
PACE_LOOK_S: Final = 0.05
#: How often waiting entries are judged: those that would not begin within this time go back. A
#: judgment looks at the time since the last one, so an entry that comes just before a standstill
#: waits for two.
HOLD_S: Final = 0.4
#: While the size of entries is not known.
FIRST_READ: Final = 32


class Appetite:
    """Says how many entries to ask for, and how many of those that wait to hand back."""

    def __init__(
        self,
        config: ConsumerConfig,
        holdings: Holdings,
        *,
        idle_slots: Callable[[], int],
        finished: Callable[[], int],
    ) -> None:
        self._config = config
        self._holdings = holdings
        self._idle_slots = idle_slots
        self._finished = finished
        self._pace = 0.0
        self._paced_at_s = time.monotonic()
        self._paced_count = 0
        self._entry_bytes = 0.0
        self._judge_at_s = 0.0
        self._judged_count = 0

    def wanted(self) -> int:
        """How many entries to ask for now."""
        holdings = self._holdings
        waiting = len(holdings.waiting)
        most = self._most()
        ahead = min(self._ahead(), most)
        holdings.low_water = low_water = ahead // 2
        return min(ahead + self._idle_slots() - waiting, most) if waiting <= low_water else 0

    def came(self, largest_bytes: int) -> None:
        """Entries came in, and are about to wait for slots."""
        self._learn_size(64.0 + largest_bytes)
        if not self._holdings.waiting:
            self._judge_at_s = time.monotonic() + HOLD_S
            self._judged_count = self._finished()

    def judged_in_s(self) -> float:
        """In how many seconds the waiting entries are judged."""
        return max(0.0, self._judge_at_s - time.monotonic())

    def excess(self) -> int:
        """How many waiting entries would not begin soon; 0 until it is time to judge that."""
        waiting = len(self._holdings.waiting)
        now_s = time.monotonic()
        if not waiting or now_s < self._judge_at_s:
            return 0
        count = self._finished()
        pace = (count - self._judged_count) / (now_s - self._judge_at_s + HOLD_S)
        self._judge_at_s, self._judged_count = now_s + HOLD_S, count
        excess = waiting - int(pace * HOLD_S)
        if excess > 0:
            # So that they are not read again at once.
            self._pace, self._paced_at_s, self._paced_count = pace, now_s, count
        return max(0, excess)

    def _ahead(self) -> int:
        """How many entries to have in hand beyond those that run."""
        now_s = time.monotonic()
        since_s = now_s - self._paced_at_s
        config = self._config
        places = config.concurrency * (config.batch or 1)
        if since_s > PACE_LOOK_S:
            count = self._finished()
            ended = count - self._paced_count
            weight = 1.0 if ended > 3 * places else min(1.0, since_s / PACE_S)
            self._pace += (ended / since_s - self._pace) * weight
            self._paced_at_s, self._paced_count = now_s, count
        ahead = int(self._pace * AHEAD_S)
        # Runs so short that the next entry begins well before it is judged, even if all end at
        # once: with one in hand, a slot does not wait for a read.
        if not ahead and self._pace * HOLD_S / 2 >= places:
            ahead = 1
        return ahead if config.prefetch is None else min(ahead, config.prefetch)

    def _most(self) -> int:
        """The most entries of one read."""
        most = self._config.read_count
        if not self._entry_bytes:
            return FIRST_READ if most is None else most
        return min(most or MAX_READ, max(1, int(PREFETCH_BYTES / self._entry_bytes)))

    def _learn_size(self, size: float) -> None:
        """Large entries count at once, small ones little by little."""
        if size >= self._entry_bytes or not self._entry_bytes:
            self._entry_bytes = size
        else:
            self._entry_bytes += (size - self._entry_bytes) / 8
