"""`chasqui top`: all queues of a server on one screen."""

import asyncio
import importlib.util
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chasqui.cli.board import Board
from chasqui.cli.known import must_exist
from chasqui.cli.options import Group, RedisUrl
from chasqui.cli.output import as_names, show
from chasqui.cli.run import on_server
from chasqui.model.config import Endpoint
from chasqui.errors import NotSupportedError
from chasqui.model.keys import DEFAULT_GROUP, check_queue_name


def top(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Only these. Default: all that the server has."),
    ] = None,
    interval_ms: Annotated[
        int, typer.Option(min=50, metavar="MS", help="From one look to the next.")
    ] = 1000,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what it would show now as JSON, and end.")
    ] = False,
) -> None:
    """Show queues, their workers, running and dead jobs on a full screen, as they change.

    Keys: up and down choose a queue, p pauses or resumes it, r runs its dead jobs again, i shows
    more of it, q ends. Needs the extra: pip install 'chasqui[top]'

    Example: chasqui top emails invoices
    """
    for name in queues or ():
        check_queue_name(name)
    endpoint = Endpoint.parse(redis_url)
    if as_json:
        for name in queues or ():
            must_exist(name, redis_url, as_json=True)
        show(asyncio.run(_now(Board(endpoint, queues or [], group))), as_json=True)
        return
    if importlib.util.find_spec("textual") is None:
        raise NotSupportedError("chasqui top needs textual: pip install 'chasqui[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise NotSupportedError("chasqui top needs a terminal; chasqui watch does without")
    # Before the screen is taken: that there is no server is told in one sentence.
    on_server(redis_url, lambda connection: connection.connect())
    from chasqui.cli.screen import Top

    Top(endpoint, queues or [], group=group, interval_s=interval_ms / 1000).run()


async def _now(board: Board) -> dict[str, Any]:
    """Each queue, by name: what it holds, its workers, the first of its running and dead jobs."""
    try:
        await board.look()
        return {name: await _queue(board, name) for name in board.histories}
    finally:
        await board.close()


async def _queue(board: Board, name: str) -> dict[str, Any]:
    details, facts = await board.details(name), board.histories[name].last
    return {
        **as_names(facts.rows()),
        "workers": [asdict(one) for one in facts.live],
        "running": [asdict(one) for one in details.running],
        "dead": [
            {"dlq_id": one.dlq_id, "job_id": one.job_id, "name": one.name, "reason": one.reason}
            for one in details.dead
        ],
    }
