"""Archives of events, each stored once: Parquet by queue, day and batch, or another table format.
The history (payloads of finished jobs) is archived the same way, if workers write it.

A batch that Spark replays has the same number. In Parquet it has a folder of its own, and writing
it again replaces the folder; in other formats the batch is a transaction, which is done once. A
batch that was written completely is not written again: some of its events may be trimmed by now.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql import functions as F

from chasqui.errors import ChasquiError
from chasqui.managing.retention import MAX_READER_BYTES
from chasqui.spark.api import follow
from chasqui.spark.archiving import losses as loss
from chasqui.spark.archiving.folders import Folder
from chasqui.spark.archiving.losses import Loss
from chasqui.spark.archiving.tables import Txn, split_location, tables_of
from chasqui.spark.connections import check_history
from chasqui.spark.options import LOGS, Options
from chasqui.spark.schemas import COLUMNS, PAYLOADS
from chasqui.spark.sessions import refuse_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: The folder with the number of the last batch written. It is part of the checkpoint, since a new
#: checkpoint starts at zero.
_WRITTEN: Final = "written"

#: Called after each batch with its rows and its losses; None if the server does not count what it
#: adds.
OnBatch: TypeAlias = Callable[[int, list[Loss] | None], None]


def archive(
    spark: "SparkSession",
    queue: str,
    to: str,
    *,
    table: str = "events",
    follow_on: bool = False,
    interval_s: float = 10,
    checkpoint: str | None = None,
    on_batch: OnBatch | None = None,
    **options: Any,
) -> "StreamingQuery":
    """Start to archive the events of a queue (or several, with commas); with `table="history"`, the
    payloads of finished jobs.

    `to` is a folder for Parquet, `delta:folder` or `iceberg:catalog.namespace`. The query ends when
    all that is there now is archived, unless `follow_on`. `checkpoint` is Spark's own folder: by
    default inside `to`; Iceberg needs one. `on_batch(rows, losses)` is called after each batch.
    While the query lives, events that it has not read are not trimmed (`readerHold`,
    `readerLease`). The server knows it by the name `reader`, by default its location; `reader=None`
    turns that off.
    """
    refuse_connect(spark, "archive")
    there = Archive(spark, to, checkpoint, table)
    log = there.checkpoint
    options = {"startingOffsets": "earliest", "reader": reader_of(to), **options}
    given: dict[str, str] = {"queue": queue, "table": table}
    given |= {name: options[name] for name in ("url", "urlEnv") if name in options}
    checked = Options.parse(given, "s")
    check_history(checked)
    there.check_begin(checked.queue)
    entries = follow(spark, table, queue, **options)

    def write(df: "DataFrame", batch: int) -> None:
        rows, losses = there.write(df, batch)
        if on_batch is not None:
            on_batch(rows, losses)

    writer = (
        entries.writeStream.foreachBatch(write)
        .option("checkpointLocation", log)
        .queryName(f"archive {table} {queue}")
    )
    if follow_on:
        return writer.trigger(processingTime=f"{interval_s} seconds").start()
    return writer.trigger(availableNow=True).start()


def reader_of(to: str) -> str:
    """The reader name of an archive: its folder, the same from any working directory."""
    kind, location = split_location(to)
    location = re.sub(r"^(\w+://)[^/]*@", r"\1", location)  # without user and password
    if kind != "iceberg" and "://" not in location:
        location = os.path.abspath(location)
    name = f"archive {location}"
    return name if len(name.encode()) <= MAX_READER_BYTES else f"archive …{name[-60:]}"


def read_archive(spark: "SparkSession", to: str, *, table: str = "events") -> "DataFrame":
    """The archived events, or with `table="history"` the finished jobs."""
    return Archive(spark, to, table=table).entries().drop("batch")


def read_losses(spark: "SparkSession", to: str, *, table: str = "events") -> "DataFrame":
    """What the archive lacks of a table, because it was trimmed before it was read.

    Per queue and batch: `lost` entries behind `after_id`, up to `before_id`. `lost` is null if the
    stream was deleted, so that the number is unknown; `after_id` is null where the archive begins.
    """
    refuse_connect(spark, "read_losses")
    return Archive(spark, to, table=table).losses()


class Archive:
    """The archived entries of a log, its losses, and the checkpoint of the query that fills it. The
    history lies beside the events."""

    def __init__(
        self,
        spark: "SparkSession",
        to: str,
        checkpoint: str | None = None,
        table: str = "events",
    ) -> None:
        if table not in LOGS:
            raise ValueError(f"table must be one of {', '.join(LOGS)}, got {table!r}")
        self._spark = spark
        self.table = table
        self._more = "" if table == "events" else f"_{table}"
        self.kind, self.root = split_location(to)
        self._tables = tables_of(spark, self.kind, self.root)
        self._checkpoint = checkpoint

    @property
    def checkpoint(self) -> str:
        if self._checkpoint is None and self.kind == "iceberg":
            raise ValueError("an archive in Iceberg needs a checkpoint: the folder that it goes to")
        return (self._checkpoint or f"{self.root}/_checkpoint") + self._more

    def location(self, table: str) -> str:
        return f"{self.root}.{table}" if self.kind == "iceberg" else f"{self.root}/{table}"

    def check_begin(self, queues: Sequence[str]) -> None:
        """Raise if the checkpoint is new and the archive has entries of these queues: the first
        batches would replace those of the same number, or be added a second time."""
        if Folder(self._spark, self.checkpoint).exists("metadata") or not self:
            return
        found = self.entries().where(F.col("queue").isin(*queues)).select("queue").first()
        if found is not None:
            raise ChasquiError(
                f"{self.location(self.table)} has {self.table} of queue {found[0]!r}, and the "
                f"checkpoint {self.checkpoint} does not know of them: give the checkpoint that "
                "they were archived with, or archive to another place"
            )

    def __bool__(self) -> bool:
        """Whether anything was archived."""
        return self._tables.has(self.location(self.table))

    @property
    def work(self) -> str:
        """The folder in which days are compacted."""
        return f"_compacting{self._more}"

    def entries(self) -> "DataFrame":
        location = self.location(self.table)
        columns = {**COLUMNS[self.table], "date": "date", "batch": "string"}
        shaped = PAYLOADS.get(self.table)
        if shaped is not None and self.kind == "parquet":  # the type it was written with
            written = self._tables.read(location).schema[shaped]
            columns[shaped] = written.dataType.simpleString()
        schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
        return self._tables.read(location, schema)

    def losses(self) -> "DataFrame":
        location = self.location(f"losses{self._more}")
        if not self._tables.has(location):
            return self._spark.createDataFrame([], loss.SCHEMA)
        return self._tables.read(location, loss.SCHEMA)

    def write(self, df: "DataFrame", batch: int) -> tuple[int, list[Loss] | None]:
        """Write one batch, unless it is written; the arguments for OnBatch."""
        log = Folder(self._spark, self.checkpoint)
        if f"{batch}" in log.names(_WRITTEN):
            return 0, []
        txn = Txn(json.loads(log.text("metadata"))["id"], batch)
        dated = df.withColumn("date", F.to_date("ts")).withColumn("batch", F.lit(f"{batch:010d}"))
        rows = self._tables.append(self.location(self.table), dated, txn)
        start, end = _offset(log, batch - 1), _offset(log, batch)
        due = loss.due(start, end)
        if rows is None or (due and sum(count or 0 for count in due.values()) != rows):
            kept = self._kept(batch)
            rows = sum(count for count, _ in kept.values())
            losses = loss.losses_of(start, end, kept, batch)
        else:
            losses = []
        if losses:
            lost = self._spark.createDataFrame([one.row() for one in losses], loss.SCHEMA)
            location = self.location(f"losses{self._more}")
            self._tables.append(location, lost.coalesce(1), txn)
        log.note(_WRITTEN, f"{batch}")
        return rows, losses if due else None

    def _kept(self, batch: int) -> dict[str, tuple[int, str]]:
        """Per queue, how many rows of a batch are in the archive, and the id of the first."""
        rows = (
            self.entries()
            .where(F.col("batch") == f"{batch:010d}")
            .groupBy("queue")
            .agg(F.count("*"), F.min_by("entry_id", entry_order("entry_id")))
            .collect()
        )
        return {queue: (count, first) for queue, count, first in rows}


def _offset(log: Folder, batch: int) -> dict[str, Any]:
    """The end offset of a batch, from Spark's log; empty if the log does not have the batch."""
    if not log.exists(f"offsets/{batch}"):
        return {}
    found: dict[str, Any] = json.loads(log.text(f"offsets/{batch}").splitlines()[-1])
    return found


def entry_order(entry_id: "Column | str") -> "Column":
    """A column of stream ids in a form that compares as Redis compares ids."""
    return F.struct(*(F.split(entry_id, "-")[i].cast("decimal(20)") for i in (0, 1)))
