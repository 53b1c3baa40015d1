"""`chasqui delayed`: jobs that wait for their time, retries included."""

from typing import Annotated, Any

import typer

from chasqui._core.envelope import EnvelopeError, decode_delayed_member, decode_envelope
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl
from chasqui.cli.output import at_ms, show_all
from chasqui.cli.run import on_queue, on_server
from chasqui.transport.connection import Connection
from chasqui.model.keys import Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect

app = typer.Typer(
    help="Jobs that wait for their time, retries included.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command("list")
def list_(
    queue: QueueName,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The most jobs to show.")] = 20,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
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
    answers = on_queue(queue, redis_url, lambda it: it.cancel_delayed_bulk(job_ids))
    rows = [
        (job_id, "cancelled" if was_there else "not found")
        for job_id, was_there in zip(job_ids, answers, strict=True)
    ]
    show_all(("job id", "outcome"), rows, as_json=as_json, nothing="")
    if not all(answers):
        raise typer.Exit(1)


async def _listing(connection: Connection, keys: Keys, limit: int) -> list[tuple[Any, ...]]:
    reply = await connection.execute(
        "ZRANGE", keys.delayed, 0, limit - 1, "WITHSCORES", effect=Effect.READ
    )
    return [(at_ms(due), *_read(member)) for member, due in scored(reply)]


def _read(member: bytes) -> tuple[str, str, int | None]:
    """Name, id and the number of the run to come; a member that cannot be read says so."""
    try:
        name, encoded = decode_delayed_member(member)
        envelope = decode_envelope(encoded)
    except EnvelopeError as error:
        return f"(cannot be read: {error})", "", None
    return name, envelope.id, envelope.attempt + 1
