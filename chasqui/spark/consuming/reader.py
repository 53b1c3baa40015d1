"""A queue as a streaming source: jobs are taken, and acknowledged once their batch is committed.

Each batch has a consumer of its own, `spark:<name>:<n>`. What is pending for it is the batch, so
any task can read it again, and the next driver finds it. An offset is `{"seq": n}`.

Spark tells a source that a batch is done only when the next one begins. But it asks for the next
offset right after it wrote the commit log, and names the last offset as the start. So that is when
all batches up to the start are acknowledged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from chasqui.scripts.settling import Consumer
from chasqui.spark.connections import connected
from chasqui.spark.consuming.batches import Batches
from chasqui.spark.consuming.corrupt import note
from chasqui.spark.options import Options
from chasqui.spark.reading import ranges
from chasqui.spark.reading.decoding import JobDecoder
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.spark.reading.pages import gathered, held_by
from chasqui.spark.schemas import check_subset

Offset: TypeAlias = dict[str, int]


@dataclass
class HeldPart(InputPartition):  # type: ignore[misc]
    """Jobs that one consumer holds, behind `after` up to `last`."""

    consumer: Consumer
    after: str
    last: str


class ConsumeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Takes the jobs of one or more queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_subset(schema, options)
        self._options = options
        self._schema = schema
        self._initial: Offset | None = None
        self._batches: Batches | None = None
        self._acked = -1
        #: The last batch that this driver has planned.
        self._planned = -1
        #: With AvailableNow: per queue how many jobs may still be taken.
        self._budgets: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    # ── What Spark calls on the driver ──────────────────────────────────────────────────────────

    def initialOffset(self) -> Offset:
        """Where a new query begins: before the batches that an earlier driver left unfinished."""
        if self._initial is None:
            batches = self._open_batches()
            left = [seq for queue in self._options.queue for seq in batches.found(queue)]
            self._initial = {"seq": min(left) - 1 if left else 0}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        batches = self._open_batches()
        self._budgets = {queue: batches.undelivered(queue) for queue in self._options.queue}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Acknowledge all up to the start, then take the next batch."""
        batches = self._open_batches()
        self._acknowledge(start["seq"])
        following = start["seq"] + 1
        most = 2**53
        if not isinstance(limit, ReadAllAvailable):
            most = max(1, getattr(limit, "max_rows", most) // len(self._options.queue))
        if any(batches.has_jobs(queue, following) for queue in self._options.queue):
            return {"seq": following}  # an earlier driver took it
        taken = sum(self._take(batches, queue, following, most) for queue in self._options.queue)
        return {"seq": following} if taken else start

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """What the tasks read: the jobs that are pending for the batches' consumers."""
        batches = self._open_batches()
        batches.renew(end["seq"])
        options = self._options
        parts: list[InputPartition] = []
        for seq in range(start["seq"] + 1, end["seq"] + 1):
            for queue in options.queue:
                if seq > self._planned:
                    batches.forget_corrupt(queue, seq)
                marks = batches.marks(queue, seq, options.fetch_count or ranges.SLICE)
                parts += [
                    HeldPart(batches.consumer(queue, seq), part.after, part.last)
                    for part in ranges.cut(
                        ranges.BEGINNING,
                        marks,
                        options.max_records_per_partition,
                        options.min_partitions,
                    )
                ]
        self._planned = max(self._planned, end["seq"])
        return parts

    def commit(self, end: Offset) -> None:
        self._acknowledge(end["seq"])

    def stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # ── What Spark calls in the tasks ───────────────────────────────────────────────────────────

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The jobs of one part. They stay pending, so another task can read them again."""
        if not isinstance(partition, HeldPart):
            return
        options = self._options
        decoder = JobDecoder(options, self._schema)
        (keys, group, name), last = partition.consumer, partition.last

        # Not XREADGROUP: it would count a delivery each time the batch is computed.
        def page(after: str, size: int) -> tuple[Any, ...]:
            return "XRANGE", keys.stream, f"({after}", last, "COUNT", size

        with connected(options, keys.queue) as connection:
            for columns, first, newest in gathered(
                connection, decoder.builder(), ReadPacing(options), partition.after, page, last
            ):
                held = held_by(connection, keys.queue, group, first, newest, name)
                if not held:
                    continue
                batch = decoder.batch(keys.queue, columns, held, only_held=True)
                if decoder.corrupt and options.on_corrupt == "dlq":
                    note(connection, partition.consumer, decoder.corrupt)
                yield batch

    # ── Batches ─────────────────────────────────────────────────────────────────────────────────

    def _open_batches(self) -> Batches:
        """The batches of this query. The first call takes the query lease."""
        if self._batches is None:
            batches = Batches(self._options)
            batches.open()
            self._batches = batches
        self._batches.check()
        return self._batches

    def _take(self, batches: Batches, queue: str, seq: int, most: int) -> int:
        if self._budgets is not None:
            most = min(most, self._budgets[queue])
        taken = batches.take(queue, seq, most)
        if self._budgets is not None:
            self._budgets[queue] -= taken
        return taken

    def _acknowledge(self, seq: int) -> None:
        """Acknowledge every batch up to this one."""
        if seq <= self._acked:
            return
        batches = self._open_batches()
        for queue in self._options.queue:
            for one in batches.found(queue):
                if one <= seq:
                    batches.acknowledge(queue, one)
        batches.forget(seq)
        self._acked = seq
