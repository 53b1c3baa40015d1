"""Keeps entries of a log from being trimmed before a named streaming query has read them."""

import dataclasses
import logging
import threading
from typing import Final

from chasqui.errors import ChasquiError
from chasqui.managing import retention
from chasqui.managing.retention import Log
from chasqui.model.keys import Keys
from chasqui.spark.connections import open_connection
from chasqui.spark.options import Options
from chasqui.spark.reading.ranges import Position
from chasqui.transport.blocking import BlockingConnection

logger = logging.getLogger(__name__)

#: How long a query that ends waits for a report that is in flight.
_LAST_REPORT_S: Final = 5.0


class ReaderPosition:
    """Reports to the server how far a query has read, and that it is alive.

    A report that fails is logged, and the query goes on: it fails once it loses entries. A query
    that ends sends no last report: its lease expires, and the next run may begin before that.
    """

    def __init__(self, options: Options) -> None:
        assert options.reader is not None
        self._name = options.reader
        # Reports are writes, so they go to the primary.
        self._options = dataclasses.replace(options, read_from="primary")
        self._connections: dict[str, BlockingConnection] = {}
        self._positions: dict[str, Position] = {}
        self._last_error = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def read_up_to(self, queue: str, position: Position) -> None:
        """Report that nothing up to this position will be read again."""
        if self._positions.get(queue) == position:
            return
        if queue not in self._connections:
            self._connections[queue] = open_connection(self._options, queue)
        self._positions[queue] = position
        self._report(queue)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._report_for_ever, name="chasqui-reader", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_LAST_REPORT_S)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _report_for_ever(self) -> None:
        while not self._stopping.wait(self._options.reader_lease / 3):
            for queue in tuple(self._positions):
                self._report(queue)

    def _report(self, queue: str) -> None:
        position = self._positions[queue]
        log = {"events": Log.events, "history": Log.history}[self._options.table]
        report = retention.reading(
            log(Keys(queue)),
            self._name,
            position.id,
            position.ordinal,
            lease_ms=int(self._options.reader_lease * 1000),
            hold=self._options.reader_hold,
        )
        try:
            self._connections[queue].run(report)
            self._last_error = ""
        except ChasquiError as error:
            if str(error) != self._last_error and not self._stopping.is_set():
                self._last_error = str(error)
                text = "queue %s: nothing is held back for the reader %s: %s"
                fields = {"queue": queue, "reader": self._name}
                logger.warning(text, queue, self._name, error, extra=fields)
