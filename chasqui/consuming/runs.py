"""A handler's run: kept to its time, contained in what it may raise, put into words."""

import asyncio
import logging
import os
import traceback
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Final, TypeAlias

logger = logging.getLogger(__name__)

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

#: Where the frames of a run are that are ours.
_HERE: Final = os.path.join(os.path.dirname(__file__), "")
#: What a cancelled handler gets to come to its end.
CANCEL_S: Final = 1.0
#: What is logged of an error: handlers may put anything into one.
LOGGED_CHARS: Final = 300


class NotBegunError(Exception):
    """The worker drains, and the run still waited for its place: the job goes back."""


async def within(limit_s: float, run: Awaitable[Any], queue: str) -> Any:
    """What the run returns, or TimeoutError. A run over its time is cancelled and has failed, even
    if it takes no notice; one that goes on regardless is left behind, and its slot is free."""
    task = asyncio.ensure_future(_contained(run))
    try:
        await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        _cancel(task)
        await asyncio.wait({task})
        if task.cancelled():
            raise
    if task.done():
        result, error = task.result()
        if error is not None:
            raise error
        return result
    _cancel(task)
    await asyncio.wait({task}, timeout=CANCEL_S)
    if not task.done():
        logger.error(
            "queue %s: a handler ignores that it was cancelled: it is left behind",
            queue,
            extra={"queue": queue, "limit_s": limit_s},
        )
    elif not task.cancelled():
        task.exception()
    raise TimeoutError(f"the handler took longer than {limit_s:g} s")


#: Runs that were cancelled and have not ended; the loop itself holds tasks only weakly.
_cancelled: set[asyncio.Task[Any]] = set()


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a run, and keep it until its end: whoever waits for that may be cancelled as well."""
    _cancelled.add(task)
    task.add_done_callback(_cancelled.discard)
    task.cancel()


async def _contained(run: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What a run returned or, where a task would take the loop down with it, raised."""
    try:
        return await run, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def described(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_short(error: BaseException) -> str:
    """The same for a log line: cut, and without what no terminal could show."""
    return described(error)[:LOGGED_CHARS].encode(errors="replace").decode()


def as_exc_info(error: BaseException) -> ExcInfo | None:
    """A handler's error for a log record, from the handler on: how it was called is always the
    same. None if its text is one that no file takes."""
    try:
        traceback_of(error).encode()
    except UnicodeEncodeError:
        return None
    trace = first = error.__traceback__
    while trace is not None:
        name, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
        if name.startswith(_HERE):
            first = trace
    return type(error), error, first


def traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return ""
