"""Arguments and options that several commands share, and how their values are parsed."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
#: A thousand years: a moment that long ago still has a date.
_LONGEST_MS = 365_000 * 86_400_000


def group(help: str) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


def duration_ms(text: str) -> int:
    """Milliseconds of a time such as 500ms, 10s, 5m, 2h, 1d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time: write it as 500ms, 10s, 5m, 2h or 1d")
    time_ms = float(found[1]) * _UNITS_MS[found[2]]
    if time_ms > _LONGEST_MS:
        raise typer.BadParameter("no time is longer than a thousand years")
    return round(time_ms)


def moment(text: str) -> datetime:
    """The moment that the text names: an ISO 8601 time, in UTC unless it has a zone, or how long
    ago it was, as 2h."""
    try:
        ago_ms = duration_ms(text)
    except typer.BadParameter:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is no moment: write 2h for two hours ago, or 2026-01-31T12:00:00"
            ) from None
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return datetime.now(UTC) - timedelta(milliseconds=ago_ms)


def number(metavar: str, help: str, *, min: int = 1, max: int | None = None) -> Any:
    """An option for a whole number."""
    return typer.Option(metavar=metavar, help=help, min=min, max=max)


def duration(help: str) -> Any:
    """An option for a time, in milliseconds."""
    return typer.Option(parser=duration_ms, metavar="TIME", help=help)


def json_value(text: str) -> Any:
    """The value of JSON text from the command line."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the job's data is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the job's data is not JSON: {error}") from None


def _or_of_root(context: typer.Context, value: str | None) -> str | None:
    """The option's value: it may also stand before the command."""
    parent = context.parent
    while value is None and parent is not None:
        value = parent.params.get("redis_url")
        parent = parent.parent
    return value


QueueName: TypeAlias = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
QueueNames: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="QUEUE", help="The queues' names.")
]
RedisUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="CHASQUI_REDIS_URL",
        show_envvar=False,
        callback=_or_of_root,
        metavar="URL",
        help="The server. Default: $CHASQUI_URL, $REDIS_URL, or the one on this machine.",
    ),
]
#: For commands that start a server of their own: no variable may point them at a real one.
OwnRedisUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        metavar="URL",
        help="Use this server, with a queue that is deleted at the end.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Group: TypeAlias = Annotated[str, typer.Option(metavar="NAME", help="The consumer group.")]
Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", "-y", help="Do it. Without it you only see what would be done.")
]
Limit: TypeAlias = Annotated[int, number("N", "Take at most N of them.")]
Attempts: TypeAlias = Annotated[int | None, number("N", "Run it at most N times, with retries.")]
Backoff: TypeAlias = Annotated[int | None, duration("The wait before each retry: 500ms, 10s.")]
