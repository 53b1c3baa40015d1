"""A pause before takeovers: a worker that lost its link leaves the entries of others alone for a
moment.

The others may have lost their links too. They come back at the same time, to renew what they hold
and to acknowledge what they finished meanwhile.
"""

import math
from typing import Final

#: The pause lasts for a third of a lease, and no longer than this.
MAX_PAUSE_S: Final = 2.0
#: A link that keeps breaking puts takeovers off for at most so many leases.
MOST_LEASES: Final = 5


class TakeoverPause:
    """Decides when a reader may take entries over."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._span_s = min(lease_s / 3, MAX_PAUSE_S)
        #: When takeovers were last allowed; since when there were new links after that, the first
        #: of them and the last.
        self._free_s = self._back_s = self._last_s = -math.inf

    def until_s(self, replaced_s: float, now_s: float) -> float:
        """The earliest time at which takeovers are allowed; `now_s` if that has passed.
        `replaced_s` is when the present link came up. A link that keeps breaking puts the time
        off, but not for ever. After a lease without any link the count starts again: meanwhile
        nobody could renew."""
        if replaced_s > self._free_s:
            was_away = replaced_s - self._last_s > max(self._lease_s, 3 * MAX_PAUSE_S)
            if was_away or self._back_s <= self._free_s:
                self._back_s = replaced_s
            self._last_s = replaced_s
            until_s = min(replaced_s + self._span_s, self._back_s + MOST_LEASES * self._lease_s)
            if now_s < until_s:
                return until_s
        self._free_s = now_s
        return now_s
