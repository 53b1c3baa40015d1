"""Counts what a run of an archive has done, and shows it while the run goes on."""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from chasqui.spark.archiving.losses import Loss

logger = logging.getLogger(__name__)

#: How often to print progress if the line cannot be rewritten.
_SAY_EVERY_S: Final = 10.0
#: The time over which the rate is taken. Spark's own is that of one batch: 0 for the first batch,
#: and 0 when a trigger finds nothing.
_RATE_OVER_S: Final = 60.0


class Archived:
    """What a run has written and lost so far; call `add` after each batch. `beside` counts another
    table that is archived along with it."""

    def __init__(
        self,
        what: str = "event",
        beside: "Archived | None" = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._beside = beside
        self._clock = clock
        self._started_s = clock()
        #: When batches of the last minute were written, and their rows.
        self._lately: deque[tuple[float, int]] = deque()
        self.rows = 0
        #: Events that were trimmed unread; None if the number is unknown.
        self.lost: int | None = 0
        #: Whether some certainly were.
        self.has_lost = False

    def add(self, rows: int, losses: "list[Loss] | None") -> None:
        now_s = self._clock()
        self._lately.append((now_s, rows))
        while self._lately[0][0] <= now_s - _RATE_OVER_S:
            self._lately.popleft()
        self.rows += rows
        self.has_lost |= bool(losses)
        for lost in [None] if losses is None else [loss.lost for loss in losses]:
            self.lost = None if lost is None or self.lost is None else self.lost + lost

    @property
    def per_s(self) -> float | None:
        """Rows a second in the last minute, or since the start; None before the first batch."""
        if not self._lately:
            return None
        now_s = self._clock()
        since_s = max(self._started_s, now_s - _RATE_OVER_S)
        rows = sum(rows for at_s, rows in tuple(self._lately) if at_s >= since_s)
        return round(rows / max(now_s - since_s, 1), 1)

    @property
    def total_per_s(self) -> float | None:
        """The rate of both tables."""
        rates = [self.per_s, None if self._beside is None else self._beside.total_per_s]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def lacks_some(self) -> bool:
        """Whether entries of either table were lost."""
        return self.has_lost or (self._beside is not None and self._beside.lacks_some)

    def facts(self) -> dict[str, Any]:
        lost = "lost" if self._what == "event" else f"{self._what}s_lost"
        beside = {} if self._beside is None else self._beside.facts()
        return {f"{self._what}s": self.rows, lost: self.lost} | beside

    def __str__(self) -> str:
        beside = "" if self._beside is None else f"; {self._beside}"
        if self.lost is None:
            why = "a stream was deleted" if self.has_lost else "the server does not count them"
            lost = f"an unknown number lost: {why}"
        else:
            lost = f"{self.lost:,} lost"
        what = "events" if self._what == "event" else "finished jobs"
        return f"{what}: {self.rows:,} archived, {lost}{beside}"


class Queries:
    """Queries that run together as one: if one fails, the others are stopped."""

    def __init__(self, first: Any, *others: Any) -> None:
        self._all = first, *others

    @property
    def lastProgress(self) -> Any:
        """The sources of all queries; None before the first progress."""
        progress = [one.lastProgress for one in self._all]
        sources = [source for one in progress if one is not None for source in one.sources]
        return SimpleNamespace(sources=sources) if sources else None

    def awaitTermination(self, timeout_s: float) -> bool:
        try:
            # Ask each of them: it raises if its query has failed.
            ended = [one.awaitTermination(timeout_s / len(self._all)) for one in self._all]
            return all(ended)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        for one in self._all:
            one.stop()


def watch(query: Any, archived: Archived, *, as_lines: bool = False) -> bool:
    """Wait for the end of a query and show its progress; whether an interrupt ended it.

    `as_lines` is for programs: JSON on stdout. Else it is one line on stderr that is rewritten, or
    a line every ten seconds if stderr is no terminal.
    """
    is_screen = sys.stderr.isatty() and not as_lines
    said_s = time.monotonic()
    try:
        while not query.awaitTermination(1):
            if not is_screen and time.monotonic() - said_s < _SAY_EVERY_S:
                continue
            said_s = time.monotonic()
            far = how_far(query.lastProgress)
            if as_lines:
                rate = {"events_per_s": archived.per_s}
                print(json.dumps({**archived.facts(), **rate, **far}), flush=True)
                continue
            line = f"{archived}{_words(archived, far)}"
            if query.lastProgress is None and archived.total_per_s is None:
                line = "starting …"
            if is_screen:
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        try:
            query.stop()
        except Exception as error:  # a signal to the process group has ended Spark too
            fields = {"step": "stopping the query"}
            logger.debug("the query could not be stopped: %s", error, extra=fields)
        return True
    finally:
        if is_screen:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return False


def how_far(progress: Any) -> dict[str, Any]:
    """How many entries the last batch left when it was planned, and how far behind it was in time.

    Both are None before the first batch; the number is None if the server does not count what it
    adds.
    """
    far: dict[str, Any] = {"behind": None, "lag_s": None}
    offsets = []
    for source in () if progress is None else progress.sources:
        end, newest = (
            json.loads(one or "null") or {} for one in (source.endOffset, source.latestOffset)
        )
        offsets += [(old, newest[queue]) for queue, old in end.items() if queue in newest]
    if offsets:
        lags_ms = [_unix_ms(new) - _unix_ms(old) for old, new in offsets]
        far["lag_s"] = max(0, *lags_ms) / 1000
        if all("n" in offset for pair in offsets for offset in pair):
            far["behind"] = sum(max(0, new["n"] - old["n"]) for old, new in offsets)
    return far


def _unix_ms(offset: dict[str, Any]) -> int:
    return int(offset["id"].partition("-")[0])


def _words(archived: Archived, far: dict[str, Any]) -> str:
    parts = []
    if (rate := archived.total_per_s) is not None:
        parts.append(f"{rate:,.0f} a second")
    if far["behind"] is not None:
        parts.append(f"{far['behind']:,} behind")
    if far["lag_s"] is not None:
        parts.append(f"lag {far['lag_s']:,.1f} s")
    return f" ({', '.join(parts)})" if parts else ""
