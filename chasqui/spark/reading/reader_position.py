"""Holds entries of a log back for a streaming query that has a name, while its driver lives."""

import dataclasses
import logging
import threading
from typing import Final

from chasqui import retention
from chasqui.blocking import BlockingConnection
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.managing.retention import Log
from chasqui.spark.connections import open_connection
from chasqui.spark.options import Options
from chasqui.spark.reading.ranges import Place

logger = logging.getLogger(__name__)

#: How long the end of a query waits for a word that is on its way.
_LAST_WORD_S: Final = 5.0


class Hold:
    """Tells the server how far a query has read, and that it lives.

    What the server does not take is logged, and the query goes on: it fails if it loses something.
    A query that ends says nothing: its hold ends with its lease, and the next one may begin before.
    """

    def __init__(self, options: Options) -> None:
        assert options.reader is not None
        self._name = options.reader
        # It writes, so it asks the primary.
        self._options = dataclasses.replace(options, read_from="primary")
        self._connections: dict[str, BlockingConnection] = {}
        self._places: dict[str, Place] = {}
        self._complaint = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def read_up_to(self, queue: str, place: Place) -> None:
        """Nothing up to this place will be read again."""
        if self._places.get(queue) == place:
            return
        if queue not in self._connections:
            self._connections[queue] = open_connection(self._options, queue)
        self._places[queue] = place
        self._say(queue)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._say_for_ever, name="chasqui-hold", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_S)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _say_for_ever(self) -> None:
        while not self._stopping.wait(self._options.reader_lease / 3):
            for queue in tuple(self._places):
                self._say(queue)

    def _say(self, queue: str) -> None:
        place = self._places[queue]
        log = {"events": Log.events, "history": Log.history}[self._options.table]
        word = retention.reading(
            log(Keys(queue)),
            self._name,
            place.id,
            place.ordinal,
            lease_ms=int(self._options.reader_lease * 1000),
            hold=self._options.reader_hold,
        )
        try:
            self._connections[queue].run(word)
            self._complaint = ""
        except ChasquiError as error:
            if str(error) != self._complaint and not self._stopping.is_set():
                self._complaint = str(error)
                text = "queue %s: nothing is held back for the reader %s: %s"
                fields = {"queue": queue, "reader": self._name}
                logger.warning(text, queue, self._name, error, extra=fields)
