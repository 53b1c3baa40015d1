"""Jobs of a consuming query that cannot be read: they go to the dead-letter queue with their batch.

A batch may be computed several times, and once more by the next driver. So a task that cannot read
a job does not move it, but notes its id and the reason beside the queue. When the batch is done,
the driver buries what was noted, and only then acknowledges the rest. Both can be done again: what
has left the stream is not moved a second time.
"""

import logging
from collections.abc import Mapping
from typing import Final

from chasqui.blocking import BlockingConnection
from chasqui.consuming.fate import DECODE_FAILED
from chasqui.consumer.moves import MOVED, Move, bury
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect
from chasqui.spark.consuming.failing import fetch
from chasqui.spark.api import CHUNK

logger = logging.getLogger(__name__)

#: What is kept of a reason.
_REASON_CHARS: Final = 1000


def note(
    connection: BlockingConnection, keys: Keys, consumer: str, reasons: Mapping[str, str]
) -> None:
    """Note jobs of a batch that cannot be read: entry id to reason."""
    notes = [
        f"{one} {reason[:_REASON_CHARS]}".encode(errors="replace")
        for one, reason in reasons.items()
    ]
    for start in range(0, len(notes), CHUNK):
        scored = [word for one in notes[start : start + CHUNK] for word in (0, one)]
        connection.execute("ZADD", _notes(keys, consumer), *scored, effect=Effect.IDEMPOTENT)


def forget(connection: BlockingConnection, keys: Keys, consumer: str) -> None:
    """Drop the notes on a batch that is computed anew, maybe by another schema."""
    connection.execute("DEL", _notes(keys, consumer), effect=Effect.IDEMPOTENT)


def bury_noted(
    connection: BlockingConnection, keys: Keys, group: str, consumer: str, *, tells: bool
) -> None:
    """Move the jobs that were noted, and that the batch still holds, to the dead-letter queue.
    `tells` writes an event for each."""
    name = _notes(keys, consumer)
    while notes := connection.execute("ZRANGE", name, 0, CHUNK - 1, effect=Effect.READ):
        reasons = dict(one.decode(errors="replace").split(" ", 1) for one in notes)
        moves = [
            Move(
                entry,
                entry.attempt,
                reason=entry.fault or DECODE_FAILED,
                detail=reasons[entry.id.decode()],
            )
            for entry in fetch(connection, keys, list(reasons))
        ]
        if moves:
            flags = connection.call(bury(keys, group, consumer, moves, tells=tells))
            logger.error(
                "queue %s: %d jobs could not be read and went to the dead-letter queue; one: %s",
                keys.queue,
                flags.count(MOVED),
                moves[0].detail,
                extra={"queue": keys.queue, "jobs": flags.count(MOVED)},
            )
        connection.execute("ZREM", name, *notes, effect=Effect.IDEMPOTENT)


def _notes(keys: Keys, consumer: str) -> bytes:
    return keys.spark(f"corrupt:{consumer.removeprefix('spark:')}")
