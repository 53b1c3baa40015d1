"""The commands of `chasqui`: one file per command or group, loaded when it is asked for."""

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from chasqui._version import VERSION
from chasqui.cli.options import RedisUrl

#: Each command and the module here that has it: a function of its name, or, for a group, `app`.
COMMANDS: Final = {
    "demo": "demo",
    "server": "server",
    "worker": "worker",
    "promoter": "duties",
    "scheduler": "duties",
    "exporter": "exporter",
    "add": "add",
    "inspect": "inspect",
    "queues": "queues",
    "watch": "watch",
    "top": "top",
    "events": "events",
    "tail": "events",
    "retention": "retention",
    "job": "job",
    "dlq": "dlq",
    "delayed": "delayed",
    "free": "free",
    "repeatable": "repeatable",
    "pause": "state",
    "resume": "state",
    "drain": "drain",
    "obliterate": "state",
    "doctor": "doctor",
    "spark": "spark",
}


class _Commands(TyperGroup):
    """The commands by name. Loading all of them to run one would double the time it takes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"chasqui.cli.{COMMANDS[cmd_name]}")
        group: typer.Typer | None = getattr(module, "app", None)
        if group is None:
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            group.command(cmd_name)(getattr(module, cmd_name))
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="chasqui",
    cls=_Commands,
    help="A job queue for Python on Redis Streams.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
