"""What a run cost: time, this process's CPU and memory, the server's CPU and commands.

Standard library only: it runs in every peer's environment.
"""

import os
import resource
import socket
import time
from typing import Any
from urllib.parse import urlsplit


def cpu_s() -> float:
    """CPU seconds of this process, all its threads, and its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def rss_mb() -> float:
    """Memory of this process that is in RAM now; the most it ever was where nothing tells."""
    try:
        with open("/proc/self/statm") as told:
            return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return peak_mb()


def peak_mb() -> float:
    """The most memory of this process that was ever in RAM."""
    unit = 2**20 if os.uname().sysname == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class ServerInfo:
    """Asks one server what it has spent, over a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=30)
        self._stream = self._socket.makefile("rb")

    def ask(self, section: str) -> dict[str, str]:
        """One section of INFO."""
        self._socket.sendall(f"INFO {section}\r\n".encode())
        size = int(self._stream.readline()[1:])
        text = self._stream.read(size + 2).decode()
        pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
        return dict(pairs)

    def command(self, text: str) -> str:
        """The first line of the answer to a command."""
        self._socket.sendall(f"{text}\r\n".encode())
        return self._stream.readline().decode().strip()

    def cpu_s(self) -> float:
        """CPU seconds of the server process."""
        told = self.ask("cpu")
        return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])

    def calls(self) -> dict[str, int]:
        """How often each command was called, but for INFO."""
        told = self.ask("commandstats")
        counts = {
            name.removeprefix("cmdstat_"): int(value.split(",")[0].partition("=")[2])
            for name, value in told.items()
        }
        return {name: count for name, count in counts.items() if name != "info"}

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class Meter:
    """Reads the clocks when made, and says what was spent since."""

    def __init__(self, url: str) -> None:
        self._server = ServerInfo(url)
        self._server_cpu_s = self._server.cpu_s()
        self._cpu_s = cpu_s()
        self._start_s = time.monotonic()

    def spent(self, n: int, seconds: float | None = None) -> dict[str, Any]:
        """The cost of n jobs until now; `seconds` is their time if it is not all the time."""
        end_s = time.monotonic()
        used_s = cpu_s() - self._cpu_s
        server_s = self._server.cpu_s() - self._server_cpu_s
        seconds = end_s - self._start_s if seconds is None else seconds
        return {
            "n": n,
            "seconds": seconds,
            "rate": n / seconds,
            "client_cpu_per_100k": used_s / n * 1e5,
            "server_cpu_per_100k": server_s / n * 1e5,
            "rss_mb": rss_mb(),
            "peak_mb": peak_mb(),
        }
