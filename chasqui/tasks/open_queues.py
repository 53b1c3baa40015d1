"""The queues that an app has opened."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator

from chasqui import sync
from chasqui.queue import Queue


class QueuesOfApp:
    """All queues that an app has opened."""

    __slots__ = ("blocking", "by_loop", "names")

    def __init__(self) -> None:
        self.by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, OpenQueues] = (
            weakref.WeakKeyDictionary()
        )
        #: Those of programs without an event loop, by name.
        self.blocking: dict[str, sync.Queue] = {}
        #: Of all of them, also of those that are closed by now.
        self.names: set[str] = set()


class OpenQueues:
    """Queues of one event loop by name, closed by `close`, or by the event loop at its end: a
    program that ends by `asyncio.run` need not know that they are there."""

    def __init__(self, names: set[str]) -> None:
        """The names of queues that are opened are added to `names`."""
        self._queues: dict[str, Queue] = {}
        self._names = names
        self._closing = self._close_at_the_end()
        # Run to its `yield`, which takes no turn of the loop. From now on the loop knows it, and
        # closes it with all other asynchronous generators.
        with contextlib.suppress(StopIteration):
            self._closing.__anext__().send(None)

    def get(self, name: str, redis_url: str | None) -> Queue:
        """The queue of this name, opened if it is not."""
        queue = self._queues.get(name)
        if queue is None or queue.is_closed:
            queue = self._queues[name] = Queue(name, redis_url=redis_url)
            self._names.add(name)
        return queue

    async def close(self) -> None:
        await self._closing.aclose()

    async def _close_at_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await asyncio.gather(*(queue.close() for queue in self._queues.values()))
