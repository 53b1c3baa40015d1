"""Tables of an archive or an export: Parquet folders, Delta Lake, Iceberg.

If the session has Delta Lake or Iceberg, it writes and reads their tables. Else the driver keeps
their logs with deltalake or pyiceberg, which need no jars, and Spark reads the Parquet files that
the log names.
"""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pyspark.sql import Observation
from pyspark.sql import functions as F

from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.spark.archiving.folders import Folder
from chasqui.spark.schemas import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS: Final = ("parquet", "delta", "iceberg")
#: Spark's default here is INT96, which other readers do not take for a time.
_TIMES: Final = "spark.sql.parquet.outputTimestampType"


class Txn(NamedTuple):
    """Names an append, so that it is done once."""

    app: str
    version: int


class Tables(Protocol):
    """Reads and writes tables of one format. A location is a path, or the name of a table."""

    def has(self, location: str) -> bool: ...

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        """A table; `schema` is for the format that does not store one."""

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        """Add rows, unless this append is done; how many, or None if that is not known."""

    def create(self, location: str, df: "DataFrame") -> None:
        """Make a table of the rows; there must be none."""


def split_location(text: str) -> tuple[str, str]:
    """The format and the location in `delta:lake`; a path alone is Parquet."""
    kind, separator, location = text.partition(":")
    return (kind, location) if separator and kind in KINDS else ("parquet", text)


def tables_of(spark: "SparkSession", kind: str, location: str) -> Tables:
    """Tables of a format, by the session or the driver; raises if neither can."""
    if kind == "parquet":
        return ParquetTables(spark)
    if kind == "delta":
        if "io.delta" in spark.conf.get("spark.sql.extensions", ""):
            return SessionDelta(spark)
        _need(
            "deltalake",
            "delta:",
            "io.delta:delta-spark_2.13",
            "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
            "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog",
        )
        return DriverDelta(spark)
    catalog, _, name = location.partition(".")
    if not catalog or not name:
        raise ValueError(f"iceberg: takes catalog.namespace.table, got {location!r}")
    setting = f"spark.sql.catalog.{catalog}"
    if spark.conf.get(setting, None) is not None:
        return SessionIceberg(spark)
    _need(
        "pyiceberg",
        "iceberg:",
        "org.apache.iceberg:iceberg-spark-runtime",
        f"{setting}=org.apache.iceberg.spark.SparkCatalog and what belongs to that catalog",
    )
    return DriverIceberg(spark)


def _need(package: str, kind: str, jar: str, conf: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotSupportedError(
            f"{kind} needs pip install 'chasqui[{kind[:-1]}]', or a session that has it: --conf "
            f"spark.jars.packages={jar} in the version for your Spark, and --conf {conf}"
        )


class _OfSession:
    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark


class ParquetTables(_OfSession):
    """Parquet. An append has folders of its own, and replaces what is in them."""

    def has(self, location: str) -> bool:
        return Folder(self._spark, location).exists(".")

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        # Without a schema, Spark turns folder names into numbers if it can: queue `007` into 7.
        reader = self._spark.read if schema is None else self._spark.read.schema(schema)
        return reader.parquet(location)

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        seen = Observation()
        (
            df.observe(seen, F.count("*").alias("rows"))
            .write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*(name for name in ("queue", "date", "batch") if name in df.columns))
            .parquet(location)
        )
        rows: int = seen.get["rows"]
        return rows

    def create(self, location: str, df: "DataFrame") -> None:
        df.write.mode("error").parquet(location)


class SessionDelta(_OfSession):
    """Delta Lake by the session's jars, which skip a transaction that the table has."""

    def has(self, location: str) -> bool:
        return Folder(self._spark, location).exists("_delta_log")

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        return self._spark.read.format("delta").load(location)

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        named = {"txnAppId": txn.app, "txnVersion": txn.version}
        df.write.format("delta").mode("append").options(**named).save(location)
        return None

    def create(self, location: str, df: "DataFrame") -> None:
        df.write.format("delta").mode("error").save(location)


