"""`python -m tests.chaos.cancels`: calls that are cancelled wherever they wait, over links that are
cut now and then. Each of the others must get its own reply, and at the end nothing may be left."""

import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from chasqui.model.config import Endpoint
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request, commands
from tests.chaos.figure import Figure, Say, silent
from tests.servers import Server

NAME = "cancels"
CONNECTIONS = 4
#: Calls at once.
AT_ONCE = 50
#: All links are cut after so many calls.
CUT_EVERY = 20_000


@dataclass
class Storm:
    """What became of some calls."""

    cancelled: int = 0
    answered: int = 0
    #: Got another call's reply.
    mismatched: int = 0
    #: Raised something else than that they were cancelled.
    failed: int = 0

    async def run(
        self,
        connections: list[Connection],
        cancels: int,
        luck: random.Random,
        *,
        cut: Callable[[], Awaitable[None]] | None = None,
        say: Say = silent,
    ) -> None:
        """Call and cancel until so many calls have been cancelled."""
        alive: set[asyncio.Task[None]] = set()
        calls = 0
        while self.cancelled < cancels:
            calls += 1
            call = self._call(luck.choice(CALLS), luck.choice(connections), calls)
            alive.add(asyncio.create_task(call))
            if luck.random() < 0.5:
                await asyncio.sleep(0)
            for task in luck.choices(tuple(alive), k=luck.randrange(3)):
                task.cancel()
            if len(alive) >= AT_ONCE:
                _, alive = await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            if cut is not None and calls % CUT_EVERY == 0:
                await cut()
                say(self.cancelled)
        await asyncio.gather(*alive, return_exceptions=True)

    async def _call(
        self,
        call: Callable[[Connection, int], Awaitable[bool]],
        connection: Connection,
        tag: int,
    ) -> None:
        try:
            if await call(connection, tag):
                self.answered += 1
            else:
                self.mismatched += 1
        except asyncio.CancelledError:  # one that had not begun does not come here
            self.cancelled += 1
            raise
        except Exception:
            self.failed += 1


def echo(tag: object) -> Request:
    return commands(("ECHO", str(tag)), effect=Effect.READ)


async def _one(connection: Connection, tag: int) -> bool:
    return bool(await connection.submit(echo(tag)) == b"%d" % tag)


async def _one_after_another(connection: Connection, tag: int) -> bool:
    def plan() -> Any:
        first = yield echo(f"{tag}.1")
        return first, (yield echo(f"{tag}.2"))

    return bool(await connection.run(plan()) == (b"%d.1" % tag, b"%d.2" % tag))


async def _stream(connection: Connection, tag: int) -> bool:
    def plan() -> Any:
        return (yield (echo(f"{tag}.{i}") for i in range(3)))

    return bool(await connection.run(plan()) == [b"%d.%d" % (tag, i) for i in range(3)])


#: Each is a call and says whether the replies were its own.
CALLS = (_one, _one, _one_after_another, _stream)


async def measure(kind: str, cancels: int, seed: int, *, say: Say = silent) -> dict[str, Any]:
    """Cancel so many calls, and look for what is left of them."""
    with Server(kind) as server:
        endpoint = Endpoint.parse(server.url)
        control = Connection(endpoint, key=b"control")
        await control.connect()
        gc.collect()  # what others left behind must not be freed meanwhile
        tasks, descriptors = len(asyncio.all_tasks()), _descriptors()
        connections = [
            Connection(endpoint, key=b"%d" % i, client_name=NAME) for i in range(CONNECTIONS)
        ]
        cuts = 0

        async def cut() -> None:
            nonlocal cuts
            cuts += 1
            kill = ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await control.execute(*kill, effect=Effect.IDEMPOTENT)

        storm, began_s = Storm(), time.monotonic()
        await storm.run(connections, cancels, random.Random(seed), cut=cut, say=say)
        seconds = time.monotonic() - began_s
        for connection in connections:
            await connection.submit(echo("last"))
        clients = await control.execute("CLIENT", "LIST", effect=Effect.READ)
        for connection in connections:
            await connection.close()
        gc.collect()
        left = {
            "tasks": len(asyncio.all_tasks()) - tasks, "descriptors": _descriptors() - descriptors,
            "links": clients.count(b" name=%b " % NAME.encode()) - CONNECTIONS,
        }  # fmt: skip
        await control.close()
    return {
        "server": kind, "seed": seed, **vars(storm), "cuts": cuts, "left": left,
        "seconds": round(seconds),
    }  # fmt: skip


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = [f"{told[name]:,} {name}" for name in ("mismatched", "failed") if told[name]]
    found += [f"{count} {name} left over" for name, count in told["left"].items() if count]
    if not told["answered"]:
        found.append("none was answered")
    return found


def main() -> int:
    figure = Figure("cancels", __doc__)
    figure.parser.add_argument("--cancels", type=int, default=1_000_000)
    asked = figure.arguments()
    told = asyncio.run(measure(asked.server, asked.cancels, asked.seed, say=figure.say))
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
