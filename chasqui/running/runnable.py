"""What a process runs: a `Worker`, a `WorkerGroup`, or whatever else has the same methods."""

import asyncio
from typing import Protocol

from chasqui.consuming.engine import Health


class Runnable(Protocol):
    """The part of a worker that its process, its supervisor and its health check use."""

    @property
    def name(self) -> str:
        """The queue of a worker, or the name of a group."""

    @property
    def label(self) -> str:
        """How log lines call it: `queue emails`."""

    @property
    def consumer_ids(self) -> tuple[str, ...]:
        """The names of its consumers, each in the group of its queue."""

    @property
    def shutdown_deadline_s(self) -> float:
        """How long the drain waits for handlers."""

    @property
    def is_closed(self) -> bool:
        """Whether it was told to end."""

    @property
    def is_running(self) -> bool:
        """Whether `run` was called and is not over."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it runs on; None before `run`."""

    async def run(self) -> None:
        """Run jobs until `close()`; returns when drained."""

    async def close(self) -> None:
        """Begin the drain."""

    def stop_now(self) -> None:
        """Cut the drain short."""

    def health(self) -> Health | None:
        """How it is doing; None before `run`."""
