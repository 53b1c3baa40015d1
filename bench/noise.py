"""Is the machine ours? CPU that others used while we measured, and a wait until they are quiet."""

import os
import resource
import time
from dataclasses import dataclass

#: Cores that others may use during a measurement before it counts as spoiled.
FOREIGN_CORES = 0.25
#: Cores in use that count as quiet.
QUIET_CORES = 0.2


def busy_s() -> float | None:
    """CPU seconds that the machine has worked since it started; None where nothing tells."""
    try:
        with open("/proc/stat") as told:
            user, nice, system, _, _, irq, softirq, steal = map(int, told.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_s(pid: int) -> float:
    """CPU seconds of one running process; 0 where nothing tells."""
    try:
        with open(f"/proc/{pid}/stat") as told:
            fields = told.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process and its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def wait_until_quiet(limit_s: float) -> float:
    """Return when others use little, or when the limit is over; the seconds waited."""
    start_s = time.monotonic()
    while (waited_s := time.monotonic() - start_s) < limit_s:
        busy, then_s = busy_s(), time.monotonic()
        if busy is None:
            break
        time.sleep(0.25)
        now = busy_s()
        assert now is not None
        if (now - busy) / (time.monotonic() - then_s) < QUIET_CORES:
            break
    return waited_s


@dataclass(frozen=True)
class Noise:
    """What others did during a measurement."""

    #: Cores that others used on average; None where nothing tells.
    foreign_cores: float | None

    @property
    def is_spoiling(self) -> bool:
        return self.foreign_cores is not None and self.foreign_cores > FOREIGN_CORES


class Watch:
    """Made before a measurement, asked after it."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._start_s = time.monotonic()
        self._busy = busy_s()
        self._ours = own_s() + process_s(server_pid)

    def noise(self) -> Noise:
        busy = busy_s()
        if busy is None or self._busy is None:
            return Noise(None)
        ours = own_s() + process_s(self._server_pid) - self._ours
        passed_s = time.monotonic() - self._start_s
        return Noise(max(0.0, (busy - self._busy - ours) / passed_s))
