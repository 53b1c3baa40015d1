"""Rewrites the finished days of an archive in Parquet as one file each."""

import uuid
from datetime import date
from typing import TYPE_CHECKING

from chasqui.errors import NotSupportedError
from chasqui.spark.archiving.archive import Archive
from chasqui.spark.archiving.folders import Folder
from chasqui.spark.sessions import refuse_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact(
    spark: "SparkSession", to: str, *, before: str | None = None, table: str | None = None
) -> int:
    """Rewrite the days before a date (default today) as one file each; how many days were.

    You may interrupt it anywhere and run it again: a day is first written to a folder of its own,
    and then replaces its batches. Readers may miss a day for the moment in which it moves. Without
    `table`, the days of the history are rewritten too, if it is archived there.
    """
    refuse_connect(spark, "compact")
    if table is None:
        done = compact(spark, to, before=before, table="events")
        history = Archive(spark, to, table="history")
        return done + (compact(spark, to, before=before, table="history") if history else 0)
    archive = Archive(spark, to, table=table)
    if archive.kind != "parquet":
        raise NotSupportedError(
            "only an archive in Parquet is compacted here; Delta Lake and Iceberg do that "
            "themselves, by OPTIMIZE and rewrite_data_files"
        )
    archive.entries()  # raises if there is no archive
    folder = Folder(spark, archive.root)
    _finish(folder, archive)  # an earlier run may have been interrupted
    limit = spark.sql("SELECT current_date()").first()[0].isoformat()
    if before is not None:
        limit = date.fromisoformat(before).isoformat()
    days = {
        f"{queue}/{day}": folder.names(f"{table}/{queue}/{day}")
        for queue in folder.names(table)
        if queue.startswith("queue=")
        for day in folder.names(f"{table}/{queue}")
    }
    batches = {name for names in days.values() for name in names}
    # Spark may still replay its last batch and needs its folder, so that day waits.
    last = max((name for name in batches if not name.startswith("batch=c")), default="")
    done = 0
    for path, names in days.items():
        if len(names) > 1 and last not in names and path.rpartition("date=")[2] < limit:
            day, batch = f"{archive.root}/{table}/{path}", f"batch=c{uuid.uuid4().hex}"
            reader = spark.read.option("basePath", day)
            rows = reader.parquet(*(f"{day}/{name}" for name in names)).drop("batch")
            # An archive may add to the day meanwhile: delete only the batches that are read here.
            folder.write(f"{archive.work}/{path}/{batch}.of", "\n".join(names))
            aside = f"{archive.root}/{archive.work}/{path}/{batch}"
            rows.coalesce(1).write.mode("overwrite").parquet(aside)
            _finish(folder, archive)
            done += 1
    return done


def _finish(folder: Folder, archive: Archive) -> None:
    """Replace the batches of days that are completely rewritten; drop the other rewrites."""
    work, kept = archive.work, archive.table
    for queue in folder.names(work):
        for day in folder.names(f"{work}/{queue}"):
            path = f"{queue}/{day}"
            for batch in folder.names(f"{work}/{path}"):
                if folder.exists(f"{work}/{path}/{batch}/_SUCCESS"):
                    for name in folder.text(f"{work}/{path}/{batch}.of").splitlines():
                        folder.delete(f"{kept}/{path}/{name}")
                    folder.move(f"{work}/{path}/{batch}", f"{kept}/{path}/{batch}")
    folder.delete(work)
