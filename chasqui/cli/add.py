"""`chasqui add`: one job from the command line, or millions from a file."""

from pathlib import Path
from typing import Annotated

import typer

from chasqui.cli.options import (
    AsJson,
    Attempts,
    Backoff,
    QueueName,
    RedisUrl,
    duration,
    json_value,
    number,
)
from chasqui.cli.output import say
from chasqui.cli.run import on_queue


# Long because typer wants every option declared here.
def add(
    queue: QueueName,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The handler to run. With --from: for lines without a name."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The job's data. Default: null.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help='Add a job for each line: {"name": …, "data": …}, and if you like delay_ms, '
            "job_id, attempts or backoff. - reads standard input.",
        ),
    ] = None,
    skip: Annotated[int, number("N", "With --from: leave out the first N lines.", min=0)] = 0,
    delay: Annotated[int | None, duration("Run it later: 500ms, 10s, 5m, 2h.")] = None,
    job_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Its id. No second job with this id is added."),
    ] = None,
    unique_for: Annotated[int | None, duration("How long the id is taken. Default: 1d.")] = None,
    attempts: Attempts = None,
    backoff: Backoff = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add a job, or all jobs of a file.

    Example: chasqui add emails welcome '{"to": "ada"}' --delay 10s

    Example: chasqui add emails --from jobs.jsonl
    """
    unique_s = None if unique_for is None else unique_for / 1000
    if source is not None:
        if any(one is not None for one in (data, delay, job_id, attempts, backoff)):
            raise ValueError("with --from, each line has its own data and options")
        from chasqui.cli.add_file import add_file  # imports rich, which the rest does not need

        add_file(queue, name, source, skip, unique_s, redis_url, as_json)
        return
    if name is None:
        raise ValueError("say what to add: NAME and JSON, or --from FILE")
    if data is None and name.startswith(("{", "[")):
        raise ValueError("the name is missing: write NAME before JSON")
    value = None if data is None else json_value(data)
    job = on_queue(
        queue,
        redis_url,
        lambda it: it.add(
            name,
            value,
            delay_ms=delay,
            job_id=job_id,
            attempts=attempts,
            backoff=backoff,
            unique_for=unique_s,
        ),
    )
    sentence = job.id if job.is_new else f"{job.id} was there already"
    say(sentence, {"id": job.id, "is_new": job.is_new}, as_json=as_json)
