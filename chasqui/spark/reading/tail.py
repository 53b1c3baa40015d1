"""Events, history or dead jobs as a stream: an offset is an id, and an ordinal to count losses.

An offset is JSON such as `{"orders": {"id": "1794-3", "n": 812345, "since": 40}}`. Reading between
two offsets is stateless, and repeatable while the entries are kept. Entries that were trimmed
unread are counted exactly, because these streams are only trimmed at their head. Dead jobs may be
deleted anywhere, so the table dlq has no ordinal and no count.
"""

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from chasqui.model.keys import Keys
from chasqui.spark.connections import check_history, open_connection, queues_of
from chasqui.spark.options import LOGS, OptionError, Options
from chasqui.spark.reading import ranges
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.spark.reading.pages import StreamPart, read_stream, stream_of
from chasqui.spark.reading.ranges import DataLossError, Mark, Position, Walked
from chasqui.spark.reading.reader_position import ReaderPosition
from chasqui.spark.schemas import check_subset
from chasqui.transport.blocking import BlockingConnection

logger = logging.getLogger(__name__)

#: Per queue: id, n (the ordinal), since (the ordinal at which the query began), lost (so far).
#: Unknown fields are left out. The query should have read `n - since` entries up to here: if it has
#: read fewer rows, exactly those were trimmed, before or after planning.
Offset: TypeAlias = dict[str, dict[str, Any]]


class TailReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Follows one table of one or more queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_subset(schema, options)
        self._options = options
        self._schema = schema
        self._queues: tuple[str, ...] | None = None
        self._connections: dict[str, BlockingConnection] = {}
        self._initial: Offset | None = None
        self._targets: dict[str, str] | None = None
        self._marks: dict[tuple[str, str, str], tuple[Mark, ...]] = {}
        #: Per queue the walk over the next batch, made while Spark computes this one.
        self._ahead: dict[str, tuple[Position, int, Future[Walked]]] = {}
        self._walker: ThreadPoolExecutor | None = None
        self._reader_position: ReaderPosition | None = None
        self._waiting_since_s = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        only_on_driver = dict.fromkeys(("_reader_position", "_walker"))
        return {**self.__dict__, "_connections": {}, "_marks": {}, "_ahead": {}, **only_on_driver}

    # ── What Spark calls on the driver ──────────────────────────────────────────────────────────

    def initialOffset(self) -> Offset:
        """Where a new query begins. Spark asks twice and must get the same answer."""
        if self._initial is None:
            check_history(self._options, self._all())
            self._initial = {}
            for queue in self._all():
                position = self._start(queue)
                self._initial[queue] = _written(position, {"since": position.ordinal})
            self._read_up_to(self._initial)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._targets = {queue: self._tip(queue).id for queue in self._all()}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The end of the next batch; the start if there is no batch yet."""
        self._read_up_to(start)
        queues = self._all()
        most: int | None = None
        if not isinstance(limit, ReadAllAvailable):
            most = max(1, getattr(limit, "max_rows", 2**53) // len(queues))
        end: Offset = {**start}
        self._marks.clear()
        count = 0
        for queue in queues:
            position, known = self._position(queue, start)
            walked = self._plan(queue, position, (self._targets or {}).get(queue, "+"), most)
            if not walked.marks:
                continue
            lost = known.get("lost", 0)
            if self._counts_loss and walked.lost != 0:
                lost += self._lose(queue, walked.lost)
            end[queue] = _written(walked.end, {"since": known.get("since"), "lost": lost or None})
            self._marks[queue, position.id, walked.end.id] = walked.marks
            count += walked.count
        if self._should_wait(count):
            return start
        self._waiting_since_s = time.monotonic()
        return end

    def reportLatestOffset(self) -> Offset:
        return {queue: _written(self._tip(queue)) for queue in self._all()}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """What the tasks of a batch read, in parts of counted size."""
        self._read_up_to(start)
        options = self._options
        parts: list[InputPartition] = []
        for queue, until in end.items():
            after, last = start.get(queue, {}).get("id", ranges.BEGINNING), until["id"]
            if after == last:
                continue
            marks = self._marks.get((queue, after, last))
            if marks is None:  # an earlier driver planned this batch
                walked = self._walk(queue, Position(after, None), last, None)
                marks = walked.marks
                self._check_replay(queue, start.get(queue), until, walked.count)
            parts += [
                StreamPart(queue, part)
                for part in ranges.cut(
                    after, marks, options.max_records_per_partition, options.min_partitions
                )
            ]
        return parts

    def stop(self) -> None:
        if self._walker is not None:
            self._walker.shutdown(cancel_futures=True)
            self._walker = None
        self._ahead.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._reader_position is not None:
            self._reader_position.close()
            self._reader_position = None

    # ── What Spark calls in the tasks ───────────────────────────────────────────────────────────

    def read(self, partition: InputPartition) -> Any:
        return read_stream(partition, self._options, self._schema)

    # ── Positions ───────────────────────────────────────────────────────────────────────────────

    def _all(self) -> tuple[str, ...]:
        if self._queues is None:
            self._queues = queues_of(self._options)
        return self._queues

    def _run(self, queue: str, plan: Any) -> Any:
        if queue not in self._connections:
            self._connections[queue] = open_connection(self._options, queue)
        return self._connections[queue].run(plan)

    def _stream(self, queue: str) -> bytes:
        return stream_of(Keys(queue), self._options.table)

    @property
    def _counts_loss(self) -> bool:
        return self._options.table in LOGS

    def _tip(self, queue: str) -> Position:
        position: Position = self._run(queue, ranges.tip(self._stream(queue)))
        return position if self._counts_loss else Position(position.id, None)

    def _start(self, queue: str) -> Position:
        """Where a new query begins to read a queue."""
        options = self._options
        head: Position = self._run(queue, ranges.head(self._stream(queue)))
        if self._counts_loss and head.ordinal is None and options.fail_on_data_loss:
            raise OptionError(
                "this server does not count the entries ever added (Redis and Valkey do from 7.0 "
                "on), so losses cannot be seen: say failOnDataLoss=false to read without"
            )
        if options.starting_timestamp is not None:
            behind = ranges.before_ms(options.starting_timestamp)
        elif options.starting_offsets == "latest":
            return self._tip(queue)
        elif options.starting_offsets == "earliest":
            behind = ranges.BEGINNING
        else:
            behind = ranges.full_id(json.loads(options.starting_offsets).get(queue, "0"))
        if behind == ranges.BEGINNING or not self._counts_loss or head.ordinal is None:
            return Position(behind, head.ordinal if self._counts_loss else None)
        # The count from the first entry gives the ordinal of a position in the middle.
        passed = self._walk(queue, head, behind, None)
        return Position(behind, passed.end.ordinal)

    def _position(self, queue: str, start: Offset) -> tuple[Position, dict[str, Any]]:
        """How far a queue was read, and its offset."""
        known = start.get(queue)
        if known is None:  # a new queue that matches the pattern
            head: Position = self._run(queue, ranges.head(self._stream(queue)))
            return head, {"since": head.ordinal}
        return Position(known["id"], known.get("n")), known

    def _read_up_to(self, start: Offset) -> None:
        """Report the start of Spark's next batch: all before it is committed."""
        if self._options.reader is None:
            return
        if self._reader_position is None:
            self._reader_position = ReaderPosition(self._options)
        for queue, known in start.items():
            self._reader_position.read_up_to(queue, Position(known["id"], known.get("n")))

    def _plan(self, queue: str, position: Position, last: str, most: int | None) -> Walked:
        """The walk over the next batch; some or all of it may have been made ahead."""
        start, limit, walking = self._ahead.pop(queue, (None, None, None))
        if walking is not None and (start, limit) == (position, most):
            walked = walking.result()
            if most is not None and walked.count < most:
                walked += self._walk(queue, walked.end, last, most - walked.count)
        else:
            walked = self._walk(queue, position, last, most)
        if walked.count == most:  # there is more
            if self._walker is None:
                self._walker = ThreadPoolExecutor(1, "chasqui-walk")
            going = self._walker.submit(self._walk, queue, walked.end, last, most)
            self._ahead[queue] = (walked.end, most, going)
        return walked

    def _walk(self, queue: str, position: Position, last: str, most: int | None) -> Walked:
        options = self._options
        rows = most if most is not None else options.max_offsets_per_trigger
        step = ranges.step_for(rows, options.min_partitions, options.max_records_per_partition)
        walked: Walked = self._run(
            queue,
            ranges.walk(
                self._stream(queue),
                position,
                ReadPacing(options, is_alone=True),
                last,
                most=most,
                step=step,
                counts_loss=self._counts_loss,
            ),
        )
        return walked

    # ── Losses ──────────────────────────────────────────────────────────────────────────────────

    def _lose(self, queue: str, lost: int | None) -> int:
        """How many entries were lost unread; DataLossError if the query must fail then."""
        if self._options.fail_on_data_loss:
            raise DataLossError(queue, self._options.table, lost)
        fields = {"queue": queue, "missed": lost}
        logger.warning(
            "%s entries of %s of queue %r were gone before they were read",
            lost,
            self._options.table,
            queue,
            extra=fields,
        )
        return lost or 0

    def _check_replay(
        self, queue: str, start: dict[str, Any] | None, end: dict[str, Any], found: int
    ) -> None:
        """Check that a batch which an earlier driver planned still has its entries."""
        if start is None or "n" not in start or "n" not in end or not self._counts_loss:
            return
        lost_in_it = end.get("lost", 0) - start.get("lost", 0)
        missing = end["n"] - start["n"] - lost_in_it - found
        if missing > 0:
            self._lose(queue, missing)

    def _should_wait(self, count: int) -> bool:
        options = self._options
        if count >= options.min_offsets_per_trigger or self._targets is not None:
            return False
        waited_s = time.monotonic() - self._waiting_since_s
        return waited_s < options.max_trigger_delay


def _written(position: Position, more: dict[str, int | None] | None = None) -> dict[str, Any]:
    offset = {"id": position.id, "n": position.ordinal, **(more or {})}
    return {name: value for name, value in offset.items() if value is not None}
