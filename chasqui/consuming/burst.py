"""When a worker that runs until its queue is empty may end."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from chasqui.consuming.backlog import Backlog
from chasqui.consuming.engine import Engine
from chasqui.errors import OutcomeUnknownError, ServerError, UnreachableError
from chasqui.model.words import count
from chasqui.transport.server import is_group_gone

logger = logging.getLogger(__name__)

#: A delayed job or a retry that is due within this time is waited for.
SOON_MS: Final = 60_000
#: How often to look if nothing happens here, and how long to wait after each look in any case.
POLL_S: Final = 1.0
REST_S: Final = 0.1


async def until_done(engines: Sequence[Engine]) -> None:
    """Wait until nothing waits or runs in any of the queues, and nothing is due soon."""
    quiet = asyncio.Event()
    for engine in engines:
        engine.on_quiet(quiet.set)
    while True:
        quiet.clear()
        try:
            left = await _look(engines)
        except (UnreachableError, OutcomeUnknownError) as error:
            logger.debug("the queues cannot be counted: %s", error, extra={"error": str(error)})
            left = None
        except ServerError as error:
            if not is_group_gone(error):  # the reader makes it
                raise
            left = None
        if left is not None:
            for engine, backlog in zip(engines, left, strict=True):
                _log_left(engine, backlog)
            return
        await asyncio.sleep(REST_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quiet.wait(), POLL_S)


async def _look(engines: Sequence[Engine]) -> list[Backlog] | None:
    """What is left, if all is done; None if not.

    Jobs move while we look, so the plan asks in the order in which they move: delayed, waiting,
    ours. Only a run could move one back; so none may have gone on here meanwhile.
    """
    for engine in engines:
        if engine.is_at_work:
            return None
        await engine.settle()
    finished = [engine.held.finished for engine in engines]
    found = await asyncio.gather(*(engine.backlog(SOON_MS) for engine in engines))
    if any(engine.is_at_work or engine.held.unsettled for engine in engines):
        return None
    if finished != [engine.held.finished for engine in engines]:
        return None
    is_done = all(_is_done(engine, backlog) for engine, backlog in zip(engines, found, strict=True))
    return found if is_done else None


def _is_done(engine: Engine, backlog: Backlog) -> bool:
    if backlog.is_paused:
        return not backlog.ours
    due_soon = backlog.due_soon if engine.config.delayed_enabled else 0
    return not (backlog.waiting or backlog.ours or backlog.left_behind or due_soon)


def _log_left(engine: Engine, backlog: Backlog) -> None:
    queue = engine.keys.queue
    left = backlog.waiting + backlog.due_soon + backlog.due_later
    jobs = f"{count(left, 'job')} {'is' if left == 1 else 'are'}"
    said = "nothing is left to run"
    if left:
        said = f"paused; {jobs} left" if backlog.is_paused else f"{said} now; {jobs} due later"
    if backlog.pending:
        said += f"; other workers have {count(backlog.pending, 'job')}"
    fields = {"queue": queue, "left": left, "pending": backlog.pending}
    logger.info("queue %s: %s", queue, said, extra=fields)
