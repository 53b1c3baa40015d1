"""Events kept for good, once each: Parquet by queue, day and batch, or tables of another format.
So is the history, where workers write it: what finished jobs carried.

A batch that Spark replays has the same number. In Parquet it has a folder of its own, and writing
it again replaces it; elsewhere the batch is a transaction, which is made once. A batch that was
written whole is not written again at all: some of its events may be trimmed since.
"""

import json
import os
import re
import uuid
from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql import functions as F

from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.managing.retention import MAX_READER_BYTES
from chasqui.spark import losses as loss
from chasqui.spark.connections import check_history
from chasqui.spark.archiving.losses import Loss
from chasqui.spark.options import LOGS, Options
from chasqui.spark.schemas import COLUMNS, PAYLOADS
from chasqui.spark.sessions import refuse_connect
from chasqui.spark.archiving.folders import Store
from chasqui.spark.archiving.tables import Txn, split_place, tables_of
from chasqui.spark.api import follow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: The number of the last batch written. It lies in the checkpoint: a new one starts at zero.
_WRITTEN: Final = "written"

#: Is told of each batch that was written: its rows, and what was lost of it; None if the server
#: does not count what it adds.
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
    """Start to archive events of a queue (or several, with commas); or what finished jobs carried,
    with `table="history"`.

    `to` is a folder, of Parquet; or `delta:folder`, or `iceberg:catalog.namespace`. Ends when all
    that is there now is archived, unless `follow_on`. `checkpoint` is where Spark keeps how far it
    is: inside the folder, unless given, as it must be for Iceberg. `on_batch(rows, losses)` is
    called when a batch is written. Events that it has not read are not trimmed while it lives
    (`readerHold`, `readerLease`), under the name of its place unless `reader` gives another;
    `reader=None` does without.
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
    """The name by which an archive reads events: its folder, wherever it is started from."""
    kind, place = split_place(to)
    place = re.sub(r"^(\w+://)[^/]*@", r"\1", place)  # without who may read it, and a password
    if kind != "iceberg" and "://" not in place:
        place = os.path.abspath(place)
    name = f"archive {place}"
    return name if len(name.encode()) <= MAX_READER_BYTES else f"archive …{name[-60:]}"


def read_archive(spark: "SparkSession", to: str, *, table: str = "events") -> "DataFrame":
    """The archived events, or with `table="history"` the finished jobs."""
    return Archive(spark, to, table=table).entries().drop("batch")


def read_losses(spark: "SparkSession", to: str, *, table: str = "events") -> "DataFrame":
    """What the archive lacks of a table, since it was trimmed before it was read.

    Per queue and batch: `lost` entries behind `after_id` and not behind `before_id`. `lost` is null
    where the stream was deleted, so that nobody knows; `after_id` is null where the archive begins.
    """
    refuse_connect(spark, "read_losses")
    return Archive(spark, to, table=table).losses()


class Archive:
    """Where entries of a log are kept, what it lacks of them, and the checkpoint of the query that
    fills it. The history's are beside those of the events."""

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
        self.kind, self.root = split_place(to)
        self._tables = tables_of(spark, self.kind, self.root)
        self._checkpoint = checkpoint

    @property
    def checkpoint(self) -> str:
        if self._checkpoint is None and self.kind == "iceberg":
            raise ValueError("an archive in Iceberg needs a checkpoint: the folder that it goes to")
        return (self._checkpoint or f"{self.root}/_checkpoint") + self._more

    def place(self, table: str) -> str:
        return f"{self.root}.{table}" if self.kind == "iceberg" else f"{self.root}/{table}"

    def check_begin(self, queues: Sequence[str]) -> None:
        """Raise if the checkpoint is new and entries of these queues are here: its first batches
        would take the place of those that have their numbers, or come a second time."""
        if Store(self._spark, self.checkpoint).exists("metadata") or not self:
            return
        found = self.entries().where(F.col("queue").isin(*queues)).select("queue").first()
        if found is not None:
            raise ChasquiError(
                f"{self.place(self.table)} has {self.table} of queue {found[0]!r}, and the "
                f"checkpoint {self.checkpoint} does not know of them: give the checkpoint that "
                "they were archived with, or archive to another place"
            )

    def __bool__(self) -> bool:
        """Whether anything was archived."""
        return self._tables.has(self.place(self.table))

    @property
    def work(self) -> str:
        """Where days are compacted."""
        return f"_compacting{self._more}"

    def entries(self) -> "DataFrame":
        place = self.place(self.table)
        columns = {**COLUMNS[self.table], "date": "date", "batch": "string"}
        shaped = PAYLOADS.get(self.table)
        if shaped is not None and self.kind == "parquet":  # as it was written
            written = self._tables.read(place).schema[shaped]
            columns[shaped] = written.dataType.simpleString()
        schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
        return self._tables.read(place, schema)

    def losses(self) -> "DataFrame":
        place = self.place(f"losses{self._more}")
        if not self._tables.has(place):
            return self._spark.createDataFrame([], loss.SCHEMA)
        return self._tables.read(place, loss.SCHEMA)

    def write(self, df: "DataFrame", batch: int) -> tuple[int, list[Loss] | None]:
        """Write one batch, unless it is written already: see OnBatch for what it returns."""
        log = Store(self._spark, self.checkpoint)
        if f"{batch}" in log.names(_WRITTEN):
            return 0, []
        txn = Txn(json.loads(log.text("metadata"))["id"], batch)
        dated = df.withColumn("date", F.to_date("ts")).withColumn("batch", F.lit(f"{batch:010d}"))
        rows = self._tables.append(self.place(self.table), dated, txn)
        start, end = _offset(log, batch - 1), _offset(log, batch)
        due = loss.due(start, end)
        if rows is None or (due and sum(count or 0 for count in due.values()) != rows):
            kept = self._kept(batch)
            rows = sum(count for count, _ in kept.values())
            losses = loss.losses_of(start, end, kept, batch)
        else:
            losses = []
        if losses:
            told = self._spark.createDataFrame([one.row() for one in losses], loss.SCHEMA)
            place = self.place(f"losses{self._more}")
            self._tables.append(place, told.coalesce(1), txn)
        log.note(_WRITTEN, f"{batch}")
        return rows, losses if due else None

    def _kept(self, batch: int) -> dict[str, tuple[int, str]]:
        """Per queue, how many rows of a batch are in the archive, and the id of the first."""
        ms, sequence = (F.split("entry_id", "-")[i].cast("decimal(20)") for i in (0, 1))
        rows = (
            self.entries()
            .where(F.col("batch") == f"{batch:010d}")
            .groupBy("queue")
            .agg(F.count("*"), F.min_by("entry_id", F.struct(ms, sequence)))
            .collect()
        )
        return {queue: (count, first) for queue, count, first in rows}


