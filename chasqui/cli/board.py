"""What `chasqui top` shows, without the screen: the facts of many queues."""

import time
from dataclasses import dataclass
from typing import Final

from chasqui.cli.facts import History, look
from chasqui.cli.queues import find_queues
from chasqui.errors import NotSupportedError
from chasqui.managing import dlq, state
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.managing.dead_jobs import DeadJob
from chasqui.managing.entries import by_id
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.producing.operations import QueueOperations
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands

#: Seconds between two searches for new queues, each of which scans all keys of the server.
FIND_EVERY_S: Final = 10.0
#: The most running jobs, and the most dead jobs, to show.
SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class RunningFacts:
    """An entry that a worker holds."""

    job_id: str
    name: str
    worker: str
    #: Since it was delivered or its lease renewed. Redis does not know when the run began.
    idle_ms: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Details:
    """More about one queue: its running and its dead jobs."""

    running: list[RunningFacts]
    dead: list[DeadJob]


class Board:
    """The queues of a server, and the history of what each one held."""

    def __init__(self, endpoint: Endpoint, queues: list[str], group: str) -> None:
        self._endpoint = endpoint
        if self._endpoint.kind == "cluster" and not queues:
            raise NotSupportedError("a cluster has no single list of its keys: name the queues")
        self._fixed = queues
        self._group = group
        self._connections: dict[str, Connection] = {}
        self._find_at_s = 0.0
        #: By the name of the queue.
        self.histories: dict[str, History] = {name: History() for name in queues}

    async def look(self) -> None:
        """Add the present facts of every queue to its history."""
        if not self._fixed and time.monotonic() >= self._find_at_s:
            names = sorted(await self._connection("").run(find_queues()))
            kept = self.histories
            self.histories = {name: kept.get(name) or History() for name in names}
            self._find_at_s = time.monotonic() + FIND_EVERY_S
        for name, history in self.histories.items():
            history.add(await look(self._connection(name), Keys(name), self._group))

    async def details(self, queue: str) -> Details:
        """The oldest running and dead jobs of one queue."""
        connection, keys = self._connection(queue), Keys(queue)
        request = commands(
            ("XPENDING", keys.stream, self._group, "-", "+", SHOWN),
            effect=Effect.READ,
            raises=False,
        )
        pending = await connection.submit(request)
        rows = pending if isinstance(pending, list) else []
        held = [row for row in rows if row[2] < HANDED_BACK_MS]
        entries = await connection.run(by_id(keys.stream, [entry_id for entry_id, *_ in held]))
        running = [
            RunningFacts(entry.job_id, entry.name, _text(worker), idle_ms, deliveries)
            for entry, (_, worker, idle_ms, deliveries) in zip(entries, held, strict=True)
            if entry is not None  # else it has ended meanwhile
        ]
        return Details(running, await connection.run(dlq.peek(keys, SHOWN)))

    async def toggle_pause(self, queue: str) -> bool:
        """Pause a queue, or resume a paused one; whether it is paused now."""
        connection, keys = self._connection(queue), Keys(queue)
        if await connection.run(state.is_paused(keys)):
            await connection.run(state.resume(keys))
            return False
        await connection.run(state.pause(keys))
        return True

    async def replay(self, queue: str, limit: int) -> int:
        """Run dead jobs of a queue again, oldest first; how many."""
        operations = QueueOperations(Keys(queue))
        return await self._connection(queue).run(dlq.replay(operations, limit))

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    def _connection(self, queue: str) -> Connection:
        """One connection for all queues; on a cluster one per queue, to the node that has it."""
        place = queue if self._endpoint.kind == "cluster" else ""
        if place not in self._connections:
            key = Keys(queue or "chasqui").stream
            self._connections[place] = Connection(
                self._endpoint, key=key, client_name="chasqui-top"
            )
        return self._connections[place]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
