"""Checks that a queue exists: a mistyped name must not look like an empty queue."""

import typer

from chasqui.cli.output import escaped, show
from chasqui.cli.queues import find_queues
from chasqui.cli.run import on_server
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.model.words import meant, near
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect


def must_exist(queue: str, redis_url: str | None, *, as_json: bool) -> None:
    """End the command with exit code 1 if the server has no key of the queue."""
    others = _near_unless_known(queue, redis_url)
    if others is None:
        return
    if as_json:
        show({"queue": queue, "found": False, "near": others}, as_json=True)
    tell(f"there is no queue {queue}{meant(others)}")
    raise typer.Exit(1)


def tell_if_new(queue: str, redis_url: str | None) -> None:
    """Say it if the server has no key of the queue, and go on: the queue may be about to begin."""
    others = _near_unless_known(queue, redis_url)
    if others is not None:
        tell(f"there is no queue {queue} yet{meant(others)}")


def tell(text: str) -> None:
    """Print a sentence on stderr."""
    typer.echo(f"chasqui: {escaped(text)}", err=True)


def _near_unless_known(queue: str, redis_url: str | None) -> list[str] | None:
    """None if the server has a key of the queue, else the names of queues spelt like it."""
    return on_server(redis_url, lambda it: _look(it, Keys(queue)), queue=queue)


async def _look(connection: Connection, keys: Keys) -> list[str] | None:
    mostly = (keys.stream, keys.delayed, keys.dlq, keys.repeat, keys.events, keys.paused)
    if await connection.execute("EXISTS", *mostly, effect=Effect.READ):
        return None
    try:
        names = await connection.run(find_queues(by_any_key=True))
    except ChasquiError:  # the user may lack the right to list keys
        return []
    if keys.queue in names:  # markers and results outlive the last job
        return None
    return near(keys.queue, names)
