"""What you do with queues and DataFrames: read, follow, enqueue, replay, look up results."""

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from chasqui.errors import ChasquiError
from chasqui.managing import dlq
from chasqui.managing.dead_jobs import Selection
from chasqui.model.keys import Keys
from chasqui.producing.operations import QueueOperations
from chasqui.spark.connections import CHUNK, connected
from chasqui.spark.options import OptionError, Options, as_text
from chasqui.spark.reading.batch import fetch_results

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from chasqui.spark.writing.tasks import Written
    from chasqui.spark.writing.transaction import Step
    from chasqui.spark.writing.writers import BatchWriter, Enqueued


def read(
    spark: "SparkSession", table: str, queue: str | None = None, **options: Any
) -> "DataFrame":
    """A table as a DataFrame. `columns=[…]` reads only those."""
    reader = spark.read.format("chasqui").option("table", table)
    return _loaded(reader, table, queue, options)


def follow(spark: "SparkSession", table: str, queue: str, **options: Any) -> "DataFrame":
    """A table as a stream."""
    reader = spark.readStream.format("chasqui").option("table", table)
    return _loaded(reader, table, queue, options)


def _loaded(reader: Any, table: str, queue: str | None, options: dict[str, Any]) -> "DataFrame":
    from chasqui.spark.schemas import columns_of

    columns = options.pop("columns", None)
    given = as_text({**options, "queue": queue})
    if columns is not None:
        every = columns_of(Options.parse({"table": table, **given}, "rs"))
        if missing := [name for name in columns if name not in every]:
            raise OptionError(f"table {table} has no column {missing[0]!r}")
        reader = reader.schema(", ".join(f"`{name}` {every[name]}" for name in columns))
    return reader.options(**given).load()


def enqueue(
    df: "DataFrame",
    queue: str | None = None,
    *,
    on_progress: "Callable[[Step], None] | None" = None,
    **options: Any,
) -> "Enqueued":
    """Add every row as a job, exactly once unless `delivery` says otherwise; what this call did.

    With `txnAppId`, a write that is done is not read again, and one that an earlier run left half
    done is finished. Tasks in Spark stage the rows; this process publishes them, and calls
    `on_progress` with how many are published.
    """
    from chasqui.spark.writing.writers import BatchWriter, finish_earlier

    given = as_text({**options, "queue": queue})
    checked = Options.parse(given, "w")
    writer = BatchWriter(checked, df.schema)
    if (done := finish_earlier(checked, on_progress)) is not None:
        return done
    try:
        messages = _written(df, writer)
    except BaseException:
        with contextlib.suppress(ChasquiError, OSError):  # the first error is the one to raise
            writer.abandon()
        raise
    try:
        return writer.commit(messages, on_progress)
    except BaseException:
        with contextlib.suppress(ChasquiError, OSError):
            writer.abort(messages)
        raise


def _written(df: "DataFrame", writer: "BatchWriter") -> list["Written"]:
    """What each task of a write did."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        message = pickle.dumps(writer.write(batches))
        yield pa.RecordBatch.from_pydict({"message": [message]})

    rows = df.mapInArrow(write, "message binary").collect()
    return [pickle.loads(row["message"]) for row in rows]


def replay(
    df: "DataFrame",
    *,
    dry_run: bool = True,
    limit: int | None = None,
    per_second: int | None = None,
    **options: Any,
) -> int:
    """Move the dead jobs of a dlq table back into their queues; how many were, or would be.

    Nothing is moved unless `dry_run=False`. A job that another call replays at the same time is
    moved once. `options` are those that name the server.
    """
    chosen = df.select("queue", "entry_id").dropna().distinct()
    if limit is not None:
        chosen = chosen.orderBy("queue", "entry_id").limit(limit)
    if dry_run:
        return int(chosen.count())
    checked = Options.of_server(options)
    moved = 0
    started_s = time.monotonic()
    for queue, ids in _chunks(chosen.orderBy("queue").toLocalIterator()):
        with connected(checked, queue) as connection:
            operations, selection = QueueOperations(Keys(queue)), Selection(ids=ids)
            moved += connection.run(dlq.replay(operations, len(ids), selection))
        if per_second is not None:
            due_s = started_s + moved / per_second
            time.sleep(max(0.0, due_s - time.monotonic()))
    return moved


def _chunks(rows: Iterator[Any]) -> Iterator[tuple[str, list[str]]]:
    queue, ids = None, list[str]()
    for row in rows:
        if ids and (row["queue"] != queue or len(ids) == CHUNK):
            assert queue is not None
            yield queue, ids
            ids = []
        queue = row["queue"]
        ids.append(row["entry_id"])
    if ids and queue is not None:
        yield queue, ids


def with_results(df: "DataFrame", queue: str | None = None, **options: Any) -> "DataFrame":
    """The rows with the results of their jobs, as JSON text in the column `result`.

    Reads the results of these jobs only. Without `queue`, the column `queue` names each job's.
    """
    import json

    from pyspark.sql.types import StringType, StructField, StructType

    from chasqui.model.payload import decode
    from chasqui.spark.schemas import arrow_schema

    checked = Options.of_server(options)
    schema = StructType([*df.schema.fields, StructField("result", StringType())])
    arrow = arrow_schema(schema)

    def look_up(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            ids = batch.column("job_id").to_pylist()
            queues = [queue] * len(ids) if queue else batch.column("queue").to_pylist()
            found: dict[tuple[str, str], str] = {}
            for one in sorted({name for name in queues if name}):
                wanted = [
                    job_id.encode()
                    for job_id, name in zip(ids, queues, strict=True)
                    if job_id and name == one
                ]
                with connected(checked, one) as connection:
                    for page in fetch_results(connection, Keys(one), wanted):
                        for job_id, value, _ in page:
                            text = json.dumps(decode(value), ensure_ascii=False, default=str)
                            found[one, job_id.decode()] = text
            values = [found.get((n, i)) for n, i in zip(queues, ids, strict=True)]
            yield pa.RecordBatch.from_arrays(
                [*(c.cast(f.type) for c, f in zip(batch.columns, arrow, strict=False)),
                 pa.array(values, pa.string())],
                schema=arrow,
            )  # fmt: skip

    return df.mapInArrow(look_up, schema)
