"""What the programs of other queues share. Standard library only."""

import asyncio
import signal
from collections.abc import Callable

from tests.chaos.programs.common import Runs, Told, one_by_one, produce

#: Handlers at once, as chasqui's workers have.
SLOTS = 100
#: How often a job may be lost with its worker before it is given up: never, here.
TRIES = 1000
#: An add that takes longer is given up; nobody knows then whether it happened.
ADD_S = 10.0
#: How long a worker that is told to go may finish what it runs.
DRAIN_S = 15


class Peer:
    """One queue library, as the harness uses it."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.runs = Runs(told)

    @property
    def lease_s(self) -> int:
        """Its recovery timeout, where it takes whole seconds."""
        return max(1, self.told.lease_ms // 1000)

    async def open(self) -> None:
        """Connect, to add jobs."""

    async def add(self, n: int) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """Be a worker, in the way that the library's own command has, until SIGTERM."""
        asyncio.run(self.work())

    async def work(self) -> None:
        """The same, of a library whose worker is a coroutine. Libraries that handle SIGTERM by
        themselves are left to it."""
        raise NotImplementedError


class NotAddedError(Exception):
    """The library says that it has the job already. It has not, unless an add was repeated."""


def stop_on_sigterm() -> asyncio.Event:
    """Set by SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


def main(kind: Callable[[Told], Peer]) -> None:
    """Be the producer or worker that the environment describes."""
    told = Told.here()
    peer = kind(told)
    if told.role == "worker":
        peer.run()
    else:
        asyncio.run(_produce(told, peer))


async def _produce(told: Told, peer: Peer) -> None:
    while True:
        try:
            await peer.open()
            break
        except Exception:  # no server yet, or not now
            await asyncio.sleep(0.2)
    await produce(told, lambda numbers: one_by_one(numbers, peer.add, ADD_S))
