"""`chasqui free`: ids of jobs that may be used again."""

from typing import Annotated

import typer

from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl
from chasqui.cli.output import show_each
from chasqui.cli.run import on_queue
from chasqui.queue import Queue


def free(
    queue: QueueName,
    job_ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids that jobs were given.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let ids be used again at once, before the time that they stay taken is over.

    This deletes no job: if a job with that id is still waiting, there may be two. Exit code 1 if
    one of the ids was free already.

    Example: chasqui free emails order-17
    """

    async def free_all(it: Queue) -> list[bool]:
        return [await it.free_job_id(job_id) for job_id in job_ids]

    must_exist(queue, redis_url, as_json=as_json)
    freed = on_queue(queue, redis_url, free_all)
    show_each(job_ids, freed, "freed", "was free", as_json=as_json)