def _offset(log: Store, batch: int) -> dict[str, Any]:
    """Where a batch ends, by the log that Spark keeps; of one that is not in it, nothing."""
    if not log.exists(f"offsets/{batch}"):
        return {}
    found: dict[str, Any] = json.loads(log.text(f"offsets/{batch}").splitlines()[-1])
    return found


def compact(
    spark: "SparkSession", to: str, *, before: str | None = None, table: str | None = None
) -> int:
    """Rewrite the days before a date (default today) as one file each; how many days were.

    Can be interrupted anywhere and run again: a day is written aside first, then takes the place
    of its batches. Readers may miss a day for the moment in which it moves. Days of the
    history, if it is archived there, are rewritten as well, unless a table is named.
    """
    refuse_connect(spark, "compact")
    if table is None:
        done = compact(spark, to, before=before, table="events")
        history = Archive(spark, to, table="history")
        return done + (compact(spark, to, before=before, table="history") if history else 0)
    there = Archive(spark, to, table=table)
    if there.kind != "parquet":
        raise NotSupportedError(
            "only an archive in Parquet is compacted here; Delta Lake and Iceberg do that "
            "themselves, by OPTIMIZE and rewrite_data_files"
        )
    there.entries()  # raises if there is no archive
    store = Store(spark, there.root)
    _finish(store, there)  # what an earlier run was interrupted in
    limit = spark.sql("SELECT current_date()").first()[0].isoformat()
    if before is not None:
        limit = date.fromisoformat(before).isoformat()
    days = {
        f"{queue}/{day}": store.names(f"{table}/{queue}/{day}")
        for queue in store.names(table)
        if queue.startswith("queue=")
        for day in store.names(f"{table}/{queue}")
    }
    batches = {name for names in days.values() for name in names}
    # Spark may yet replay its last batch, and would find its folder gone: so that day waits.
    last = max((name for name in batches if not name.startswith("batch=c")), default="")
    done = 0
    for place, names in days.items():
        if len(names) > 1 and last not in names and place.rpartition("date=")[2] < limit:
            day, batch = f"{there.root}/{table}/{place}", f"batch=c{uuid.uuid4().hex}"
            reader = spark.read.option("basePath", day)
            rows = reader.parquet(*(f"{day}/{name}" for name in names)).drop("batch")
            # An archive may add to the day meanwhile: only what is read here may go.
            store.write(f"{there.work}/{place}/{batch}.of", "\n".join(names))
            aside = f"{there.root}/{there.work}/{place}/{batch}"
            rows.coalesce(1).write.mode("overwrite").parquet(aside)
            _finish(store, there)
            done += 1
    return done


def _finish(store: Store, there: Archive) -> None:
    """Put days that were rewritten whole in place of their batches; forget the others."""
    work, kept = there.work, there.table
    for queue in store.names(work):
        for day in store.names(f"{work}/{queue}"):
            place = f"{queue}/{day}"
            for batch in store.names(f"{work}/{place}"):
                if store.exists(f"{work}/{place}/{batch}/_SUCCESS"):
                    for name in store.text(f"{work}/{place}/{batch}.of").splitlines():
                        store.delete(f"{kept}/{place}/{name}")
                    store.move(f"{work}/{place}/{batch}", f"{kept}/{place}/{batch}")
    store.delete(work)
