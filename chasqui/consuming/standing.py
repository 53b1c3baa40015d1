"""Entries whose idle time stands still: the server's clock was set back after they were delivered.

Until the clock has caught up, the server counts them as just delivered, and no lease on them ends.
A worker that lives renews its entries by the new clock, so their idle time grows. Those whose idle
time never grows were left behind.
"""

from collections.abc import Iterable
from typing import Final

#: An entry was left behind if its idle time was 0 in so many looks in a row, over so many leases by
#: our own clock.
MIN_LOOKS: Final = 8
MIN_LEASES: Final = 2
#: How many looks there are in a lease.
LOOKS_A_LEASE: Final = 4
#: How many entries to look at, the oldest first.
MOST: Final = 100


class Standing:
    """Remembers the entries that had no idle time in every look so far."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        #: By id, owner and deliveries: when it was first seen so, and in how many looks.
        self._seen: dict[tuple[bytes, bytes, int], tuple[float, int]] = {}
        self._look_at_s = 0.0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._look_at_s

    @property
    def looks_again_s(self) -> float | None:
        """The seconds until the next look; None if there is no reason for one."""
        return self._lease_s / LOOKS_A_LEASE if self._seen else None

    def look(self, rows: Iterable[tuple[bytes, bytes, int, int]], now_s: float) -> list[bytes]:
        """The ids among these rows of XPENDING that were left behind; now by `clock.boot_s`."""
        self._look_at_s = now_s + self._lease_s / LOOKS_A_LEASE
        before, self._seen = self._seen, {}
        left: list[bytes] = []
        for entry_id, owner, idle_ms, deliveries in rows:
            if idle_ms == 0:
                key = (entry_id, owner, deliveries)
                since_s, looks = before.get(key, (now_s, 0))
                self._seen[key] = since_s, looks + 1
                if looks + 1 >= MIN_LOOKS and now_s - since_s >= MIN_LEASES * self._lease_s:
                    left.append(entry_id)
        return left
