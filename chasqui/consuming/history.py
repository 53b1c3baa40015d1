"""The history: a stream with an entry for each finished job, envelope included, so that payloads
can be archived. It is optional. The scripts that settle a job write it in the same step."""

import logging
from typing import Any

from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.managing.retention import Log, Trimmer
from chasqui.model.keys import Keys
from chasqui.transport.connection import Connection

logger = logging.getLogger(__name__)


class History:
    """Trims the history of one queue."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._queue = keys.queue
        self._trimmer = Trimmer(Log.history(keys))
        self.log = ThrottledLog(logger, keys.queue)

    def wrote(self, count: int) -> None:
        """Note that scripts wrote so many entries, and trim the stream if it is time."""
        trim = self._trimmer.wrote(count)
        if trim is not None and self._connection.is_connected:
            self._connection.post(trim, self)

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        """The stream was trimmed."""

    def set_exception(self, error: Exception, /) -> None:
        if not isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection logs it
            self.log.warning("queue %s: history could not be trimmed: %s", self._queue, error)
