"""What a run of an archive has done so far: counted by its batches, told while it goes on."""

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from chasqui.words import count

if TYPE_CHECKING:
    from chasqui.spark.losses import Loss

#: How often to say how far it is, where a line cannot be rewritten.
_SAY_EVERY_S: Final = 10.0


class Archived:
    """What a run has written and lost so far; its batches are told to `add`. `beside` is the
    same of another table that is archived along with it."""

    def __init__(self, what: str = "event", beside: "Archived | None" = None) -> None:
        self._what = what
        self._beside = beside
        self.rows = 0
        #: Events that were trimmed unread; None once an unknown number of them was.
        self.lost: int | None = 0
        #: Whether some were, for sure.
        self.has_lost = False

    def add(self, rows: int, losses: "list[Loss] | None") -> None:
        self.rows += rows
        self.has_lost |= bool(losses)
        for lost in [None] if losses is None else [loss.lost for loss in losses]:
            self.lost = None if lost is None or self.lost is None else self.lost + lost

    @property
    def lacks_some(self) -> bool:
        """Whether some were lost, of either table."""
        return self.has_lost or (self._beside is not None and self._beside.lacks_some)

    def facts(self) -> dict[str, Any]:
        lost = "lost" if self._what == "event" else f"{self._what}s_lost"
        beside = {} if self._beside is None else self._beside.facts()
        return {f"{self._what}s": self.rows, lost: self.lost} | beside

    def __str__(self) -> str:
        beside = "" if self._beside is None else f"; {self._beside}"
        if self.lost is None:
            why = "a stream was deleted" if self.has_lost else "the server does not count them"
            lost = f"an unknown number: {why}"
        else:
            lost = f"{self.lost:,}"
        return f"archived {count(self.rows, self._what)}; lost {lost}{beside}"


class Queries:
    """Queries that go on together, as one: if one fails, the others are ended."""

    def __init__(self, first: Any, *others: Any) -> None:
        self._all = first, *others

    @property
    def lastProgress(self) -> Any:
        return self._all[0].lastProgress

    def awaitTermination(self, timeout_s: float) -> bool:
        try:
            # Each is asked, whatever the others say: it raises if its query has failed.
            ended = [one.awaitTermination(timeout_s / len(self._all)) for one in self._all]
            return all(ended)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        for one in self._all:
            one.stop()


def watch(query: Any, archived: Archived, *, as_lines: bool = False) -> bool:
    """Wait for the end of a query, telling how far it is; whether an interrupt ended it.

    `as_lines` is for programs: JSON on stdout. People have one line that is rewritten, or one every
    ten seconds where that cannot be.
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
                print(json.dumps({**archived.facts(), **far}), flush=True)
            elif is_screen:
                print(f"\r\033[K{archived}{_words(far)}", end="", file=sys.stderr, flush=True)
            else:
                print(f"{archived}{_words(far)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        query.stop()
        return True
    finally:
        if is_screen:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return False


def how_far(progress: Any) -> dict[str, Any]:
    """Events a second in the last batch, how many it left when it was planned, and how much time.

    What is not known is None: all before the first batch, and the number where the server does not
    count what it adds.
    """
    far: dict[str, Any] = {"events_per_s": None, "behind": None, "lag_s": None}
    if progress is None:
        return far
    rate = progress.inputRowsPerSecond
    if not math.isfinite(rate):  # of the first batch
        rate = progress.processedRowsPerSecond
    far["events_per_s"] = round(rate, 1) if math.isfinite(rate) else None
    source = progress.sources[0]
    end, newest = (
        json.loads(one or "null") or {} for one in (source.endOffset, source.latestOffset)
    )
    places = [(place, newest[queue]) for queue, place in end.items() if queue in newest]
    if places:
        lags_ms = [_unix_ms(new) - _unix_ms(old) for old, new in places]
        far["lag_s"] = max(0, *lags_ms) / 1000
        if all("n" in place for pair in places for place in pair):
            far["behind"] = sum(max(0, new["n"] - old["n"]) for old, new in places)
    return far


def _unix_ms(place: dict[str, Any]) -> int:
    return int(place["id"].partition("-")[0])


def _words(far: dict[str, Any]) -> str:
    told = []
    if far["events_per_s"] is not None:
        told.append(f"{far['events_per_s']:,.0f} a second")
    if far["behind"] is not None:
        told.append(f"{far['behind']:,} behind")
    if far["lag_s"] is not None:
        told.append(f"lag {far['lag_s']:,.1f} s")
    return f" ({', '.join(told)})" if told else ""
