"""What one does to queues from a DataFrame: enqueue, fail, replay, look up results."""

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as F

from chasqui import dlq, scripts
from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import encode_delayed_member
from chasqui.blocking import BlockingConnection
from chasqui.consumer.decide import RETRIES_EXHAUSTED, Bury, Failure, Limits, RunAgain, on_failure
from chasqui.keys import DEFAULT_GROUP, DETAIL, ENVELOPE, ERROR, NAME, REASON, SOURCE_ID, Keys
from chasqui.plans import Plans
from chasqui.request import Effect, commands
from chasqui.spark.batch import fetch_results
from chasqui.spark.link import connected
from chasqui.spark.options import OptionError, Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Jobs that one script call moves.
CHUNK: Final = 250


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
    given = {name: _text(value) for name, value in options.items() if value is not None}
    if queue is not None:
        given["queue"] = queue
    if columns is not None:
        every = columns_of(Options.parse({"table": table, **given}, "rs"))
        if missing := [name for name in columns if name not in every]:
            raise OptionError(f"table {table} has no column {missing[0]!r}")
        reader = reader.schema(", ".join(f"`{name}` {every[name]}" for name in columns))
    return reader.options(**given).load()


def enqueue(df: "DataFrame", queue: str | None = None, **options: Any) -> None:
    """Add every row as a job, exactly once unless `delivery` says otherwise."""
    given = {name: _text(value) for name, value in options.items() if value is not None}
    if queue is not None:
        given["queue"] = queue
    df.write.format("chasqui").options(**given).mode("append").save()


def replay(
    df: "DataFrame",
    *,
    dry_run: bool = True,
    limit: int | None = None,
    per_second: int | None = None,
    **options: Any,
) -> int:
    """Move the dead jobs of a dlq table back into their queues; how many were, or would be.

    Nothing is moved unless `dry_run=False`. A job that somebody else replays meanwhile is moved
    once. `options` are those that name the server.
    """
    chosen = df.select("queue", "entry_id").dropna().distinct()
    if limit is not None:
        chosen = chosen.orderBy("queue", "entry_id").limit(limit)
    if dry_run:
        return int(chosen.count())
    checked = Options.parse(_given(options), "rs")
    moved = 0
    started_s = time.monotonic()
    for queue, ids in _chunks(chosen.orderBy("queue").toLocalIterator()):
        with connected(checked, queue) as connection:
            plans, selection = Plans(Keys(queue)), dlq.Selection(ids=ids)
            moved += connection.run(dlq.replay(plans, len(ids), selection))
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


def fail_jobs(
    df: "DataFrame",
    reason: str,
    *,
    is_final: bool = False,
    max_attempts: int = 25,
    group: str = DEFAULT_GROUP,
    **options: Any,
) -> dict[str, int]:
    """Fail jobs of a consuming query, as a handler that raised: back for a retry, or to the DLQ.

    Call it in foreachBatch with the bad rows (queue, entry_id, consumer); what it moved is no
    longer acknowledged with the batch. Returns how many were `retried`, `buried`, and `lost` to
    somebody else before. `is_final` buries them at once.
    """
    checked = Options.parse(_given(options), "rs")

    def move(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            counts = {"retried": 0, "buried": 0, "lost": 0}
            groups: dict[tuple[str, str], list[str]] = {}
            for row in batch.to_pylist():
                groups.setdefault((row["queue"], row["consumer"]), []).append(row["entry_id"])
            for (queue, consumer), ids in groups.items():
                with connected(checked, queue) as connection:
                    mover = _Mover(connection, Keys(queue), group, consumer, reason)
                    mover.run(ids, Limits(max_attempts), is_final, counts)
            yield pa.RecordBatch.from_pylist([counts])

    moved = df.select("queue", "entry_id", "consumer").mapInArrow(
        move, "retried long, buried long, lost long"
    )
    row = moved.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in moved.columns))
    return {name: int(count) for name, count in row.first().asDict().items()}


