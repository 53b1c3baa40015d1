"""A log that stays readable when records repeat: it writes the first few and counts the others."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from chasqui.consuming.runs import as_exc_info

#: How long records of a kind are counted together.
EVERY_S: Final = 10.0
#: The most kinds that are counted at once: beyond that the oldest count is logged and dropped.
MOST_KINDS: Final = 100


#: Returns the arguments of a text, and the fields of its record.
About: TypeAlias = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(slots=True)
class _Kind:
    """Records of one kind, since the first of them."""

    level: int
    text: str
    ends_s: float
    left: int
    left_out: int = 0
    #: About the last one that was left out.
    last: About | None = None
    timer: asyncio.TimerHandle | None = None


class ThrottledLog:
    """Logs at most `burst` records of a kind in EVERY_S, for one queue. At the end of that time it
    logs the last record that it left out, with how many there were.

    Records are of one kind if they have the same text, before its arguments, and the same `kind`.
    """

    def __init__(self, logger: logging.Logger, queue: str, *, burst: int = 1) -> None:
        self._logger = logger
        self.queue = queue
        self._burst = burst
        self._kinds: dict[tuple[str, object], _Kind] = {}

    def warning(self, text: str, *arguments: Any, **more: Any) -> None:
        """Log a warning. `more` may have a `kind`; an `error` of ours, or one that a handler
        `raised`, to log with its traceback; an `about`, which is called for arguments and fields
        only if they are needed. All else becomes fields of the record, which has the queue."""
        self._log(logging.WARNING, text, arguments, **more)

    def info(self, text: str, *arguments: Any, **more: Any) -> None:
        """The same for something that is no reason to worry."""
        self._log(logging.INFO, text, arguments, **more)

    def error(self, text: str, *arguments: Any, **more: Any) -> None:
        """The same for something that needs a person."""
        self._log(logging.ERROR, text, arguments, **more)

    def leaves_out(self, text: str, kind: object, about: About) -> bool:
        """Whether a record of this kind is left out now; if so, count it. A quick check before
        the call of a method above, for records that may come thousands of times a second."""
        seen = self._kinds.get((text, kind))
        if seen is None or seen.left or time.monotonic() >= seen.ends_s:
            return False
        seen.left_out += 1
        seen.last = about
        return True

    def close(self) -> None:
        """Log what was left out so far."""
        for key in list(self._kinds):
            self._end(key)

    def _log(
        self,
        level: int,
        text: str,
        arguments: tuple[Any, ...],
        kind: object = None,
        error: BaseException | None = None,
        raised: BaseException | None = None,
        about: About | None = None,
        **fields: Any,
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        key, now_s = (text, kind), time.monotonic()
        seen = self._kinds.get(key)
        if seen is not None and now_s >= seen.ends_s:
            self._end(key)
            seen = None
        if seen is None:
            if len(self._kinds) >= MOST_KINDS:
                self._end(next(iter(self._kinds)))
            seen = self._kinds[key] = _Kind(level, text, now_s + EVERY_S, self._burst)
        if seen.left:
            seen.left -= 1
            if not seen.left:
                seen.timer = self._call_later(EVERY_S, key)
            if about is not None:
                arguments, fields = about()
            exc_info = error if raised is None else as_exc_info(raised)
            extra = {"queue": self.queue, **fields}
            self._logger.log(level, text, *arguments, exc_info=exc_info, extra=extra)
            return
        seen.left_out += 1
        seen.last = about or (lambda: (arguments, fields))

    def _call_later(self, delay_s: float, key: tuple[str, object]) -> asyncio.TimerHandle | None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # in a thread without a loop: the next record or `close` logs it
            return None
        return loop.call_later(delay_s, self._end, key)

    def _end(self, key: tuple[str, object]) -> None:
        seen = self._kinds.pop(key, None)
        if seen is None:
            return
        if seen.timer is not None:
            seen.timer.cancel()
        if seen.last is not None:
            arguments, fields = seen.last()
            self._logger.log(
                seen.level,
                f"{seen.text} (the last of %d more like this)",
                *arguments,
                seen.left_out,
                extra={"queue": self.queue, **fields, "left_out": seen.left_out},
            )
