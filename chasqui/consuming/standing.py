"""Entries whose idle time stands still: the server's clock was set back after they were delivered.

Until it has caught up the server counts them as just delivered, and nobody's lease on them ends. A
worker that lives renews them by the new clock, and their idle time goes on: so those for which it
never does have been left behind.
"""

from collections.abc import Iterable
from typing import Final

#: So often it must have been 0, each time that we looked, for so many leases by our own clock.
MIN_LOOKS: Final = 8
MIN_LEASES: Final = 2
#: How many looks there are in a lease.
LOOKS_A_LEASE: Final = 4
#: The oldest so many entries are looked at.
MOST: Final = 100


class Standing:
    """Remembers which entries had no idle time whenever they were looked at."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        #: By id, owner and deliveries: since when, and how often.
        self._seen: dict[tuple[bytes, bytes, int], tuple[float, int]] = {}
        self._look_at_s = 0.0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._look_at_s

    @property
    def looks_again_s(self) -> float | None:
        """In how many seconds to look again; None if there is no reason to."""
        return self._lease_s / LOOKS_A_LEASE if self._seen else None

    def look(self, rows: Iterable[tuple[bytes, bytes, int, int]], now_s: float) -> list[bytes]:
        """Which of these, as XPENDING gives them, were left behind; now by `clock.boot_s`."""
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
