"""`chasqui promoter` and `scheduler`: the leader's loops for many queues, in their own process."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated

from chasqui.cli import logs
from chasqui.cli.options import QueueNames, RedisUrl, number
from chasqui.cli.run import until_signal
from chasqui.model.words import count
from chasqui.timed.leader_loop import LeaderLoopRunner
from chasqui.timed.promoter import Promoter
from chasqui.timed.scheduler import Scheduler

logger = logging.getLogger(__name__)


def promoter(
    queues: QueueNames,
    poll_interval_ms: Annotated[
        int | None, number("MS", "Time between looks for jobs of chasquimq, which wakes no leader.")
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Move delayed jobs to the workers when they are due, until SIGTERM or SIGINT.

    Every worker does this too, unless it has delayed_enabled=False. One process leads, the others
    stand by.

    Example: chasqui promoter emails invoices
    """
    logs.configure(log_format, log_level, as_json)
    loops = [Promoter(redis_url, name, poll_interval_ms=poll_interval_ms) for name in queues]
    _run("promoter", loops)


def scheduler(
    queues: QueueNames,
    tick_interval_ms: Annotated[
        int | None, number("MS", "Time between looks for new repeatable jobs.")
    ] = None,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Add repeatable jobs whenever they fire, until SIGTERM or SIGINT.

    Every worker does this too, unless it has run_scheduler=False. One process leads, the others
    stand by.

    Example: chasqui scheduler emails invoices
    """
    logs.configure(log_format, log_level, as_json)
    loops = [Scheduler(redis_url, name, tick_interval_ms=tick_interval_ms) for name in queues]
    _run("scheduler", loops)


def _run(role: str, loops: Sequence[LeaderLoopRunner]) -> None:
    def shut_down() -> None:
        for loop in loops:
            loop.shutdown()

    async def work() -> None:
        logger.info("%s of %s", role, count(len(loops), "queue"), extra={"queues": len(loops)})
        await asyncio.gather(*(loop.run() for loop in loops))

    until_signal(work, shut_down)
