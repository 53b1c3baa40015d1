"""What `chasqui top` shows, without the screen: many queues, looked at again and again."""

import time
from dataclasses import dataclass
from typing import Any, Final

from chasqui import dlq
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.cli.facts import History, look
from chasqui.cli.queues import find_queues
from chasqui.model.config import Endpoint
from chasqui.transport.connection import Connection
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.dlq import DeadJob
from chasqui.errors import NotSupportedError
from chasqui.model.keys import Keys
from chasqui.plans import Plans
from chasqui.transport.request import Effect, commands

#: How often to look for new queues: that goes through all keys of the server.
FIND_EVERY_S: Final = 10.0
#: Running and dead jobs that are shown.
SHOWN: Final = 20
# They are shown, not run: whatever their size.
_ANY_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class RunningFacts:
    """An entry that a worker has."""

    job_id: str
    name: str
    worker: str
    #: Since it was handed out, or its lease renewed: when it began Redis does not know.
    idle_ms: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Details:
    """More of one queue: jobs that run, and dead ones."""

    running: list[RunningFacts]
    dead: list[DeadJob]


class Board:
    """The queues of a server, with what they held at the last looks."""

    def __init__(self, endpoint: Endpoint, queues: list[str], group: str) -> None:
        self._endpoint = endpoint
        if self._endpoint.kind == "cluster" and not queues:
            raise NotSupportedError("a cluster has no one list of its keys: name the queues")
        self._fixed = queues
        self._group = group
        self._connections: dict[str, Connection] = {}
        self._find_at_s = 0.0
        #: By the name of the queue.
        self.histories: dict[str, History] = {name: History() for name in queues}

    async def look(self) -> None:
        """Take a look at every queue."""
        if not self._fixed and time.monotonic() >= self._find_at_s:
            names = sorted(await self._connection("").run(find_queues()))
            kept = self.histories
            self.histories = {name: kept.get(name) or History() for name in names}
            self._find_at_s = time.monotonic() + FIND_EVERY_S
        for name, history in self.histories.items():
            history.add(await look(self._connection(name), Keys(name), self._group))

    async def details(self, queue: str) -> Details:
        """Running and dead jobs of one queue."""
        connection, keys = self._connection(queue), Keys(queue)
        request = commands(
            ("XPENDING", keys.stream, self._group, "-", "+", SHOWN),
            effect=Effect.READ,
            raises=False,
        )
        pending = await connection.submit(request)
        rows = pending if isinstance(pending, list) else []
        held = [row for row in rows if row[2] < HANDED_BACK_MS]
        dead = await connection.run(dlq.peek(keys, SHOWN))
        return Details(await self._running(connection, keys, held), dead)

    async def toggle_pause(self, queue: str) -> bool:
        """Pause a queue, or resume it if it is; whether it is paused now."""
        connection, plans = self._connection(queue), Plans(Keys(queue))
        if await connection.run(plans.is_paused()):
            await connection.run(plans.resume())
            return False
        await connection.run(plans.pause())
        return True

    async def replay(self, queue: str, limit: int) -> int:
        """Run dead jobs of a queue again, oldest first; how many."""
        plans = Plans(Keys(queue))
        return await self._connection(queue).run(dlq.replay(plans, limit))

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def _running(
        self, connection: Connection, keys: Keys, held: list[Any]
    ) -> list[RunningFacts]:
        """What is pending, with the jobs' names; those that are gone meanwhile left out."""
        if not held:
            return []
        replies = await connection.submit(
            commands(
                *(("XRANGE", keys.stream, entry_id, entry_id) for entry_id, *_ in held),
                effect=Effect.READ,
                builder=EntryBuilder("range", _ANY_SIZE),
            )
        )
        found: list[list[Entry]] = replies if len(held) > 1 else [replies]
        return [
            RunningFacts(entries[0].job_id, entries[0].name, _text(worker), idle_ms, deliveries)
            for entries, (_, worker, idle_ms, deliveries) in zip(found, held, strict=True)
            if entries
        ]

    def _connection(self, queue: str) -> Connection:
        """One for all, but for a cluster: there each queue has its node."""
        place = queue if self._endpoint.kind == "cluster" else ""
        if place not in self._connections:
            key = Keys(queue or "chasqui").stream
            self._connections[place] = Connection(
                self._endpoint, key=key, client_name="chasqui-top"
            )
        return self._connections[place]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
