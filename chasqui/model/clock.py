"""The time since the machine was started: what it slept through counts, as it does for the server.

Leases and deadlines end by it. Python's monotonic clock stands still while a machine sleeps.
"""

import time
from functools import partial

# Where there is no other (macOS, BSD), it is this one of the system's that goes on.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

boot_s = partial(time.clock_gettime, _CLOCK)
boot_ns = partial(time.clock_gettime_ns, _CLOCK)
