"""The history: an entry for each finished job, with its envelope, for whoever archives what jobs
carried. Written only if the worker is asked to, by the scripts that end a job, in the same step."""

import logging
from typing import Any

from chasqui.transport.connection import Connection
from chasqui.consuming.throttled_log import Complaints
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.model.keys import Keys
from chasqui.managing.retention import Log, Trimmer

logger = logging.getLogger(__name__)


class History:
    """Where finished jobs are kept; sees to it that the oldest go."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._queue = keys.queue
        self._trimmer = Trimmer(Log.history(keys))
        self.complaints = Complaints(logger, keys.queue)

    def wrote(self, count: int) -> None:
        """So many entries were written by scripts: trim the stream if it is time."""
        trim = self._trimmer.wrote(count)
        if trim is not None and self._connection.is_connected:
            self._connection.post(trim, self)

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        """The stream was trimmed."""

    def set_exception(self, error: Exception, /) -> None:
        if not isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection tells
            self.complaints.warn("queue %s: history could not be trimmed: %s", self._queue, error)
