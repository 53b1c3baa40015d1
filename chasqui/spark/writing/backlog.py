"""What a write does when a queue has `maxBacklog` jobs: it waits and logs that, or fails."""

import logging
import time
from typing import Final

from chasqui.errors import QueueFullError
from chasqui.producing.settings import full_waits_s
from chasqui.spark.options import Options

#: docs/spark.md documents this name.
logger = logging.getLogger("chasqui.spark.backlog")

#: How often to log that a write waits.
LOG_EVERY_S: Final = 10.0


def waiting_line(depth: int) -> str:
    """What a waiting write logs and shows."""
    return f"waiting for workers: {depth:,} wait"


class Backlog:
    """The limit of one queue, and the waits of a write at it."""

    def __init__(self, queue: str, most: int, *, waits: bool) -> None:
        self.most = most
        self._queue = queue
        self._waits = waits
        self._waits_s = full_waits_s()
        self._logged_s: float | None = None

    @classmethod
    def of(cls, options: Options, queue: str) -> "Backlog":
        """The limit that the options of a write set."""
        return cls(queue, options.max_backlog, waits=options.on_backlog == "wait")

    def moved(self) -> None:
        """Note that there was room: the next wait is short again."""
        self._waits_s = full_waits_s()

    def wait(self, depth: int) -> None:
        """Wait a moment for workers; QueueFullError if the write must not wait."""
        if not self._waits:
            raise QueueFullError(self._queue, depth, self.most)
        now_s = time.monotonic()
        if self._logged_s is None or now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            fields = {"queue": self._queue, "depth": depth, "max_backlog": self.most}
            logger.info("queue %s: %s", self._queue, waiting_line(depth), extra=fields)
        time.sleep(next(self._waits_s))
