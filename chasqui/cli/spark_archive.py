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
    """What a run has written and lost so far; its batches are told to `add`."""

    def __init__(self) -> None:
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

    def facts(self) -> dict[str, Any]:
        return {"events": self.rows, "lost": self.lost}

    def __str__(self) -> str:
        if self.lost is None:
            why = "a stream was deleted" if self.has_lost else "the server does not count them"
            return f"archived {count(self.rows, 'event')}; lost an unknown number: {why}"
        return f"archived {count(self.rows, 'event')}; lost {self.lost:,}"


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
