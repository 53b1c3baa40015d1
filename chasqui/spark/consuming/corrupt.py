"""Jobs of a consuming query that cannot be read: they go to the dead-letter queue with their batch.

A batch may be computed several times, also by the next driver. So a task that cannot read a job
does not move it, but notes its id and the reason in a key of the queue. When the batch is done, the
driver buries the noted jobs, and only then acknowledges the rest. Both can be repeated: a job that
has left the stream is not moved again.
"""

import logging
from collections.abc import Mapping
from typing import Final

from chasqui.consuming.fate import DECODE_FAILED
from chasqui.consuming.moves import Move, bury
from chasqui.scripts.settling import SETTLED, Consumer
from chasqui.spark.connections import CHUNK
from chasqui.spark.consuming.failing import fetch
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect

logger = logging.getLogger(__name__)

#: What is kept of a reason.
_REASON_CHARS: Final = 1000


def note(connection: BlockingConnection, consumer: Consumer, reasons: Mapping[str, str]) -> None:
    """Note jobs of a batch that cannot be read: entry id to reason."""
    notes = [
        f"{one} {reason[:_REASON_CHARS]}".encode(errors="replace")
        for one, reason in reasons.items()
    ]
    for start in range(0, len(notes), CHUNK):
        scored = [word for one in notes[start : start + CHUNK] for word in (0, one)]
        connection.execute("ZADD", _notes(consumer), *scored, effect=Effect.IDEMPOTENT)


def forget(connection: BlockingConnection, consumer: Consumer) -> None:
    """Drop the notes on a batch that is computed again, maybe with another schema."""
    connection.execute("DEL", _notes(consumer), effect=Effect.IDEMPOTENT)


def bury_noted(connection: BlockingConnection, consumer: Consumer, *, events: bool) -> None:
    """Bury the noted jobs that the batch still holds. `events`: write one for each."""
    keys, name = consumer.keys, _notes(consumer)
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
            flags = connection.call(bury(consumer, moves, events=events))
            logger.error(
                "queue %s: %d jobs could not be read and went to the dead-letter queue; one: %s",
                keys.queue,
                flags.count(SETTLED),
                moves[0].detail,
                extra={"queue": keys.queue, "jobs": flags.count(SETTLED)},
            )
        connection.execute("ZREM", name, *notes, effect=Effect.IDEMPOTENT)


def _notes(consumer: Consumer) -> bytes:
    return consumer.keys.spark(f"corrupt:{consumer.name.removeprefix('spark:')}")
