"""What happens again and again is told a few times and then by its number, so that a log stays
readable."""

import asyncio
import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from chasqui.consumer.runs import as_exc_info

#: How long records of a kind are counted together.
EVERY_S: Final = 10.0
#: More kinds than this are not kept apart: the oldest is told and forgotten.
MOST_KINDS: Final = 100


@dataclass(slots=True)
class _Kind:
    """Records of one kind, since the first of them."""

    ends_s: float
    left: int
    left_out: int = 0
    #: Level, text, arguments and fields of the last one that was left out.
    last: tuple[int, str, tuple[Any, ...], dict[str, Any]] | None = None
    timer: asyncio.TimerHandle | None = None


class Complaints:
    """Logs what one source has to say about one queue: at most `burst` records of a kind in
    EVERY_S. The last of those that were left out is logged at the end of that time, with their
    number.

    Of a kind are records with one text before its arguments, and one `kind`.
    """

    def __init__(self, logger: logging.Logger, queue: str, *, burst: int = 1) -> None:
        self._logger = logger
        self._queue = queue
        self._burst = burst
        self._kinds: dict[Hashable, _Kind] = {}

    def warn(self, text: str, *arguments: Any, **more: Any) -> None:
        """`more`: a `kind`; an `error` of ours, or one that a handler `raised`, whose traceback is
        logged as well; and fields of the record, which has the queue already."""
        self._log(logging.WARNING, text, arguments, **more)

    def inform(self, text: str, *arguments: Any, **more: Any) -> None:
        """The same for what is no reason to worry."""
        self._log(logging.INFO, text, arguments, **more)

    def fail(self, text: str, *arguments: Any, **more: Any) -> None:
        """The same for what somebody has to look after."""
        self._log(logging.ERROR, text, arguments, **more)

    def close(self) -> None:
        """Log what was left out and not told yet."""
        for key in list(self._kinds):
            self._end(key)

    def _log(
        self,
        level: int,
        text: str,
        arguments: tuple[Any, ...],
        kind: Hashable = None,
        error: BaseException | None = None,
        raised: BaseException | None = None,
        **fields: Any,
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        fields = {"queue": self._queue, **fields}
        key, now_s = (text, kind), time.monotonic()
        seen = self._kinds.get(key)
        if seen is not None and now_s >= seen.ends_s:
            self._end(key)
            seen = None
        if seen is None:
            if len(self._kinds) >= MOST_KINDS:
                self._end(next(iter(self._kinds)))
            seen = self._kinds[key] = _Kind(now_s + EVERY_S, self._burst)
        if seen.left:
            seen.left -= 1
            exc_info = error if raised is None else as_exc_info(raised)
            self._logger.log(level, text, *arguments, exc_info=exc_info, extra=fields)
            return
        seen.left_out += 1
        seen.last = level, text, arguments, fields
        if seen.timer is None:
            seen.timer = self._call_later(seen.ends_s - now_s, key)

    def _call_later(self, delay_s: float, key: Hashable) -> asyncio.TimerHandle | None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # in a thread: the next one tells, or the end
            return None
        return loop.call_later(delay_s, self._end, key)

    def _end(self, key: Hashable) -> None:
        seen = self._kinds.pop(key, None)
        if seen is None:
            return
        if seen.timer is not None:
            seen.timer.cancel()
        if seen.last is not None:
            level, text, arguments, fields = seen.last
            self._logger.log(
                level,
                f"{text} (the last of %d more like this)",
                *arguments,
                seen.left_out,
                extra={**fields, "left_out": seen.left_out},
            )
