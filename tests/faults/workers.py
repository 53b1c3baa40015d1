"""Workers of a fleet with one protection switched off, each in its own process:
`fleet.start("who", target="tests.faults.workers:deaf")`."""

import asyncio
import os

from chasqui import Worker
from chasqui._core.entry import Entry
from chasqui.consuming.acker import Acker, Acks
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.engine import Engine
from chasqui.consuming.reader import Reader
from chasqui.errors import ServerError
from chasqui.running import process
from chasqui.running.process import Stop
from chasqui.transport.request import Effect
from tests.crash.workers import GATE_POLL_S, make, make_without_heartbeat


def abrupt() -> Worker:
    """Ends at the first signal, without a drain."""
    Stop.drain = lambda self: os._exit(0)  # type: ignore[method-assign]
    return make()


def deaf() -> Worker:
    """Does nothing on the second signal."""
    Stop.now = lambda self, code: None  # type: ignore[method-assign]
    return make()


def forgetful() -> Worker:
    """Renews no lease; and reads nothing while it has as much in hand as it can run, so that it is
    others who take over what lapses."""
    read = Reader.run_once

    async def rest_or_read(self: Reader) -> int:
        while len(self._held.ids()) >= self._config.concurrency:  # noqa: ASYNC110 - as handlers
            await asyncio.sleep(GATE_POLL_S)
        return await read(self)

    Reader.run_once = rest_or_read  # type: ignore[method-assign]
    return make_without_heartbeat()


def hasty() -> Worker:
    """Takes a run that was cancelled for one that is done."""

    def forgive(self: Dispatcher, entry: Entry, error: BaseException, started_ns: int) -> bool:
        self._returned(entry, entry.job_id, None, started_ns)
        return False

    process.STOP_NOW_S = 60.0  # type: ignore[misc] - its acks are to go out
    Dispatcher._failed = forgive  # type: ignore[method-assign]
    return make()


def resigned() -> Worker:
    """Does not send a refused ack again."""

    failed = Acker._failed

    def give_up(self: Acker, batch: Acks, error: Exception) -> None:
        if not isinstance(error, ServerError):  # late, not refused
            return failed(self, batch, error)
        print("acks are refused:", error, flush=True)
        return self._finished(batch)

    Acker._failed = give_up  # type: ignore[method-assign]
    return make()


def tidy() -> Worker:
    """Removes its consumer when it leaves, with whatever that has."""
    let_go = Engine._let_go

    async def leave(self: Engine, tasks: list[asyncio.Task[None]]) -> None:
        group, consumer = self.config.group, self.config.consumer_id
        command = ("XGROUP", "DELCONSUMER", self.keys.stream, group, consumer)
        await self.connection.execute(*command, effect=Effect.IDEMPOTENT)
        await let_go(self, tasks)

    Engine._let_go = leave  # type: ignore[method-assign]
    return make()
