"""The apps of the process under test: they are taken to the server of the test, found by their
queues, and left without open ends."""

import asyncio
import os
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from chasqui import App, Task, WorkerGroup
from chasqui.model.words import some
from chasqui.tasks.app import URL_OVERRIDE
from chasqui.tasks.open_queues import QueuesOfApp

T = TypeVar("T")

#: How long the end of a test waits for a worker that was told to stop.
END_S: Final = 10.0


#: The apps that were there when the test began.
_older: weakref.WeakSet[App[Any]] = weakref.WeakSet()


class AmbiguousQueueError(Exception):
    """Several apps have tasks on one queue, and nothing tells which of them is meant."""


@contextmanager
def taken_to(url: str) -> Iterator[None]:
    """Have all apps, also those that are made meanwhile, use this server inside of the block, and
    plain queues and workers without a URL too. At the end their workers are stopped and their
    queues closed."""
    names = (URL_OVERRIDE, "CHASQUI_URL")
    before = {name: os.environ.get(name) for name in names}
    # Connections that are open lead to other servers: they are kept aside.
    aside = {app: _exchanged(app, QueuesOfApp()) for app in list(App.known)}
    _older.clear()
    _older.update(aside)
    os.environ.update(dict.fromkeys(names, url))
    try:
        yield
    finally:
        for app in list(App.known):
            for group in list(app.groups):
                _end(group)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for app in list(App.known):
            _close(_exchanged(app, aside.get(app) or QueuesOfApp()))


def _exchanged(app: App[Any], queues: QueuesOfApp) -> QueuesOfApp:
    before, app.queues = app.queues, queues
    return before


def app_of(queue: str, only: App[Any] | None = None) -> App[Any] | None:
    """The app whose workers run the jobs of a queue; None if there is none. If several have tasks
    there, the one that was used in this test, or made: apps of other tests may be left."""
    apps = [app for app in (App.known if only is None else [only]) if _serves(app, queue)]
    if len(apps) > 1:
        used = [app for app in apps if app.queues.names]
        apps = used or [app for app in apps if _is_used(app)] or apps
    if len(apps) > 1:
        names = [repr(app) for app in apps]
        raise AmbiguousQueueError(
            f"queue {queue!r} has tasks of {len(apps)} apps ({some(names)}): say which one is to "
            "run its jobs, as in jobs.drain(app=app)"
        )
    return apps[0] if apps else None


def _is_used(app: App[Any]) -> bool:
    return bool(app.queues.names) or app not in _older


def _serves(app: App[Any], queue: str) -> bool:
    if app.include and _is_used(app):
        app.load()
    return bool(app.tasks_of(queue))


def task_of(queue: str, name: str) -> Task[Any, Any] | None:
    """The task that takes a job of this name: one of its queue, or the only one of that name."""
    used_first = sorted(App.known, key=lambda app: not _is_used(app))
    for app in used_first:
        if (found := app.tasks_of(queue).get(name)) is not None:
            return found
    anywhere = {
        id(task): task
        for app in used_first
        for task in app.tasks
        if name in (task.name, *task.options.aliases)
    }
    return next(iter(anywhere.values())) if len(anywhere) == 1 else None


def used_queues() -> set[str]:
    """The queues that apps have opened in this test."""
    return {name for app in App.known for name in app.queues.names}


def run_apart(work: Coroutine[Any, Any, T], what: str) -> T:
    """Run a coroutine to its end where no event loop runs; `what` is its name in the error."""
    if asyncio._get_running_loop() is not None:
        work.close()
        raise RuntimeError(
            f"jobs.{what}_sync blocks, and an event loop runs here: use `await jobs.{what}`"
        )
    # Not asyncio.run: that would take the thread's current event loop away from other plugins.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end(group: WorkerGroup) -> None:
    """Stop a group that a test has left running, whatever runs its event loop."""
    loop = group.loop
    if loop is None or loop.is_closed() or not group.is_running:
        return
    if loop.is_running():
        loop.call_soon_threadsafe(group.stop_now)
        if loop is not asyncio._get_running_loop():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_ended(group), loop).result(END_S)
    else:
        group.stop_now()
        if asyncio._get_running_loop() is None:
            loop.run_until_complete(_ended(group))


async def _ended(group: WorkerGroup) -> None:
    """Wait until it has ended; how it went is for those who run it."""
    with suppress(asyncio.CancelledError, Exception):
        await asyncio.wait_for(group.run(), END_S)


def _close(queues: QueuesOfApp) -> None:
    for queue in queues.blocking.values():
        queue.close()
    for loop, opened in list(queues.by_loop.items()):
        if loop.is_closed():
            continue  # it has closed them at its end
        if not loop.is_running():
            if asyncio._get_running_loop() is None:
                loop.run_until_complete(opened.close())
        elif loop is not asyncio._get_running_loop():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(opened.close(), loop).result(END_S)
