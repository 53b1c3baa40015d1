"""Warnings about what goes on and on: at most one a second, so that a log stays readable."""

import logging
import time
from typing import Any, Final

EVERY_S: Final = 1.0


class Complaints:
    """Logs warnings of one source about one queue, and counts those that were held back."""

    def __init__(self, logger: logging.Logger, queue: str) -> None:
        self._logger = logger
        self._queue = queue
        self._next_s = 0.0
        self._held_back = 0

    def warn(self, text: str, *arguments: Any, **fields: Any) -> None:
        """`fields` go with the record, beside the queue."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._held_back += 1
            return
        self._next_s = now_s + EVERY_S
        if self._held_back:
            text += " (and %d times more since the last of these)"
            arguments += (self._held_back,)
            self._held_back = 0
        self._logger.warning(text, *arguments, extra={"queue": self._queue, **fields})
