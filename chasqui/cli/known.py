"""Whether there is such a queue: a mistyped name must not look like an empty one."""

import typer

from chasqui.cli.output import escaped, show
from chasqui.cli.queues import find_queues
from chasqui.cli.run import on_server
from chasqui.transport.connection import Connection
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect
from chasqui.model.words import meant, near


def must_exist(queue: str, redis_url: str | None, *, as_json: bool) -> None:
    """End the command with exit code 1 if the server has nothing of the queue."""
    others = _near_unless_known(queue, redis_url)
    if others is None:
        return
    if as_json:
        show({"queue": queue, "found": False, "near": others}, as_json=True)
    tell(f"there is no queue {queue}{meant(others)}")
    raise typer.Exit(1)


def tell_if_new(queue: str, redis_url: str | None) -> None:
    """The same for a command that may come before the queue: it goes on."""
    others = _near_unless_known(queue, redis_url)
    if others is not None:
        tell(f"there is no queue {queue} yet{meant(others)}")


def tell(text: str) -> None:
    """A sentence on stderr."""
    typer.echo(f"chasqui: {escaped(text)}", err=True)


def _near_unless_known(queue: str, redis_url: str | None) -> list[str] | None:
    """None if the server has anything of the queue, else the names of queues that are near."""
    return on_server(redis_url, lambda it: _look(it, Keys(queue)), queue=queue)


async def _look(connection: Connection, keys: Keys) -> list[str] | None:
    mostly = (keys.stream, keys.delayed, keys.dlq, keys.repeat, keys.events, keys.paused)
    if await connection.execute("EXISTS", *mostly, effect=Effect.READ):
        return None
    try:
        names = await connection.run(find_queues(by_any_key=True))
    except ChasquiError:  # not everybody may list keys
        return []
    if keys.queue in names:  # of one that is all done, ids and results may be left
        return None
    return near(keys.queue, names)
