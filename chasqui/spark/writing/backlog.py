"""What a write does at a queue that holds `maxBacklog` jobs: it waits and says so, or fails."""

import logging
import time
from typing import Final

from chasqui.adding import full_waits_s
from chasqui.errors import QueueFullError
from chasqui.spark.options import Options

logger = logging.getLogger(__name__)

#: How often to log that a write waits.
SAY_EVERY_S: Final = 10.0


def waiting_line(depth: int) -> str:
    """How a write that waits says so."""
    return f"waiting for workers: {depth:,} wait"


class Backlog:
    """The limit of one queue, and how long a write has waited at it."""

    def __init__(self, queue: str, most: int, *, waits: bool) -> None:
        self.most = most
        self._queue = queue
        self._waits = waits
        self._waits_s = full_waits_s()
        self._said_s: float | None = None

    @classmethod
    def of(cls, options: Options, queue: str) -> "Backlog":
        """The limit that the options of a write set."""
        return cls(queue, options.max_backlog, waits=options.on_backlog == "wait")

    def moved(self) -> None:
        """There was room: the next wait is a short one again."""
        self._waits_s = full_waits_s()

    def wait(self, depth: int) -> None:
        """Wait a moment for workers; QueueFullError if the write is not to wait."""
        if not self._waits:
            raise QueueFullError(self._queue, depth, self.most)
        now_s = time.monotonic()
        if self._said_s is None or now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            fields = {"queue": self._queue, "depth": depth, "max_backlog": self.most}
            logger.info("queue %s: %s", self._queue, waiting_line(depth), extra=fields)
        time.sleep(next(self._waits_s))
