"""`chasqui delayed`: jobs that are due later, retries included."""

from typing import Annotated, Any

import typer

from chasqui._core.envelope import EnvelopeError
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Limit, QueueName, RedisUrl, group
from chasqui.cli.output import at_ms, show_all, show_each
from chasqui.cli.run import on_queue, on_server
from chasqui.managing.entries import delayed_job
from chasqui.model.keys import Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect

app = group("Jobs that are due later, retries included.")


@app.command("list")
def list_(
    queue: QueueName, limit: Limit = 20, redis_url: RedisUrl = None, as_json: AsJson = False
) -> None:
    """List delayed jobs, soonest first.

    Example: chasqui delayed list emails --limit 5
    """
    must_exist(queue, redis_url, as_json=as_json)
    rows = on_server(redis_url, lambda it: _listing(it, Keys(queue), limit), queue=queue)
    columns = ("due", "name", "job id", "attempt")
    show_all(columns, rows, as_json=as_json, nothing="no delayed jobs")


@app.command()
def cancel(
    queue: QueueName,
    job_ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids of delayed jobs.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take delayed jobs back before they are due.

    Exit code 1 if one of them was not delayed.

    Example: chasqui delayed cancel emails 01JH8ZT4Q5Y0V0Y9M5S1M3E7WX
    """
    must_exist(queue, redis_url, as_json=as_json)
    cancelled = on_queue(queue, redis_url, lambda it: it.cancel_delayed_bulk(job_ids))
    show_each(job_ids, cancelled, "cancelled", "not found", as_json=as_json)


async def _listing(connection: Connection, keys: Keys, limit: int) -> list[tuple[Any, ...]]:
    reply = await connection.execute(
        "ZRANGE", keys.delayed, 0, limit - 1, "WITHSCORES", effect=Effect.READ
    )
    return [(at_ms(due), *_read(member)) for member, due in scored(reply)]


def _read(member: bytes) -> tuple[str, str, int | None]:
    """Name, id and next attempt of a delayed job; for an unreadable one the error as its name."""
    try:
        name, envelope = delayed_job(member)
    except EnvelopeError as error:
        return f"(cannot be read: {error})", "", None
    return name, envelope.id, envelope.attempt + 1
