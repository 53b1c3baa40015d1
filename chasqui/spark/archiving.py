"""Events kept for good: Parquet by queue, day and batch; a batch written again replaces itself.

A batch that Spark replays has the same number and a folder of its own: writing it again replaces
it. So the archive holds every event once, needs no metadata of Spark's, and any engine can read it.
A batch that was written whole is not written again: some of its events may be trimmed since.
"""

import json
import os
import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import Observation
from pyspark.sql import functions as F

from chasqui.retention import MAX_READER_BYTES
from chasqui.spark.losses import SCHEMA, Loss, due, losses_of
from chasqui.spark.schemas import COLUMNS
from chasqui.spark.verbs import follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_WORK = "_compacting"
_CHECKPOINT = "_checkpoint"
#: In the checkpoint, so that whoever begins anew begins anew: the number of the last batch written.
_WRITTEN = f"{_CHECKPOINT}/written"

#: Is told of each batch that was written: its rows, and what was lost of it; None if the server
#: does not count what it adds.
OnBatch: TypeAlias = Callable[[int, list[Loss] | None], None]


def archive(
    spark: "SparkSession",
    queue: str,
    to: str,
    *,
    follow_on: bool = False,
    interval_s: float = 10,
    on_batch: OnBatch | None = None,
    **options: Any,
) -> "StreamingQuery":
    """Start to archive events of a queue (or several, with commas) into a folder.

    Ends when all that is there now is archived, unless `follow_on`. Its checkpoint is inside.
    `on_batch(rows, losses)` is called when a batch is written. Events that it has not read are not
    trimmed while it lives (`readerHold`, `readerLease`), under the name of its folder unless
    `reader` gives another; `reader=None` does without.
    """
    options = {"startingOffsets": "earliest", "reader": reader_of(to), **options}
    events = follow(spark, "events", queue, **options)

    def write(df: "DataFrame", batch: int) -> None:
        rows, losses = write_batch(df, batch, to)
        if on_batch is not None:
            on_batch(rows, losses)

    writer = (
        events.writeStream.foreachBatch(write)
        .option("checkpointLocation", f"{to}/{_CHECKPOINT}")
        .queryName(f"archive {queue}")
    )
    if follow_on:
        return writer.trigger(processingTime=f"{interval_s} seconds").start()
    return writer.trigger(availableNow=True).start()


def reader_of(to: str) -> str:
    """The name by which an archive reads events: its folder, wherever it is started from."""
    place = re.sub(r"^(\w+://)[^/]*@", r"\1", to)  # without who may read it, and a password
    name = f"archive {place if '://' in place else os.path.abspath(place)}"
    return name if len(name.encode()) <= MAX_READER_BYTES else f"archive …{name[-60:]}"


def write_batch(df: "DataFrame", batch: int, to: str) -> tuple[int, list[Loss] | None]:
    """Write one batch, unless it is written already: see OnBatch for what it returns."""
    spark = df.sparkSession
    store = _Store(spark, to)
    if f"{batch}" in store.names(_WRITTEN):
        return 0, []
    seen = Observation()
    (
        df.observe(seen, F.count("*").alias("rows"))
        .withColumn("date", F.to_date("ts"))
        .withColumn("batch", F.lit(f"{batch:010d}"))
        .write.mode("overwrite")
        .option("partitionOverwriteMode", "dynamic")
        .partitionBy("queue", "date", "batch")
        .parquet(f"{to}/events")
    )
    rows: int = seen.get["rows"]
    start, end = store.offset(batch - 1), store.offset(batch)
    losses: list[Loss] | None = None
    if expected := due(start, end):
        is_whole = sum(count or 0 for count in expected.values()) == rows
        losses = [] if is_whole else losses_of(start, end, _kept(spark, batch, to), batch)
    if losses:
        told = spark.createDataFrame([loss.row() for loss in losses], SCHEMA).drop("batch")
        told.coalesce(1).write.mode("overwrite").parquet(f"{to}/losses/batch={batch:010d}")
    store.note(_WRITTEN, f"{batch}")
    return rows, losses


def _kept(spark: "SparkSession", batch: int, to: str) -> dict[str, tuple[int, str]]:
    """Per queue, how many rows of a batch are in the archive, and the id of the first."""
    ms, sequence = (F.split("entry_id", "-")[i].cast("decimal(20)") for i in (0, 1))
    rows = (
        _events(spark, to)
        .where(F.col("batch") == f"{batch:010d}")
        .groupBy("queue")
        .agg(F.count("*"), F.min_by("entry_id", F.struct(ms, sequence)))
        .collect()
    )
    return {queue: (count, first) for queue, count, first in rows}


