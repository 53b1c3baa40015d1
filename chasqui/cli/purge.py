"""`chasqui purge`: deletes the jobs that no worker has begun."""

from typing import Annotated

import typer

from chasqui.cli.facts import look
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl, Yes
from chasqui.cli.output import say
from chasqui.cli.run import on_server
from chasqui.managing.purge import purge_delayed, purge_waiting
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.transport.connection import Connection


def purge(
    queue: QueueName,
    delayed: Annotated[
        bool, typer.Option("--delayed", help="Delayed jobs as well, retries included.")
    ] = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete the waiting jobs of a queue, and with --delayed the delayed ones.

    This leaves the jobs that a worker holds, dead and repeatable jobs, and jobs that are added
    meanwhile. The ids of deleted jobs may be used again. Without --yes it deletes nothing and shows
    how many jobs it would delete.

    Example: chasqui purge emails --delayed --yes
    """
    keys = Keys(queue)

    async def delete(connection: Connection) -> tuple[int, int]:
        if not yes:
            counts = (await look(connection, keys, DEFAULT_GROUP)).counts
            return counts.waiting, counts.delayed if delayed else 0
        waiting = await connection.run(purge_waiting(keys))
        return waiting, await connection.run(purge_delayed(keys)) if delayed else 0

    must_exist(queue, redis_url, as_json=as_json)
    from_stream, from_delayed = on_server(redis_url, delete, queue=queue)
    jobs = f"{from_stream:,} waiting" + (f" and {from_delayed:,} delayed" if delayed else "")
    jobs += " job" if from_stream + from_delayed == 1 else " jobs"
    sentence = f"deleted {jobs}" if yes else f"would delete {jobs}; add --yes to do it"
    facts = {"waiting": from_stream, "delayed": from_delayed, "deleted": yes}
    say(sentence, facts, as_json=as_json)
