"""The time since the machine started, with the time that it slept: the server counts that too.

Leases and deadlines end by this clock. Python's monotonic clock stands still during sleep.
"""

import time
from functools import partial

# macOS and BSD have no CLOCK_BOOTTIME; there CLOCK_MONOTONIC goes on during sleep.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

boot_s = partial(time.clock_gettime, _CLOCK)
boot_ns = partial(time.clock_gettime_ns, _CLOCK)