def read_archive(spark: "SparkSession", to: str) -> "DataFrame":
    """The archived events."""
    return _events(spark, to).drop("batch")


def _events(spark: "SparkSession", to: str) -> "DataFrame":
    # With a schema: out of the names of folders alone, Spark would take a queue `007` for the 7.
    columns = {**COLUMNS["events"], "date": "date", "batch": "string"}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    return spark.read.schema(schema).parquet(f"{to}/events")


def read_losses(spark: "SparkSession", to: str) -> "DataFrame":
    """The events that the archive lacks, since they were trimmed before they were read.

    Per queue and batch: `lost` events behind `after_id` and not behind `before_id`. `lost` is null
    where the stream was deleted, so that nobody knows; `after_id` is null where the archive begins.
    """
    if not _Store(spark, to).exists("losses"):
        return spark.createDataFrame([], SCHEMA)
    return spark.read.schema(SCHEMA).parquet(f"{to}/losses")


def compact(spark: "SparkSession", to: str, *, before: str | None = None) -> int:
    """Rewrite the days before a date (default today) as one file each; how many days were.

    Can be interrupted anywhere and run again: a day is written aside first, then takes the place
    of its batches. Readers may miss a day for the moment in which it moves.
    """
    store = _Store(spark, to)
    store.finish()  # what an earlier run was interrupted in
    events = _events(spark, to)
    limit = F.current_date() if before is None else F.to_date(F.lit(before))
    # Spark may yet replay its last batch, and would find its folder gone: so that day waits.
    numbers = events.select("batch").distinct().where("batch not like 'c%'")
    last = numbers.agg(F.max("batch")).first()[0]
    days = (
        events.where(F.col("date") < limit)
        .groupBy("queue", "date")
        .agg(
            F.countDistinct("batch").alias("batches"),
            F.max(F.col("batch") == F.lit(last)).alias("has_last"),
        )
        .where("batches > 1 and not coalesce(has_last, false)")
        .collect()
    )
    for day in days:
        place = f"queue={day['queue']}/date={day['date']}"
        rows = spark.read.parquet(f"{to}/events/{place}").drop("batch")
        aside = f"{to}/{_WORK}/{place}/batch=c{uuid.uuid4().hex}"
        rows.coalesce(1).write.mode("overwrite").parquet(aside)
        store.finish()
    return len(days)


class _Store:
    """The archive's file system, whichever Spark knows it as."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        self._jvm = spark._jvm
        self._root = self._jvm.org.apache.hadoop.fs.Path(root)
        self._fs = self._root.getFileSystem(spark._jsc.hadoopConfiguration())

    def _path(self, place: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, place)

    def exists(self, place: str) -> bool:
        return bool(self._fs.exists(self._path(place)))

    def delete(self, place: str) -> None:
        self._fs.delete(self._path(place), True)

    def names(self, place: str) -> list[str]:
        if not self.exists(place):
            return []
        return sorted(one.getPath().getName() for one in self._fs.listStatus(self._path(place)))

    def offset(self, batch: int) -> dict[str, Any]:
        """Where a batch ends, by the log that Spark keeps; of one that is not in it, nothing."""
        place = f"{_CHECKPOINT}/offsets/{batch}"
        if not self.exists(place):
            return {}
        stream = self._fs.open(self._path(place))
        try:
            text = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        found: dict[str, Any] = json.loads(text.splitlines()[-1])  # behind it: version, settings
        return found

    def note(self, place: str, name: str) -> None:
        """Leave an empty file of this name, and no other, in a folder."""
        self._fs.create(self._path(f"{place}/{name}")).close()
        for other in self.names(place):
            if other != name:
                self.delete(f"{place}/{other}")

    def finish(self) -> None:
        """Put days that were rewritten whole in place of their batches; forget the others."""
        for queue in self.names(_WORK):
            for date in self.names(f"{_WORK}/{queue}"):
                place = f"{queue}/{date}"
                for batch in self.names(f"{_WORK}/{place}"):
                    if self.exists(f"{_WORK}/{place}/{batch}/_SUCCESS"):
                        self._swap(place, batch)
        self.delete(_WORK)

    def _swap(self, place: str, batch: str) -> None:
        for name in self.names(f"events/{place}"):
            self.delete(f"events/{place}/{name}")
        self._fs.rename(
            self._path(f"{_WORK}/{place}/{batch}"), self._path(f"events/{place}/{batch}")
        )
