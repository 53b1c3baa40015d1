"""`chasqui worker`: a program's worker as a process, or as several."""

import functools
import os
from typing import Annotated

import typer

from chasqui import runner
from chasqui.cli import health, logs
from chasqui.cli.options import RedisUrl
from chasqui.running.process import Recycle
from chasqui.running.supervisor import Supervisor


def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:WORKER", help="Where it is: a Worker, or a function that makes one."
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Run so many, each with its own slots, and replace those that die.",
        ),
    ] = None,
    max_jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Replace a process after about so many jobs."),
    ] = None,
    max_rss: Annotated[
        int | None,
        typer.Option(min=1, metavar="MB", help="Replace a process that takes so much memory."),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Answer GET /healthz there: 200, or 503 while it starts, drains or has no server.",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain it.

    The drain hands back what has not begun, lets handlers finish up to the
    worker's shutdown_deadline_s and acknowledges. A second signal stops at once:
    handlers are cancelled, and their jobs run elsewhere.

    --redis-url counts for a worker that names no server itself.

    Exit codes: 0 drained; 1 an error, handlers outlasted the drain, or the server
    did not hear of all that was done; 2 there is no such worker; 130 or 143
    stopped at once, by SIGINT or SIGTERM.

    Example: chasqui worker shop.jobs:worker --processes 4
    """
    if redis_url is not None:
        os.environ["CHASQUI_URL"] = redis_url  # inherited by the processes, unlike an argument
    logs.configure(log_format, log_level, as_json)
    around_load = functools.partial(logs.around_load, log_format, log_level, as_json)
    recycle = Recycle(max_jobs, None if max_rss is None else max_rss << 20)
    if processes is None and recycle == runner.NEVER:
        loaded = runner.load_or_tell(target, around_load())
        if loaded is None:
            raise typer.Exit(runner.FAILED)
        with health.serving(health_port, health.of_worker(loaded)):
            code = runner.run(loaded)
    else:
        supervisor = Supervisor(target, processes or 1, recycle, around_load)
        with health.serving(health_port, health.of_supervisor(supervisor)):
            code = supervisor.run()
    raise typer.Exit(code)
