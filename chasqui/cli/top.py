"""`chasqui top`: shows all queues of a server on one screen."""

import asyncio
import importlib.util
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from chasqui.cli.board import Board
from chasqui.cli.known import must_exist
from chasqui.cli.options import Group, RedisUrl, number
from chasqui.cli.output import as_names, show
from chasqui.cli.run import on_server
from chasqui.errors import NotSupportedError
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, check_queue_name


def top(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Only these. Default: all queues of the server."),
    ] = None,
    interval_ms: Annotated[int, number("MS", "Time between two looks.", min=50)] = 1000,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what it would show now as JSON, and end.")
    ] = False,
) -> None:
    """Show queues, their workers, running and dead jobs on a full screen, as they change.

    Keys: up and down choose a queue, p pauses or resumes it, r replays its dead jobs, i shows more
    about it, q ends. You need an extra: pip install 'chasqui[top]'

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
    # Before the screen opens, so that a missing server is reported in one sentence.
    on_server(redis_url, lambda connection: connection.connect())
    from chasqui.cli.screen import Top

    Top(endpoint, queues or [], group=group, interval_s=interval_ms / 1000).run()


async def _now(board: Board) -> dict[str, Any]:
    """For each queue: what it holds, its workers, its oldest running and dead jobs."""
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
