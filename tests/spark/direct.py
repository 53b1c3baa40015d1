"""Readers and writers driven directly, as Spark would drive them, without Spark."""

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.spark import schemas
from chasqui.spark.consuming.reader import ConsumeReader
from chasqui.spark.options import Options
from chasqui.spark.reading.batch import BatchReader
from chasqui.spark.reading.tail import TailReader
from chasqui.spark.writing.writers import BatchWriter
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect

_SIMPLE = {
    "string": types.StringType(),
    "timestamp": types.TimestampType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "double": types.DoubleType(),
    "map<string, string>": types.MapType(types.StringType(), types.StringType()),
}


def kind_of(text: str) -> types.DataType:
    """A type out of the DDL that our schemas use; Spark's own parser lives in the JVM."""
    if text in _SIMPLE:
        return _SIMPLE[text]
    inside = re.fullmatch(r"struct<(.*)>", text)
    assert inside, text
    fields = [re.split(r":? ", part, maxsplit=1) for part in inside[1].split(", ")]
    return types.StructType([types.StructField(name, kind_of(kind)) for name, kind in fields])


def schema_of(options: Options, *columns: str) -> types.StructType:
    every = schemas.columns_of(options)
    return types.StructType(
        [types.StructField(name, kind_of(every[name])) for name in columns or every]
    )


def struct(**columns: str) -> types.StructType:
    return types.StructType([types.StructField(n, kind_of(kind)) for n, kind in columns.items()])


def read(url: str, queue: str, *columns: str, **given: Any) -> list[dict[str, Any]]:
    """The rows of a batch read."""
    return [row for part in read_parts(url, queue, *columns, **given) for row in part]


def read_parts(url: str, queue: str, *columns: str, **given: Any) -> list[list[dict[str, Any]]]:
    """The same, task by task; the reader is pickled on its way, as by Spark."""
    options = Options.parse({"url": url, "queue": queue, **texts(given)}, "r")
    reader = BatchReader(options, schema_of(options, *columns))
    parts = reader.partitions()
    there = pickle.loads(pickle.dumps(reader))
    return [rows_of(there.read(pickle.loads(pickle.dumps(part)))) for part in parts]


def rows_of(batches: Iterator[Any]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def texts(given: dict[str, Any]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
    }


#: What a test has opened; closed after it.
OPENED: list[Callable[[], None]] = []


def tail_reader(url: str, queue: str, **given: Any) -> TailReader:
    given.setdefault("table", "events")
    options = Options.parse({"url": url, "queue": queue, **texts(given)}, "s")
    reader = TailReader(options, schema_of(options))
    OPENED.append(reader.stop)
    return reader


def consume_reader(url: str, queue: str, **given: Any) -> ConsumeReader:
    given = {"mode": "consume", "consumer": "etl", "consumerLease": "2s", **given}
    options = Options.parse({"url": url, "queue": queue, **texts(given)}, "s")
    reader = ConsumeReader(options, schema_of(options))
    OPENED.append(reader.stop)
    return reader


def step(
    reader: Any, start: dict[str, Any], most: int | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One micro-batch: its end, and its rows."""
    limit = ReadAllAvailable() if most is None else ReadMaxRows(most)
    end = reader.latestOffset(start, limit)
    return end, rows_between(reader, start, end)


def rows_between(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    if start == end:
        return []
    there = pickle.loads(pickle.dumps(reader))
    return [row for part in reader.partitions(start, end) for row in rows_of(there.read(part))]


def writer(url: str, schema: types.StructType, **given: Any) -> BatchWriter:
    options = Options.parse({"url": url, **texts(given)}, "w")
    return BatchWriter(options, schema)


def batches(columns: dict[str, list[Any]], schema: types.StructType, size: int = 1000) -> Any:
    """Rows as Spark hands them to a writer."""
    arrow = schemas.arrow_schema(schema)
    table = pa.Table.from_pydict(columns, schema=arrow)
    return iter(table.to_batches(max_chunksize=size))


class Redis:
    """A plain connection, to look at what is there."""

    def __init__(self, url: str, queue: str) -> None:
        self.keys = Keys(queue)
        self.connection = BlockingConnection(Endpoint.parse(url), key=self.keys.stream)
        OPENED.append(self.connection.close)

    def __call__(self, *words: Any) -> Any:
        return self.connection.execute(*words, effect=Effect.ONCE)

    def add_events(self, count: int, start: int = 0, **fields: str) -> None:
        for i in range(start, start + count):
            words = ["e", "completed", "id", f"job-{i}", "ts", str(1_794_797_194_000 + i)]
            words += ["n", "mail", "attempt", "1", "duration_us", str(i)]
            for name, value in fields.items():
                words += [name, value]
            self("XADD", self.keys.events, "*", *words)

    def jobs(self) -> list[dict[bytes, bytes]]:
        """The fields of every entry in the stream."""
        entries = self("XRANGE", self.keys.stream, "-", "+")
        return [dict(zip(f[::2], f[1::2], strict=True)) for _, f in entries]

    def spark_keys(self) -> list[bytes]:
        return sorted(self("KEYS", self.keys.spark("*")))
