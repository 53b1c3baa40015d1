"""The commands of `chasqui`: one file per command or group, imported when the command is run."""

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from chasqui._version import VERSION
from chasqui.cli.options import RedisUrl

#: Each command, and the module here that has it as a function of its name or, for a group, `app`.
COMMANDS: Final = {
    "demo": "demo",
    "server": "server",
    "worker": "worker",
    "promoter": "timed",
    "scheduler": "timed",
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
    "purge": "purge",
    "obliterate": "state",
    "doctor": "doctor",
    "spark": "spark",
}
#: Old names of commands, which still work and warn. `--help` does not list them.
RENAMED: Final = {"drain": "purge"}


class _Commands(TyperGroup):
    """The commands by name. To import all of them for one would double the time that it takes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (new_name := RENAMED.get(cmd_name)) is not None:
            typer.echo(f"chasqui: `{cmd_name}` is now called `{new_name}`", err=True)
            cmd_name = new_name
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