class _Mover:
    """Moves entries that one consumer holds out of the stream."""

    def __init__(
        self, connection: BlockingConnection, keys: Keys, group: str, consumer: str, reason: str
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._owner = (group, consumer)
        self._reason = reason

    def run(self, ids: list[str], limits: Limits, is_final: bool, counts: dict[str, int]) -> None:
        failure = Failure(is_final=is_final, detail=self._reason)
        for start in range(0, len(ids), CHUNK):
            retries: list[Any] = []
            burials: list[Any] = []
            entries = self._fetch(ids[start : start + CHUNK])
            counts["lost"] += min(CHUNK, len(ids) - start) - len(entries)
            for entry in entries:
                if entry.fault is not None:
                    burials += self._burial(entry, entry.fault)
                    continue
                verdict = on_failure(entry, failure, limits, random.random())
                if isinstance(verdict, RunAgain):
                    envelope = entry.with_attempt(verdict.attempt)
                    member = encode_delayed_member(entry.name, envelope)
                    retries += (entry.id, verdict.delay_ms, member, "")
                elif isinstance(verdict, Bury):
                    burials += self._burial(entry, verdict.reason)
            keys = self._keys
            names = [keys.stream, keys.delayed, keys.wake]
            self._move(scripts.RETRY, names, [*self._owner, *retries], retries, "retried", counts)
            arguments = [*self._owner, "", *burials]
            self._move(scripts.BURY, [keys.stream, keys.dlq], arguments, burials, "buried", counts)

    def _fetch(self, ids: list[str]) -> list[Entry]:
        replies = self._connection.call(
            commands(
                *(("XRANGE", self._keys.stream, one, one) for one in ids),
                effect=Effect.READ,
                builder=EntryBuilder("range", 1 << 40),
            )
        )
        found = replies if len(ids) > 1 else [replies]
        return [entry for entries in found for entry in entries]

    def _burial(self, entry: Entry, reason: str) -> list[Any]:
        fields: list[Any] = [ENVELOPE, entry.envelope or b""]
        if entry.name:
            fields += (NAME, entry.name)
        fields += (SOURCE_ID, entry.id, REASON, reason)
        if reason != RETRIES_EXHAUSTED:
            fields += (DETAIL, self._reason)
        fields += (ERROR, self._reason)
        return [entry.id, len(fields), *fields]

    def _move(
        self,
        script: Any,
        names: list[bytes],
        arguments: list[Any],
        moves: list[Any],
        done: str,
        counts: dict[str, int],
    ) -> None:
        if not moves:
            return
        flags = self._connection.call(scripts.call(script, names, arguments, Effect.IDEMPOTENT))
        counts[done] += flags.count(b"1")
        counts["lost"] += flags.count(b"0")


def with_results(df: "DataFrame", queue: str | None = None, **options: Any) -> "DataFrame":
    """The rows with what their jobs returned, as JSON text in the column `result`.

    Asks for the results of these jobs only; without `queue` each row names its own.
    """
    import json

    from pyspark.sql.types import StringType, StructField, StructType

    from chasqui.payload import decode
    from chasqui.spark.schemas import arrow_schema

    checked = Options.parse(_given(options), "rs")
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
                    for start in range(0, len(wanted), 500):
                        part = wanted[start : start + 500]
                        for job_id, value, _ in fetch_results(connection, Keys(one), part):
                            text = json.dumps(decode(value), ensure_ascii=False, default=str)
                            found[one, job_id.decode()] = text
            values = [found.get((n, i)) for n, i in zip(queues, ids, strict=True)]
            yield pa.RecordBatch.from_arrays(
                [*(c.cast(f.type) for c, f in zip(batch.columns, arrow, strict=False)),
                 pa.array(values, pa.string())],
                schema=arrow,
            )  # fmt: skip

    return df.mapInArrow(look_up, schema)


def _given(options: dict[str, Any]) -> dict[str, str]:
    """Options that name a server, for functions that take their queues from rows."""
    given = {name: _text(value) for name, value in options.items() if value is not None}
    return {"queue": "any", **given}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
