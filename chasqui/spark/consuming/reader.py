"""A queue as a streaming source: jobs taken as by a worker, acked once their batch is committed.

Every batch has a consumer of its own, `spark:<name>:<n>`: what is pending for it is the batch, so
it can be read again by any task, and found again by the next driver. An offset is `{"seq": n}`.

Spark tells a source that a batch is done only when the next one begins. But it asks for the next
offset right after the commit log was written, and names the last one as the start: so that is when
everything up to the start is acknowledged.
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

from chasqui.model.keys import Keys
from chasqui.spark import ranges
from chasqui.spark.consuming.corrupt import note
from chasqui.spark.keeper import Keeper
from chasqui.spark.connections import connected
from chasqui.spark.options import Options
from chasqui.spark.reading.pacing import Pace
from chasqui.spark.reading.pages import gathered, held_by
from chasqui.spark.schemas import check_subset
from chasqui.spark.reading.decoding import JobDecoder

Offset: TypeAlias = dict[str, int]


@dataclass
class HeldPart(InputPartition):  # type: ignore[misc]
    """Jobs that one consumer holds, behind `after` up to `last`."""

    queue: str
    consumer: str
    after: str
    last: str


class ConsumeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Takes the jobs of one or more queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_subset(schema, options)
        self._options = options
        self._schema = schema
        self._initial: Offset | None = None
        self._keeper: Keeper | None = None
        self._acked = -1
        #: The last batch that this driver has planned.
        self._planned = -1
        #: With AvailableNow: per queue how many jobs may still be taken.
        self._budgets: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_keeper": None}

    # ── What Spark calls on the driver ──────────────────────────────────────────────────────────

    def initialOffset(self) -> Offset:
        """Where a new query begins: before what an earlier life of it left unfinished."""
        if self._initial is None:
            keeper = self._held()
            left = [seq for queue in self._options.queue for seq in keeper.batches(queue)]
            self._initial = {"seq": min(left) - 1 if left else 0}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        keeper = self._held()
        self._budgets = {queue: keeper.undelivered(queue) for queue in self._options.queue}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Acknowledge all up to the start, then take the next batch."""
        keeper = self._held()
        self._acknowledge(start["seq"])
        following = start["seq"] + 1
        most = 2**53
        if not isinstance(limit, ReadAllAvailable):
            most = max(1, getattr(limit, "max_rows", most) // len(self._options.queue))
        if any(keeper.holds(queue, following) for queue in self._options.queue):
            return {"seq": following}  # taken by an earlier life: this is the batch
        taken = sum(self._take(keeper, queue, following, most) for queue in self._options.queue)
        return {"seq": following} if taken else start

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """What the tasks of a batch read: what is pending for its consumer."""
        keeper = self._held()
        keeper.renew(end["seq"])
        options = self._options
        parts: list[InputPartition] = []
        for seq in range(start["seq"] + 1, end["seq"] + 1):
            for queue in options.queue:
                if seq > self._planned:
                    keeper.forget_corrupt(queue, seq)
                marks = keeper.marks(queue, seq, options.fetch_count or ranges.SLICE)
                parts += [
                    HeldPart(queue, keeper.consumer(seq), part.after, part.last)
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
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    # ── What it calls in the tasks ──────────────────────────────────────────────────────────────

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The jobs of one part. They stay pending, so they can be read again."""
        if not isinstance(partition, HeldPart):
            return
        options = self._options
        decoder = JobDecoder(options, self._schema)
        keys, last = Keys(partition.queue), partition.last

        # Not XREADGROUP, which would count one more delivery each time the batch is computed.
        def page(after: str, size: int) -> tuple[Any, ...]:
            return "XRANGE", keys.stream, f"({after}", last, "COUNT", size

        with connected(options, partition.queue) as connection:
            for columns, first, newest in gathered(
                connection, decoder.builder(), Pace(options), partition.after, page, last
            ):
                held = held_by(
                    connection, partition.queue, options.group, first, newest, partition.consumer
                )
                if not held:
                    continue
                batch = decoder.batch(partition.queue, columns, held, only_held=True)
                if decoder.corrupt and options.on_corrupt == "dlq":
                    note(connection, keys, partition.consumer, decoder.corrupt)
                yield batch

    # ── Batches ─────────────────────────────────────────────────────────────────────────────────

    def _held(self) -> Keeper:
        """The keeper of this query's name, which it holds from the first call on."""
        if self._keeper is None:
            keeper = Keeper(self._options)
            keeper.open()
            self._keeper = keeper
        self._keeper.check()
        return self._keeper

    def _take(self, keeper: Keeper, queue: str, seq: int, most: int) -> int:
        if self._budgets is not None:
            most = min(most, self._budgets[queue])
        taken = keeper.claim(queue, seq, most)
        if self._budgets is not None:
            self._budgets[queue] -= taken
        return taken

    def _acknowledge(self, seq: int) -> None:
        """Acknowledge every batch up to this one."""
        if seq <= self._acked:
            return
        keeper = self._held()
        for queue in self._options.queue:
            for one in keeper.batches(queue):
                if one <= seq:
                    keeper.acknowledge(queue, one)
        keeper.forget(seq)
        self._acked = seq
