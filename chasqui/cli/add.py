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
    duration_ms,
    json_value,
)
from chasqui.cli.output import show
from chasqui.cli.run import on_queue


def add(
    queue: QueueName,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Which handler runs it; with --from: where a line has none."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Argument(metavar="JSON", help="The job's data. Default null.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help='A job on each line: {"name": …, "data": …}, with delay_ms, job_id, attempts or '
            "backoff if need be. - reads standard input.",
        ),
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --from: leave out the first N lines.")
    ] = 0,
    delay: Annotated[
        int | None,
        typer.Option(parser=duration_ms, metavar="TIME", help="Run it later: 500ms, 10s, 5m, 2h."),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Its id: a second job of the same id is not added."
        ),
    ] = None,
    unique_for: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms, metavar="TIME", help="How long an id stays taken. Default 1d."
        ),
    ] = None,
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
        if data is not None or any(x is not None for x in (delay, job_id, attempts, backoff)):
            raise ValueError("with --from each line says its own data and options")
        # Its progress bar is loaded with it.
        from chasqui.cli.add_file import add_file

        add_file(queue, name, source, skip, unique_s, redis_url, as_json)
        return
    if name is None:
        raise ValueError("say what to add: NAME and JSON, or --from FILE")
    if data is None and name.startswith(("{", "[")):
        raise ValueError("the name is missing: write NAME before JSON")
    job = on_queue(
        queue,
        redis_url,
        lambda it: it.add(
            name,
            None if data is None else json_value(data),
            delay_ms=delay,
            job_id=job_id,
            attempts=attempts,
            backoff=backoff,
            unique_for=unique_s,
        ),
    )
    if as_json:
        show({"id": job.id, "is_new": job.is_new}, as_json=True)
    else:
        print(job.id if job.is_new else f"{job.id} was there already")
