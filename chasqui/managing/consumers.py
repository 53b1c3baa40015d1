"""The consumers of a queue's group: how they join, and how those that died are deleted.

A queue has one group: acknowledging deletes, so a second group would lose jobs to the first. A
worker that ends leaves the group. One that was killed cannot, so the leader deletes consumers that
were silent for long. Neither way deletes a consumer that holds entries: Redis would drop them too.
"""

import asyncio
import logging
from time import monotonic
from typing import Any, Final

from chasqui.errors import NotSupportedError
from chasqui.model.keys import Keys
from chasqui.scripts import settling
from chasqui.scripts.settling import Consumer
from chasqui.transport.connection import Connection
from chasqui.transport.request import Plan

logger = logging.getLogger(__name__)

#: An entry that is idle for at least so long was given back: lua/release.lua makes it so.
HANDED_BACK_MS: Final = 864_000_000
#: How long a consumer that holds nothing may be silent before it is deleted.
SILENCE_MS: Final = 3_600_000
#: How often to look for such consumers, and the most that one sweep deletes.
SWEEP_S: Final = 600.0
SWEPT: Final = 1000


def join(consumer: Consumer) -> Plan[bool]:
    """Make the group if the queue has none, and the consumer if it has a name; True if the group
    was made. Raises NotSupportedError if the queue has another group."""
    keys = consumer.keys
    reply = yield settling.join(consumer)
    if isinstance(reply, bytes):
        other = reply.decode(errors="replace")
        raise NotSupportedError(
            f"queue {keys.queue!r} has the group {other!r}, and all who take its jobs share one "
            f"group: what one group has done is gone for another. Use group={other!r} if workers "
            f"made it: one made by hand may have passed over jobs. If nobody takes jobs by it, run "
            f"XGROUP DESTROY {keys.stream.decode()} {other}"
        )
    return bool(reply)


class Sweeper:
    """Deletes consumers that died, every SWEEP_S; the leader calls it in each turn of its loop."""

    def __init__(self, keys: Keys, connection: Connection) -> None:
        self._keys = keys
        self._connection = connection
        self._due_at_s = 0.0

    def turn(self) -> None:
        """Begin a sweep if one is due. The leader does not wait for it: due jobs come first."""
        if monotonic() >= self._due_at_s:
            self._due_at_s = monotonic() + SWEEP_S
            sweep = settling.sweep(self._keys, SILENCE_MS, SWEPT)
            self._connection.submit(sweep).add_done_callback(self._swept)

    def _swept(self, sweep: asyncio.Future[Any]) -> None:
        if sweep.cancelled():
            return
        queue = self._keys.queue
        if (error := sweep.exception()) is not None:
            fields = {"queue": queue}
            logger.info(
                "queue %s: consumers that are gone could not be deleted: %s",
                queue,
                error,
                extra=fields,
            )
        elif count := sweep.result():
            fields = {"queue": queue, "consumers": count}
            logger.info("queue %s: deleted %d consumers that were gone", queue, count, extra=fields)
            if count == SWEPT:
                self._due_at_s = 0.0
