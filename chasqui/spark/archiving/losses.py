"""Which events an archive lacks, because they were trimmed before Spark had read them.

The offsets of a batch say how many events it should have, and the archive has those it read.
"""

from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any, Final

from chasqui.spark.reading.ranges import BEGINNING, time_of

#: The schema of the table of losses.
SCHEMA: Final = (
    "queue string, after_id string, before_id string, after_ts timestamp, before_ts timestamp, "
    "lost bigint, batch bigint"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a queue that are not in the archive: behind `after_id`, up to `before_id`."""

    queue: str
    #: None if the archive began with this batch.
    after_id: str | None
    before_id: str
    after_ts: datetime | None
    before_ts: datetime
    #: None if the stream was deleted meanwhile: then the number is unknown.
    lost: int | None
    batch: int

    def row(self) -> tuple[Any, ...]:
        return astuple(self)


def due(start: dict[str, Any], end: dict[str, Any]) -> dict[str, int | None]:
    """Per queue, how many events were added between two offsets.

    None if the stream was deleted and created again between them. A queue is left out if its server
    does not count what it adds.
    """
    counted: dict[str, int | None] = {}
    for queue, offset in end.items():
        first = start.get(queue, {}).get("n", offset.get("since"))
        if first is not None and "n" in offset:
            counted[queue] = offset["n"] - first if offset["n"] >= first else None
    return counted


def losses_of(
    start: dict[str, Any], end: dict[str, Any], kept: dict[str, tuple[int, str]], batch: int
) -> list[Loss]:
    """What is missing from a batch, given the number of rows kept of each queue, and the first id.

    Events that were gone before the batch was planned lie before the first row. Events that were
    trimmed while it was read may have been anywhere in it.
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
        after_ts = None if after in (None, BEGINNING) else time_of(after)
        found.append(Loss(queue, after, before, after_ts, time_of(before), lost, batch))
    return found
