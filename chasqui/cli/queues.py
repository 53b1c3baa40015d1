"""`chasqui queues`: lists the queues of a server."""

from typing import Any

import typer

from chasqui.cli.options import AsJson, Group, RedisUrl
from chasqui.cli.output import show_all
from chasqui.cli.run import on_server
from chasqui.errors import NotSupportedError, ServerError
from chasqui.managing import state
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Plan, commands

_COLUMNS = ("queue", "waiting", "pending", "delayed", "dlq", "repeatable", "paused")
#: The text before and after a queue's name in each of its keys.
_BEFORE, _BEHIND = Keys("0").pattern.removesuffix(b"*").split(b"0")


def queues(
    redis_url: RedisUrl = None, group: Group = DEFAULT_GROUP, as_json: AsJson = False
) -> None:
    """List the queues of a server, with the number of their jobs.

    This scans all keys of the database, a thousand at a time.

    Example: chasqui queues --redis-url redis://localhost:6379
    """
    rows = on_server(redis_url, lambda connection: _listing(connection, group))
    show_all(_COLUMNS, rows, as_json=as_json, nothing="no queues")


async def _listing(connection: Connection, group: str) -> list[tuple[Any, ...]]:
    if connection.endpoint.kind == "cluster":
        raise NotSupportedError("a cluster has no single list of its keys: ask each node")
    rows: list[tuple[Any, ...]] = []
    for name in sorted(await connection.run(find_queues())):
        try:
            counts = await connection.run(state.counts(Keys(name), group))
        except ServerError as error:  # one of its keys has another type
            typer.echo(f"chasqui: queue {name} cannot be counted: {error}", err=True)
            rows.append((name, *(None,) * (len(_COLUMNS) - 1)))
            continue
        in_stream = (counts.waiting, counts.pending)
        others = (counts.delayed, counts.dlq, counts.repeatables, counts.is_paused)
        rows.append((name, *in_stream, *others))
    return rows


def find_queues(*, by_any_key: bool = False) -> Plan[set[str]]:
    """The names of all queues that hold something or are paused; with `by_any_key`, also of those
    that have any other key."""
    cursor, names = b"0", set[str]()
    while True:
        scan = ("SCAN", cursor, "MATCH", _BEFORE + b"*" + _BEHIND + b"*", "COUNT", 1000)
        cursor, found = yield commands(scan, effect=Effect.READ)
        names.update(name for key in found if (name := _queue_of(key, by_any_key)))
        if cursor == b"0":
            return names


def _queue_of(key: bytes, by_any_key: bool) -> str | None:
    """The queue that a key belongs to. None for keys of others and, unless `by_any_key`, for
    markers and results, which outlive the queue's jobs."""
    name = key.removeprefix(_BEFORE).partition(_BEHIND)[0].decode(errors="replace")
    try:
        keys = Keys(name)
    except ValueError:
        return None
    is_proof = by_any_key or key in (keys.stream, keys.delayed, keys.dlq, keys.repeat, keys.paused)
    return name if is_proof else None
