"""The query lease: it keeps a second driver from consuming with one checkpoint."""

import logging
import time
import uuid
from typing import Final

from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.scripts import timing
from chasqui.spark.options import Options
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect

logger = logging.getLogger(__name__)

#: The longest wait between two tries to take the lease.
_TRY_EVERY_S: Final = 0.5


class ConsumerTakenError(ChasquiError):
    """Another query of the same name is running."""


class QueryLease:
    """The lease on a query's name in each of its queues, held by one driver."""

    def __init__(self, options: Options) -> None:
        assert options.consumer is not None
        self.name = options.consumer
        #: This driver, for scripts that must refuse an earlier one.
        self.driver = str(uuid.uuid4())
        self._lease_s = options.consumer_lease
        self._lost: str | None = None

    def driver_key(self, keys: Keys) -> bytes:
        """The key that says which driver took the name last. It outlives the lease."""
        return keys.spark(f"consume:{self.name}:driver")

    def take(self, connection: BlockingConnection, keys: Keys, deadline_s: float) -> None:
        """Take the lease in one queue; ConsumerTakenError if it is not free by the deadline."""
        while (free_in_ms := self._take(connection, keys)) >= 0:
            if time.monotonic() > deadline_s:
                raise ConsumerTakenError(
                    f"another query consumes queue {keys.queue!r} as {self.name!r}: stop it, or "
                    "give this one another consumer"
                )
            time.sleep(min(free_in_ms / 1000, _TRY_EVERY_S) + 0.01)
        # A successor's lease ends with the successor. This key stays, so it also stops a driver
        # that was suspended while a successor came and went.
        connection.execute("SET", self.driver_key(keys), self.driver, effect=Effect.IDEMPOTENT)

    def renew(self, connection: BlockingConnection, keys: Keys) -> bool:
        """Renew the lease in one queue; False if another driver has it."""
        if self._take(connection, keys) < 0:
            return True
        self.lose(keys.queue)
        return False

    def lose(self, queue: str) -> None:
        """Note that another driver has taken the name: `check` raises from now on."""
        self._lost = f"queue {queue!r} is consumed as {self.name!r} by another query now"

    def check(self) -> None:
        """Raise ConsumerTakenError if the lease is lost."""
        if self._lost is not None:
            raise ConsumerTakenError(self._lost)

    def release(self, connection: BlockingConnection, keys: Keys) -> None:
        """End the lease in one queue, if that can be done now; else it expires."""
        freed = keys.spark(f"consume:{self.name}:bell")
        try:
            connection.call(timing.release_lock(self._lock(keys), freed, self.driver))
        except ChasquiError as error:
            fields = {"consumer_name": self.name}
            logger.debug("the lease of %s will expire: %s", self.name, error, extra=fields)

    def _lock(self, keys: Keys) -> bytes:
        return keys.spark(f"consume:{self.name}")

    def _take(self, connection: BlockingConnection, keys: Keys) -> int:
        """-1 if the lease is ours, else the milliseconds until it may be free."""
        ttl_s = max(1, int(self._lease_s))
        reply: int = connection.call(timing.take_lock(self._lock(keys), self.driver, ttl_s))
        return reply
