"""The consumers of a queue's group: who joins, who leaves, and who is gone.

A queue has one group: acknowledging deletes, so a second one would lose jobs to the first. A worker
that ends leaves its group. One that was killed cannot, so the leader deletes consumers that were
silent for long. Neither ever deletes one that holds entries: Redis would drop them with it.
"""

import asyncio
import logging
from time import monotonic
from typing import Any, Final

from chasqui import scripts
from chasqui.transport.connection import Connection
from chasqui.errors import NotSupportedError
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Plan, Request

logger = logging.getLogger(__name__)

#: An entry that is idle for at least so long was handed back: lua/release.lua makes it so.
HANDED_BACK_MS: Final = 864_000_000
#: How long a consumer that holds nothing may be silent before it is deleted.
SILENCE_MS: Final = 3_600_000
#: How often to look for such consumers, and the most that one look deletes.
SWEEP_S: Final = 600.0
SWEPT: Final = 1000


def join(keys: Keys, group: str, consumer: str = "") -> Plan[bool]:
    """Make the group if the queue has none, and the consumer if one is named; True if the group was
    made. Raises NotSupportedError if the queue has another group."""
    arguments = [group, consumer]
    answer = yield scripts.call(scripts.JOIN, [keys.stream], arguments, Effect.IDEMPOTENT)
    if isinstance(answer, bytes):
        other = answer.decode(errors="replace")
        raise NotSupportedError(
            f"queue {keys.queue!r} has the group {other!r}, and all who take its jobs share one "
            f"group: what one group has done is gone for another. Use group={other!r} if workers "
            f"made it: one made by hand may have passed over jobs. If nobody takes jobs by it, run "
            f"XGROUP DESTROY {keys.stream.decode()} {other}"
        )
    return bool(answer)


def leave(keys: Keys, group: str, consumer: str) -> Request:
    """Delete a consumer, unless it holds entries; 1 if it is gone."""
    return scripts.call(scripts.LEAVE, [keys.stream], [group, consumer], Effect.IDEMPOTENT)


def sweep(keys: Keys) -> Request:
    """Delete consumers that hold nothing and were silent for long; how many."""
    arguments = [SILENCE_MS, SWEPT]
    return scripts.call(scripts.SWEEP, [keys.stream, keys.paused], arguments, Effect.IDEMPOTENT)


class Sweeper:
    """Deletes consumers that are gone, once in a while; the leader calls it in each turn."""

    def __init__(self, keys: Keys, connection: Connection) -> None:
        self._keys = keys
        self._connection = connection
        self._due_at_s = 0.0

    def turn(self) -> None:
        """Begin a look if one is due. Nobody waits for it: due jobs come first."""
        if monotonic() >= self._due_at_s:
            self._due_at_s = monotonic() + SWEEP_S
            self._connection.submit(sweep(self._keys)).add_done_callback(self._swept)

    def _swept(self, look: asyncio.Future[Any]) -> None:
        if look.cancelled():
            return
        queue = self._keys.queue
        if (error := look.exception()) is not None:
            fields = {"queue": queue}
            logger.info(
                "queue %s: consumers that are gone could not be deleted: %s",
                queue,
                error,
                extra=fields,
            )
        elif count := look.result():
            fields = {"queue": queue, "consumers": count}
            logger.info("queue %s: deleted %d consumers that were gone", queue, count, extra=fields)
            if count == SWEPT:
                self._due_at_s = 0.0
