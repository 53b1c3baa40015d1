"""`chasqui free`: ids of jobs that may be used again."""

from typing import Annotated

import typer

from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl
from chasqui.cli.output import show_all
from chasqui.cli.run import on_queue
from chasqui.queue import Queue


def free(
    queue: QueueName,
    job_ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids that jobs were given.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let ids be used again before their time is over.

    No job is deleted: if one of that id still waits, there may be two. Exit code 1 if one of them
    was free already.

    Example: chasqui free emails order-17
    """

    async def deed(it: Queue) -> list[bool]:
        return [await it.free_job_id(job_id) for job_id in job_ids]

    must_exist(queue, redis_url, as_json=as_json)
    answers = on_queue(queue, redis_url, deed)
    rows = [
        (job_id, "freed" if was_taken else "was free")
        for job_id, was_taken in zip(job_ids, answers, strict=True)
    ]
    show_all(("job id", "outcome"), rows, as_json=as_json, nothing="")
    if not all(answers):
        raise typer.Exit(1)
