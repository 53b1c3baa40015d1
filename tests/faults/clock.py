"""A server whose wall clock can be set."""

import struct
import time
from pathlib import Path

import redis

from tests.crash.conftest import eventually
from tests.faults.disk import build_shim
from tests.servers import Server

HOUR_S = 3600
#: How exactly a clock that was set is looked at.
NEAR_S = 0.5


def build_clock(folder: Path) -> Path:
    """The library that comes between a server and the clock."""
    return build_shim(folder, Path(__file__).with_name("clock.c"))


class ClockServer(Server):
    """A server whose wall clock can be set."""

    def __init__(self, kind: str, shim: Path, clock: Path) -> None:
        self._shim, self._clock = shim, clock
        self._set(0)
        super().__init__(kind)

    def jump(self, seconds: int) -> None:
        """Let its clock be off by so much; return when it has noticed."""
        self._set(seconds)
        with redis.Redis.from_url(self.url) as client:
            eventually(
                lambda: abs(clock_s(client) - time.time() - seconds) < NEAR_S, "it has jumped"
            )

    def _set(self, seconds: int) -> None:
        with open(self._clock, "r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))

    def _command(self, port: int) -> list[str]:
        variables = [f"LD_PRELOAD={self._shim}", f"CLOCK_FILE={self._clock}"]
        return ["env", *variables, *super()._command(port)]


def clock_s(client: redis.Redis) -> float:
    seconds, micros = client.time()
    return float(seconds) + micros / 1e6
