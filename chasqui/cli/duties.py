"""`chasqui promoter` and `scheduler`: timed work in a process of its own, for many queues."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from chasqui.cli import logs
from chasqui.cli.options import RedisUrl
from chasqui.cli.run import until_signal
from chasqui.timed.leader_loop import Standalone
from chasqui.promoter import Promoter
from chasqui.timed.scheduler import Scheduler
from chasqui.model.words import count

logger = logging.getLogger(__name__)

Queues: TypeAlias = Annotated[list[str], typer.Argument(metavar="QUEUE", help="Their names.")]


def promoter(
    queues: Queues,
    poll_interval_ms: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MS",
            help="How often to look for delayed jobs of chasquimq, which wakes nobody.",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Move due jobs of queues to their workers, until SIGTERM or SIGINT.

    Every worker does that, unless it has delayed_enabled=False. One leads, the others stand by.

    Example: chasqui promoter emails invoices
    """
    logs.configure(log_format, log_level, as_json)
    _run(
        "promoter",
        [Promoter(redis_url, name, poll_interval_ms=poll_interval_ms) for name in queues],
    )


def scheduler(
    queues: Queues,
    tick_interval_ms: Annotated[
        int | None,
        typer.Option(min=1, metavar="MS", help="How often to look for new repeatable jobs."),
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Fire repeatable jobs of queues, until SIGTERM or SIGINT.

    Every worker does that, unless it has run_scheduler=False. One leads, the others stand by.

    Example: chasqui scheduler emails invoices
    """
    logs.configure(log_format, log_level, as_json)
    _run(
        "scheduler",
        [Scheduler(redis_url, name, tick_interval_ms=tick_interval_ms) for name in queues],
    )


def _run(role: str, duties: Sequence[Standalone]) -> None:
    def shut_down() -> None:
        for duty in duties:
            duty.shutdown()

    async def work() -> None:
        logger.info("%s of %s", role, count(len(duties), "queue"), extra={"queues": len(duties)})
        await asyncio.gather(*(duty.run() for duty in duties))

    until_signal(work, shut_down)