class DriverDelta(_OfSession):
    """Delta Lake by deltalake: the rows of an append pass through the driver."""

    def has(self, location: str) -> bool:
        from deltalake import DeltaTable

        return bool(DeltaTable.is_deltatable(location))

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        from deltalake import DeltaTable
        from pyspark.sql.types import StructType

        if not self.has(location):
            raise ChasquiError(f"there is no Delta table at {location}")
        table = DeltaTable(location)
        protocol = table.protocol()
        features = {"deletionVectors", "columnMapping"}.intersection(protocol.reader_features or ())
        if features or protocol.min_reader_version == 2:
            raise NotSupportedError(
                f"the Delta table at {location} has deleted rows or renamed columns in its log: "
                "read it by a session that has io.delta:delta-spark_2.13"
            )
        schema = StructType.fromJson(json.loads(table.schema().to_json()))
        return _files(self._spark, schema, table.file_uris(), location)

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

        if self.has(location):
            done = DeltaTable(location).transaction_version(txn.app)
            if done is not None and done >= txn.version:
                return None
        rows = _collected(df)
        made = CommitProperties(app_transactions=[Transaction(txn.app, txn.version)])
        write_deltalake(location, rows, mode="append", commit_properties=made)
        return int(rows.num_rows)

    def create(self, location: str, df: "DataFrame") -> None:
        from deltalake import convert_to_deltalake

        with _setting(self._spark, _TIMES, "TIMESTAMP_MICROS"):
            df.write.mode("error").parquet(location)
        convert_to_deltalake(location)


class SessionIceberg(_OfSession):
    """Iceberg by the session's jars. The transaction is a property of the snapshot."""

    def has(self, location: str) -> bool:
        return bool(self._spark.catalog.tableExists(_quoted(location)))

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        return self._spark.table(_quoted(location))

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        key, table = f"chasqui.txn.{txn.app}", _quoted(location)
        writer = df.writeTo(table).option(f"snapshot-property.{key}", str(txn.version))
        if not self.has(location):
            writer.create()
            return None
        query = f"SELECT max(CAST(summary['{key}'] AS BIGINT)) FROM {table}.snapshots"
        done = self._spark.sql(query).first()[0]
        if done is None or done < txn.version:
            writer.append()
        return None

    def create(self, location: str, df: "DataFrame") -> None:
        df.writeTo(_quoted(location)).create()


class DriverIceberg(_OfSession):
    """Iceberg by pyiceberg and its catalogs. The rows of an append pass through the driver; the
    transaction is a property of the table."""

    def _find(self, location: str) -> tuple[Any, str]:
        from pyiceberg.catalog import load_catalog

        catalog, _, name = location.partition(".")
        return load_catalog(catalog), name

    def has(self, location: str) -> bool:
        catalog, name = self._find(location)
        return bool(catalog.table_exists(name))

    def read(self, location: str, schema: str | None = None) -> "DataFrame":
        from pyspark.sql.pandas.types import from_arrow_schema

        if not self.has(location):
            raise ChasquiError(f"there is no Iceberg table {location}")
        catalog, name = self._find(location)
        table = catalog.load_table(name)
        tasks = list(table.scan().plan_files())
        names = {
            (one.field_id, one.name) for schema in table.schemas().values() for one in schema.fields
        }
        if any(task.delete_files for task in tasks) or len(dict(names)) < len(names):
            raise NotSupportedError(
                f"the Iceberg table {location} has deleted rows or renamed columns: read it by a "
                "session that has org.apache.iceberg:iceberg-spark-runtime"
            )
        schema = from_arrow_schema(table.schema().as_arrow())
        return _files(self._spark, schema, [task.file.file_path for task in tasks])

    def append(self, location: str, df: "DataFrame", txn: Txn) -> int | None:
        catalog, name = self._find(location)
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        table = catalog.create_table_if_not_exists(name, schema=arrow_schema(df.schema))
        key = f"chasqui.txn.{txn.app}"
        if int(table.properties.get(key, -1)) >= txn.version:
            return None
        rows = _collected(df)
        with table.transaction() as change:
            change.append(rows)
            change.set_properties({key: str(txn.version)})
        return int(rows.num_rows)

    def create(self, location: str, df: "DataFrame") -> None:
        catalog, name = self._find(location)
        if catalog.table_exists(name):
            raise ChasquiError(f"there is an Iceberg table {location} already")
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        table = catalog.create_table(name, schema=arrow_schema(df.schema))
        try:
            data = f"{table.location()}/data"
            with _setting(self._spark, _TIMES, "TIMESTAMP_MICROS"):
                df.write.parquet(data)
            table.add_files(self._spark.read.parquet(data).inputFiles())
        except BaseException:
            catalog.drop_table(name)
            raise


def _collected(df: "DataFrame") -> Any:
    """The rows in the driver, with times in UTC in any session."""
    return df.toArrow().cast(arrow_schema(df.schema))


def _files(
    spark: "SparkSession", schema: Any, files: list[str], base: str | None = None
) -> "DataFrame":
    if not files:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema)
    if base is not None:  # names of folders below it hold columns
        reader = reader.option("basePath", base)
    return reader.parquet(*files)


def _quoted(location: str) -> str:
    return ".".join(f"`{part}`" for part in location.split("."))


@contextmanager
def _setting(spark: "SparkSession", name: str, value: Any) -> Iterator[None]:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)
