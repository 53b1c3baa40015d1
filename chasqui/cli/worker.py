"""`chasqui worker`: runs a program's worker, in one process or several."""

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from chasqui.cli import health, logs, served
from chasqui.cli.options import RedisUrl, number
from chasqui.running import process
from chasqui.running.process import Recycle
from chasqui.running.reloader import Reloader
from chasqui.running.supervisor import Supervisor
from chasqui.running.target import Target, load_or_log


# Long by its options and its help text.
def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:NAME of a Worker, an app, or a function that makes one.",
        ),
    ],
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="QUEUE", help="Serve only this queue of an app. May be repeated."),
    ] = None,
    burst: Annotated[
        bool,
        typer.Option("--burst", help="End when nothing waits, runs or is due within a minute."),
    ] = False,
    processes: Annotated[
        int | None, number("N", "Run N processes, each with its own slots, and replace the dead.")
    ] = None,
    max_jobs: Annotated[int | None, number("N", "Replace a process after about N jobs.")] = None,
    max_rss: Annotated[int | None, number("MB", "Replace a process that uses more memory.")] = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="For development: start anew when a Python file changes."),
    ] = False,
    health_port: Annotated[
        int | None,
        number("PORT", "Answer GET /healthz: 200 if it can work, else 503.", min=0, max=65535),
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain it.

    A draining worker gives back the jobs that it has not begun, lets its handlers run
    for up to its shutdown_deadline_s, and settles what they finished. A second signal
    stops it at once: handlers are cancelled, and their jobs run elsewhere.

    With --burst it ends by itself when nothing is left to run. Delayed jobs and
    retries that are due within a minute are waited for; the log counts the others.

    With --reload a change of a Python file under the current folder starts it anew;
    what still runs a second later is stopped, and its jobs run again. A program that
    cannot be imported is shown, and waits for the next change.

    --redis-url is for a worker that does not name a server itself.

    Exit codes: 0 drained; 1 an error, a handler that outlasted the drain, or a
    finished job that the server did not confirm; 2 there is no such worker; 130 or
    143 stopped at once, by SIGINT or SIGTERM.

    Example: chasqui worker shop.jobs:worker --processes 4
    """
    if redis_url is not None:
        os.environ["CHASQUI_URL"] = redis_url  # its processes inherit it
    logs.configure(log_format, log_level, as_json)
    around_load = functools.partial(logs.around_load, log_format, log_level, as_json)
    recycle = Recycle(max_jobs, None if max_rss is None else max_rss << 20)
    is_json = as_json or log_format is logs.Format.json
    show = functools.partial(served.show, as_json=is_json)
    wanted = Target(target, tuple(queue) if queue else None, burst)
    if reload and burst:
        raise ValueError("--burst ends the worker and --reload does not: leave one of them out")
    if processes is None and recycle == process.NEVER and not reload:
        loaded = load_or_log(wanted, around_load())
        if loaded is None:
            raise typer.Exit(process.FAILED)
        show(loaded)
        with health.serving(health_port, health.of_worker(loaded)):
            code = process.run(loaded)
    else:
        supervisor: Supervisor
        options = (recycle, around_load, show)
        if reload:
            folder = Path.cwd()
            supervisor = Reloader(wanted, processes or 1, *options, folder=folder)
        else:
            supervisor = Supervisor(wanted, processes or 1, *options)
        with health.serving(health_port, health.of_supervisor(supervisor)):
            code = supervisor.run()
    raise typer.Exit(code)
