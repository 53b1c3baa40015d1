"""A range of a stream, page by page: the next one is asked for before this one is decoded."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from chasqui.blocking import BlockingConnection
from chasqui.keys import Keys
from chasqui.request import Effect, Request, commands
from chasqui.spark.link import connected
from chasqui.spark.options import Options
from chasqui.spark.ranges import DataLossError, Range
from chasqui.spark.wire import JobDecoder, decoder_of

#: Who holds which entries, asked for a page at a time.
_PENDING_PAGE: Final = 1000


@dataclass
class StreamPart(InputPartition):  # type: ignore[misc]
    """A range of one stream, for one task."""

    queue: str
    range: Range


def stream_of(keys: Keys, table: str) -> bytes:
    """The key of a stream table."""
    return {"jobs": keys.stream, "events": keys.events, "dlq": keys.dlq}[table]


def read_stream(part: StreamPart, options: Options, schema: StructType) -> Iterator[Any]:
    """The entries of a part as record batches.

    Raises DataLossError at its end if entries were trimmed since it was planned, where that is
    asked for and can be known: jobs leave their stream when they are done, and dead ones when they
    are replayed.
    """
    decoder = decoder_of(options, schema)
    is_exact = options.table == "events" and options.fail_on_data_loss
    count = 0
    with connected(options, part.queue) as connection:
        for page in _pages(connection, part, options, decoder.builder):
            count += len(page)
            if isinstance(decoder, JobDecoder):
                held = None
                if options.include_pending:
                    held = held_by(connection, part.queue, options.group, page)
                yield decoder.batch(part.queue, page, held)
            else:
                yield decoder.batch(part.queue, page)
    if is_exact and count < part.range.count:
        lost = part.range.count - count
        raise DataLossError(part.queue, options.table, lost, " by the task that was to")


def _pages(
    connection: BlockingConnection, part: StreamPart, options: Options, builder: Any
) -> Iterator[list[Any]]:
    key, last = stream_of(Keys(part.queue), options.table), part.range.last
    size = options.fetch_count
    pace = Pace(options.max_read_rows_per_second)

    def request(after: str) -> Request:
        return commands(
            ("XRANGE", key, f"({after}", last, "COUNT", size), effect=Effect.READ, builder=builder
        )

    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(connection.call, request(part.range.after))
        while page := coming.result():
            newest = page[-1].id if builder is not None else page[-1][0]
            is_last = len(page) < size or newest.decode() == last
            if not is_last:
                coming = ahead.submit(connection.call, request(newest.decode()))
            yield page
            if is_last:
                return
            pace.rest(len(page))


class Pace:
    """Keeps a task below so many rows a second; 0 is no limit."""

    def __init__(self, rows_per_s: int) -> None:
        self._rows_per_s = rows_per_s
        self._started_s = time.monotonic()
        self._rows = 0

    def rest(self, rows: int) -> None:
        """Sleep if these rows came too soon."""
        if not self._rows_per_s:
            return
        self._rows += rows
        due_s = self._started_s + self._rows / self._rows_per_s
        time.sleep(max(0.0, due_s - time.monotonic()))


def held_by(
    connection: BlockingConnection, queue: str, group: str, page: list[Any]
) -> dict[bytes, tuple[str, int, int]]:
    """Per pending entry of a page: consumer, deliveries, idle time."""
    found: dict[bytes, tuple[str, int, int]] = {}
    start, last = page[0].id, page[-1].id
    while True:
        request = commands(
            ("XPENDING", Keys(queue).stream, group, start, last, _PENDING_PAGE),
            effect=Effect.READ,
            raises=False,
        )
        rows = connection.call(request)
        if not isinstance(rows, list):  # no such group: nobody holds anything
            return found
        for entry_id, consumer, idle_ms, deliveries in rows:
            found[entry_id] = (consumer.decode(errors="replace"), deliveries, idle_ms)
        if len(rows) < _PENDING_PAGE:
            return found
        start = b"(" + rows[-1][0]
