"""Which events an archive lacks: those that were trimmed before Spark had read them.

The offsets of a batch tell how many events it was due, and the archive has what was read of it.
"""

from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chasqui.spark.reading.ranges import BEGINNING, order

#: The table of losses, in Spark's words.
SCHEMA: Final = (
    "queue string, after_id string, before_id string, after_ts timestamp, before_ts timestamp, "
    "lost bigint, batch bigint"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a queue that are not in the archive: behind one id, and not behind another."""

    queue: str
    #: None if the archive began with this batch.
    after_id: str | None
    before_id: str
    after_ts: datetime | None
    before_ts: datetime
    #: None if the stream was deleted meanwhile: then nobody knows.
    lost: int | None
    batch: int

    def row(self) -> tuple[Any, ...]:
        return astuple(self)


def due(start: dict[str, Any], end: dict[str, Any]) -> dict[str, int | None]:
    """Per queue, how many events lie between two offsets, whether they are still there or not.

    None if the stream was deleted and made anew between them. A queue whose server does not count
    what it adds is left out.
    """
    counted: dict[str, int | None] = {}
    for queue, place in end.items():
        first = start.get(queue, {}).get("n", place.get("since"))
        if first is not None and "n" in place:
            counted[queue] = place["n"] - first if place["n"] >= first else None
    return counted


def losses_of(
    start: dict[str, Any], end: dict[str, Any], kept: dict[str, tuple[int, str]], batch: int
) -> list[Loss]:
    """What is missing from a batch, given how many rows of each queue were kept, and the first.

    The first row that was read bounds what was gone before the batch was planned. What went while
    it was read may have been anywhere in it.
    """
    found = []
    for queue, expected in due(start, end).items():
        rows, first = kept.get(queue, (0, None))
        lost = None if expected is None else expected - rows
        if lost == 0:
            continue
        known = start.get(queue, {})
        was_planned = lost == end[queue].get("lost", 0) - known.get("lost", 0)
        before = first if first is not None and was_planned else end[queue]["id"]
        after = known.get("id")
        found.append(Loss(queue, after, before, _time(after), _moment(before), lost, batch))
    return found


def _time(entry_id: str | None) -> datetime | None:
    return None if entry_id in (None, BEGINNING) else _moment(entry_id)


def _moment(entry_id: str) -> datetime:
    return datetime.fromtimestamp(order(entry_id)[0] / 1000, UTC)
