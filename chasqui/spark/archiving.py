"""Events kept for good: Parquet by queue, day and batch; a batch written again replaces itself.

A batch that Spark replays has the same number and the same rows, and a folder of its own: writing
it again replaces it. So the archive holds every event once, needs no metadata of Spark's, and any
engine can read it.
"""

import uuid
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from chasqui.spark.verbs import follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_WORK = "_compacting"


def archive(
    spark: "SparkSession",
    queue: str,
    to: str,
    *,
    follow_on: bool = False,
    interval_s: float = 10,
    **options: Any,
) -> "StreamingQuery":
    """Start to archive events of a queue (or several, with commas) into a folder.

    Ends when all that is there now is archived, unless `follow_on`. Its checkpoint is inside.
    """
    options = {"startingOffsets": "earliest", **options}
    events = follow(spark, "events", queue, **options)
    writer = (
        events.writeStream.foreachBatch(lambda df, batch: write_batch(df, batch, to))
        .option("checkpointLocation", f"{to}/_checkpoint")
        .queryName(f"archive {queue}")
    )
    if follow_on:
        return writer.trigger(processingTime=f"{interval_s} seconds").start()
    return writer.trigger(availableNow=True).start()


def write_batch(df: "DataFrame", batch: int, to: str) -> None:
    """Write one batch into its own folders, in place of what is in them."""
    (
        df.withColumn("date", F.to_date("ts"))
        .withColumn("batch", F.lit(f"{batch:010d}"))
        .write.mode("overwrite")
        .option("partitionOverwriteMode", "dynamic")
        .partitionBy("queue", "date", "batch")
        .parquet(f"{to}/events")
    )


def read_archive(spark: "SparkSession", to: str) -> "DataFrame":
    """The archived events."""
    return spark.read.parquet(f"{to}/events").drop("batch")


def compact(spark: "SparkSession", to: str, *, before: str | None = None) -> int:
    """Rewrite the days before a date (default today) as one file each; how many days were.

    Can be interrupted anywhere and run again: a day is written aside first, then takes the place
    of its batches. Readers may miss a day for the moment in which it moves.
    """
    store = _Store(spark, to)
    store.finish()  # what an earlier run was interrupted in
    events = spark.read.parquet(f"{to}/events")
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
