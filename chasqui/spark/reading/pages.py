"""A range of a stream as record batches: the next is gathered while Spark takes this one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from chasqui._core.columns import ColumnBuilder, Columns
from chasqui.model.keys import Keys
from chasqui.spark.connections import connected
from chasqui.spark.options import LOGS, Options
from chasqui.spark.reading.decoding import EventDecoder, JobDecoder
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.spark.reading.ranges import DataLossError, Range, order
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, commands

#: Pending entries that one command lists.
_PENDING_PAGE: Final = 250
#: A batch for Spark is full with so many rows, or bytes.
BATCH_ROWS: Final = 8000
BATCH_BYTES: Final = 8 << 20


@dataclass
class StreamPart(InputPartition):  # type: ignore[misc]
    """A range of one stream, for one task."""

    queue: str
    range: Range


def stream_of(keys: Keys, table: str) -> bytes:
    """The key of a stream table."""
    streams = {"jobs": keys.stream, "dlq": keys.dlq, "events": keys.events, "history": keys.history}
    return streams[table]


def read_stream(part: StreamPart, options: Options, schema: StructType) -> Iterator[Any]:
    """The entries of a part as record batches.

    Raises DataLossError at the end if entries were trimmed since it was planned. That is known of
    events and history only: jobs leave their stream when they are done, dead jobs when they are
    replayed.
    """
    decoder = EventDecoder(schema) if options.table == "events" else JobDecoder(options, schema)
    is_exact = options.table in LOGS and options.fail_on_data_loss
    key, until = stream_of(Keys(part.queue), options.table), part.range.last

    def page(after: str, size: int) -> tuple[Any, ...]:
        return "XRANGE", key, f"({after}", until, "COUNT", size

    count = 0
    with connected(options, part.queue) as connection:
        for columns, first, last in gathered(
            connection, decoder.builder(), ReadPacing(options), part.range.after, page, until
        ):
            count += columns.rows
            if isinstance(decoder, JobDecoder):
                held = None
                if options.include_pending:
                    held = held_by(connection, part.queue, options.group, first, last)
                yield decoder.batch(part.queue, columns, held)
            else:
                yield decoder.batch(part.queue, columns)
    if is_exact and count < part.range.count:
        lost = part.range.count - count
        raise DataLossError(part.queue, options.table, lost, " by the task that was to")


def gathered(
    connection: BlockingConnection,
    builder: ColumnBuilder,
    pacing: ReadPacing,
    after: str,
    page: Callable[[str, int], tuple[Any, ...]],
    last: str,
) -> Iterator[tuple[Columns, str, str]]:
    """Columns of many small pages, with the id before the first entry and that of the last.

    `page` is the command that reads so many entries behind an id. Pages are small, because the
    server serves no other client while it reads one. Batches are large, because each costs
    something to make and to pass to Spark.
    """
    is_over = False

    def gather() -> tuple[Columns, str, str]:
        nonlocal after, is_over
        first = after
        while not is_over and builder.rows < BATCH_ROWS and builder.size < BATCH_BYTES:
            size, known = pacing.ask(), builder.size
            request = commands(page(after, size), effect=Effect.READ, builder=builder)
            count, newest = connection.call(request) or (0, None)
            if newest is not None:
                after = newest.decode()
            is_over = count < size or order(after) >= order(last)
            if not is_over:
                pacing.rest(count, builder.size - known)
        return builder.take(), first, after

    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(gather)
        while True:
            found = coming.result()
            was_last = is_over
            if not was_last:
                coming = ahead.submit(gather)
            if found[0].rows:
                yield found
            if was_last:
                return


def held_by(
    connection: BlockingConnection,
    queue: str,
    group: str,
    after: str,
    last: str,
    consumer: str | None = None,
) -> dict[bytes, tuple[str, int, int]]:
    """Per pending entry behind one id, up to another: consumer, deliveries, idle time (ms). Only
    entries of `consumer`, if that is given."""
    only = () if consumer is None else (consumer,)
    found: dict[bytes, tuple[str, int, int]] = {}
    start = f"({after}".encode()
    while True:
        request = commands(
            ("XPENDING", Keys(queue).stream, group, start, last, _PENDING_PAGE, *only),
            effect=Effect.READ,
            raises=False,
        )
        rows = connection.call(request)
        if not isinstance(rows, list):  # no such group, so nothing is pending
            return found
        for entry_id, holder, idle_ms, deliveries in rows:
            found[entry_id] = (holder.decode(errors="replace"), deliveries, idle_ms)
        if len(rows) < _PENDING_PAGE:
            return found
        start = b"(" + rows[-1][0]
