"""A handler and its run: of which kind it is, its time limit, and its errors as text."""

import asyncio
import functools
import inspect
import logging
import os
import traceback
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Final, TypeAlias

logger = logging.getLogger(__name__)

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

#: Frames of a traceback whose files are here are our own.
_HERE: Final = os.path.join(os.path.dirname(__file__), "")
#: A future cannot carry the first. The second would close the coroutines that await it.
NOT_FOR_FUTURES: Final = (StopIteration, GeneratorExit)
#: How long a cancelled handler may take to end.
CANCEL_S: Final = 1.0
#: How much of an error's text is logged: handlers may put anything into it.
LOGGED_CHARS: Final = 300


class NotBegunError(BaseException):
    """The worker drains, and the run was still waiting for a thread or a process: give it back.

    It is no failure, so hooks that look after errors must not take it for one.
    """


async def run_with_timeout(limit_s: float, run: Awaitable[Any], queue: str) -> Any:
    """What the run returns. A run over its time is cancelled and raises TimeoutError. If it ignores
    that, it is left behind and goes on, but its slot is free."""
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
    raise TimeoutError(f"the handler took longer than {limit_s:g} s") from _end_of(task)


def _end_of(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """The exception by which a cancelled run ended: its traceback shows where the run was."""
    if task.cancelled():
        try:
            task.exception()
        except asyncio.CancelledError as cancelled:
            return cancelled
    return None


#: Runs that were cancelled and have not ended; the loop itself holds tasks only weakly.
_cancelled: set[asyncio.Task[Any]] = set()


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a run, and keep a reference until it ends: its waiter may be cancelled too."""
    _cancelled.add(task)
    task.add_done_callback(_cancelled.discard)
    task.cancel()


async def _contained(run: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What a run returned, or the exception that would end the loop if a task raised it."""
    try:
        return await run, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def is_coroutine_function(handler: object) -> bool:
    """Whether a handler is one; also true for partials, and for objects with such a `__call__`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, type):
        return False  # its instances may be coroutine functions: a call makes one
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - its kind is asked, not whether it is there
    )


def named(handler: object) -> str:
    """What to call a handler in a message."""
    name = getattr(handler, "__qualname__", None)
    return name if isinstance(name, str) else type(handler).__qualname__


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def described(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_short(error: BaseException) -> str:
    """The same for a log line: cut, and without characters that cannot be encoded."""
    return described(error)[:LOGGED_CHARS].encode(errors="replace").decode()


def as_exc_info(error: BaseException) -> ExcInfo | None:
    """A handler's error for a log record, without our own frames, which are always the same. None
    if its text cannot be encoded, so that no file could take it."""
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
