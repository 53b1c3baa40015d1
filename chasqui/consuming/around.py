"""Hooks around runs: what a worker does for each job, whatever its handler."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from chasqui.consuming.runs import is_coroutine_function, named
from chasqui.model.job import Job

#: A coroutine function that gets the job and a function that runs it: `await run()` gives what the
#: handler returns. What the hook returns or raises is how the run ends.
Around: TypeAlias = Callable[[Job, Callable[[], Awaitable[Any]]], Awaitable[Any]]


def hooked(hooks: Sequence[Around], run: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Any]:
    """`run` with the hooks around it, the first one outermost."""
    for hook in reversed(hooks):
        run = _layer(hook, run)
    return run


def _layer(hook: Around, run: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    # The hook's own coroutine, and none of ours around it.
    return lambda job: hook(job, functools.partial(run, job))


def check_hooks(hooks: object) -> tuple[Around, ...]:
    """The hooks of a worker; TypeError for what cannot be one."""
    if isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        hint = ": pass [hook]" if callable(hooks) else ""
        raise TypeError(f"around must be a sequence of hooks, got {type(hooks).__name__}{hint}")
    for i, hook in enumerate(hooks):
        _check(hook, f"around[{i}]")
    return tuple(hooks)


def _check(hook: Any, what: str) -> None:
    if not callable(hook):
        raise TypeError(f"{what} must be callable, got {type(hook).__name__}")
    if not is_coroutine_function(hook):
        raise TypeError(
            f"{what} must be a coroutine function, `async def hook(job, run)`, which returns what "
            f"`await run()` gives it: {named(hook)} is none"
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # nothing is known of it
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"{what} must accept two positional arguments, the job and the function that runs it: "
            f"{named(hook)} takes {signature}"
        ) from None
