"""Scenes that are lists of calls, made by the asyncio queue and by the blocking one."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import chasqui
import chasqui.sync
from tests.frames.stage import Scene, Stage

Prepare = Callable[[Stage], Awaitable[Any]]


class Call(NamedTuple):
    """One call of a method. `raises` are the errors that it may raise."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    raises: tuple[type[Exception], ...]


def call(
    method: str, *arguments: Any, raises: tuple[type[Exception], ...] = (), **options: Any
) -> Call:
    return Call(method, arguments, options, raises)


def both(
    name: str, *calls: Call, prepare: Prepare | None = None, queue: dict[str, Any] | None = None
) -> list[Scene]:
    """The scene of these calls, by each of the two queues. `queue` are options of theirs."""
    options = queue or {}

    async def play(stage: Stage) -> None:
        if prepare is not None:
            await prepare(stage)
        async with chasqui.Queue(stage.queue, redis_url=stage.url, **options) as one:
            for each in calls:
                with suppress(*each.raises):
                    result = getattr(one, each.method)(*each.arguments, **each.options)
                    if hasattr(result, "__aiter__"):
                        async for _ in result:
                            pass
                    else:
                        await result

    async def play_blocking(stage: Stage) -> None:
        if prepare is not None:
            await prepare(stage)
        await asyncio.to_thread(_play_blocking, stage, calls, options)

    return [Scene(name, play), Scene(f"sync {name}", play_blocking)]


def _play_blocking(stage: Stage, calls: tuple[Call, ...], options: dict[str, Any]) -> None:
    with chasqui.sync.Queue(stage.queue, redis_url=stage.url, **options) as one:
        for each in calls:
            with suppress(*each.raises):
                result = getattr(one, each.method)(*each.arguments, **each.options)
                if hasattr(result, "__next__"):
                    list(result)
