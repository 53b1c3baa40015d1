"""The commands of `chasqui`: one file per command or group, joined into one app here."""

from typing import Annotated

import typer

from chasqui._version import VERSION
from chasqui.cli import (
    add,
    delayed,
    demo,
    dlq,
    doctor,
    inspect,
    queues,
    repeatable,
    server,
    state,
    worker,
)
from chasqui.cli.options import RedisUrl

app = typer.Typer(
    name="chasqui",
    help="A job queue for Python on Redis Streams.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for _command in (
    demo.demo,
    server.server,
    worker.worker,
    add.add,
    inspect.inspect,
    queues.queues,
    state.pause,
    state.resume,
    state.obliterate,
    doctor.doctor,
):
    app.command(_command.__name__)(_command)
for _group, _name in ((dlq.app, "dlq"), (delayed.app, "delayed"), (repeatable.app, "repeatable")):
    app.add_typer(_group, name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chasqui {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    redis_url: RedisUrl = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A job queue for Python on Redis Streams.

    Every command has an example: chasqui COMMAND --help
    """
