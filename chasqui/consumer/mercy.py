"""Mercy: whoever lost its link leaves alone, for a moment, what others hold.

They may have lost theirs too, and come back at the same time to renew what they have in hand and to
acknowledge what they finished meanwhile.
"""

import math
from typing import Final

#: It lasts for a third of a lease, and no longer than this.
MERCY_S: Final = 2.0
#: Links that break again and again put it off for so many leases.
MOST_LEASES: Final = 5


class Mercy:
    """When a reader may take entries over."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._span_s = min(lease_s / 3, MERCY_S)
        #: When it last could, and when the first link after that was there, and the last one.
        self._free_s = self._back_s = self._last_s = -math.inf

    def ends_s(self, replaced_s: float, now_s: float) -> float:
        """When it may; from now on, if that is not later. `replaced_s`: since when there is a new
        link. One that breaks again and again puts it off, but not for ever; and while there was
        none for a lease nobody could renew, and all begins anew."""
        if replaced_s > self._free_s:
            was_away = replaced_s - self._last_s > max(self._lease_s, 3 * MERCY_S)
            if was_away or self._back_s <= self._free_s:
                self._back_s = replaced_s
            self._last_s = replaced_s
            ends_s = min(replaced_s + self._span_s, self._back_s + MOST_LEASES * self._lease_s)
            if now_s < ends_s:
                return ends_s
        self._free_s = now_s
        return now_s
