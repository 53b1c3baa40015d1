"""What goes on and on is told a few times a second at most, so that a log stays readable."""

import logging
import time
from typing import Any, Final

EVERY_S: Final = 1.0


class Complaints:
    """Logs what one source has to say about one queue, at most `burst` times a second, and counts
    what was held back."""

    def __init__(self, logger: logging.Logger, queue: str, *, burst: int = 1) -> None:
        self._logger = logger
        self._queue = queue
        self._burst = burst
        self._left = 0
        self._next_s = 0.0
        self._held_back = 0

    def warn(self, text: str, *arguments: Any, **fields: Any) -> None:
        """`fields` go with the record, beside the queue."""
        self._log(logging.WARNING, text, arguments, fields)

    def inform(self, text: str, *arguments: Any, **fields: Any) -> None:
        """The same for what is no reason to worry."""
        self._log(logging.INFO, text, arguments, fields)

    def _log(
        self, level: int, text: str, arguments: tuple[Any, ...], fields: dict[str, Any]
    ) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._left = self._burst
        if self._left == 0:
            self._held_back += 1
            return
        self._left -= 1
        if self._held_back:
            text += " (and %d times more since the last of these)"
            arguments += (self._held_back,)
            self._held_back = 0
        self._logger.log(level, text, *arguments, extra={"queue": self._queue, **fields})
