"""`chasqui top`: all queues of a server on one screen."""

import importlib.util
import sys
from typing import Annotated

import typer

from chasqui.cli.options import Group, RedisUrl
from chasqui.cli.run import on_server
from chasqui.config import Endpoint
from chasqui.errors import NotSupportedError
from chasqui.keys import DEFAULT_GROUP, check_queue_name


def top(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Only these. Default: all that the server has."),
    ] = None,
    interval_ms: Annotated[int, typer.Option(min=50, help="From one look to the next.")] = 1000,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
) -> None:
    """Show queues, their workers, running and dead jobs on a full screen, as they change.

    Keys: up and down choose a queue, p pauses or resumes it, r runs its dead jobs again, i shows
    more of it, q ends. Needs the extra: pip install 'chasqui[top]'

    Example: chasqui top emails invoices
    """
    for name in queues or ():
        check_queue_name(name)
    if importlib.util.find_spec("textual") is None:
        raise NotSupportedError("chasqui top needs textual: pip install 'chasqui[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise NotSupportedError("chasqui top needs a terminal; chasqui watch does without")
    # Before the screen is taken: that there is no server is told in one sentence.
    on_server(redis_url, lambda connection: connection.connect())
    from chasqui.cli.screen import Top

    Top(Endpoint.parse(redis_url), queues or [], group=group, interval_s=interval_ms / 1000).run()
