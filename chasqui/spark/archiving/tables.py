"""Tables of an archive or an export: Parquet folders, Delta Lake, Iceberg.

Delta Lake and Iceberg are written and read by the session, if it has them. Else the driver keeps
their logs by deltalake or pyiceberg, which need no jars, and Spark reads the Parquet files that the
log names.
"""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pyspark.sql import Observation
from pyspark.sql import functions as F

from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.spark.schemas import arrow_schema
from chasqui.spark.archiving.folders import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS: Final = ("parquet", "delta", "iceberg")
#: Where Spark itself begins with INT96, which the others do not take for a time.
_TIMES: Final = "spark.sql.parquet.outputTimestampType"


class Txn(NamedTuple):
    """Names an append, so that it is made once."""

    app: str
    version: int


class Tables(Protocol):
    """How tables of one format are read and written. A place is a path, or the name of a table."""

    def has(self, place: str) -> bool: ...

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        """A table; `schema` is for the format that does not keep it."""

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        """Add rows, unless they are there; how many, or None if that is not known."""

    def create(self, place: str, df: "DataFrame") -> None:
        """Make a table of the rows; there must be none."""


def split_place(text: str) -> tuple[str, str]:
    """The format and the place in `delta:lake`; a mere path is Parquet."""
    kind, separator, place = text.partition(":")
    return (kind, place) if separator and kind in KINDS else ("parquet", text)


def tables_of(spark: "SparkSession", kind: str, place: str) -> Tables:
    """Tables of a format, by the session or without it; raises if neither can."""
    if kind == "parquet":
        return Folders(spark)
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
    catalog, _, name = place.partition(".")
    if not catalog or not name:
        raise ValueError(f"iceberg: takes catalog.namespace.table, got {place!r}")
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


class Folders:
    """Parquet. An append has folders of its own, and takes the place of what is in them."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def has(self, place: str) -> bool:
        return Store(self._spark, place).exists(".")

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        # Without one, Spark takes the name of a folder for a number if it can: queue `007` for 7.
        reader = self._spark.read if schema is None else self._spark.read.schema(schema)
        return reader.parquet(place)

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        seen = Observation()
        (
            df.observe(seen, F.count("*").alias("rows"))
            .write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*(name for name in ("queue", "date", "batch") if name in df.columns))
            .parquet(place)
        )
        rows: int = seen.get["rows"]
        return rows

    def create(self, place: str, df: "DataFrame") -> None:
        df.write.mode("error").parquet(place)


class SessionDelta:
    """Delta Lake by the session's jars, which know a transaction that they have."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def has(self, place: str) -> bool:
        return Store(self._spark, place).exists("_delta_log")

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        return self._spark.read.format("delta").load(place)

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        named = {"txnAppId": txn.app, "txnVersion": txn.version}
        df.write.format("delta").mode("append").options(**named).save(place)
        return None

    def create(self, place: str, df: "DataFrame") -> None:
        df.write.format("delta").mode("error").save(place)


class DriverDelta:
    """Delta Lake by deltalake: rows of an append come through the driver."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def has(self, place: str) -> bool:
        from deltalake import DeltaTable

        return bool(DeltaTable.is_deltatable(place))

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        from deltalake import DeltaTable
        from pyspark.sql.types import StructType

        if not self.has(place):
            raise ChasquiError(f"there is no Delta table at {place}")
        table = DeltaTable(place)
        protocol = table.protocol()
        features = {"deletionVectors", "columnMapping"}.intersection(protocol.reader_features or ())
        if features or protocol.min_reader_version == 2:
            raise NotSupportedError(
                f"the Delta table at {place} has deleted rows or renamed columns in its log: read "
                "it by a session that has io.delta:delta-spark_2.13"
            )
        schema = StructType.fromJson(json.loads(table.schema().to_json()))
        return _files(self._spark, schema, table.file_uris(), place)

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

        if self.has(place):
            done = DeltaTable(place).transaction_version(txn.app)
            if done is not None and done >= txn.version:
                return None
        rows = _collected(df)
        made = CommitProperties(app_transactions=[Transaction(txn.app, txn.version)])
        write_deltalake(place, rows, mode="append", commit_properties=made)
        return int(rows.num_rows)

    def create(self, place: str, df: "DataFrame") -> None:
        from deltalake import convert_to_deltalake

        with _setting(self._spark, _TIMES, "TIMESTAMP_MICROS"):
            df.write.mode("error").parquet(place)
        convert_to_deltalake(place)


class SessionIceberg:
    """Iceberg by the session's jars. A snapshot has the transaction among its properties."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def has(self, place: str) -> bool:
        return bool(self._spark.catalog.tableExists(_quoted(place)))

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        return self._spark.table(_quoted(place))

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        key, table = f"chasqui.txn.{txn.app}", _quoted(place)
        writer = df.writeTo(table).option(f"snapshot-property.{key}", str(txn.version))
        if not self.has(place):
            writer.create()
            return None
        query = f"SELECT max(CAST(summary['{key}'] AS BIGINT)) FROM {table}.snapshots"
        done = self._spark.sql(query).first()[0]
        if done is None or done < txn.version:
            writer.append()
        return None

    def create(self, place: str, df: "DataFrame") -> None:
        df.writeTo(_quoted(place)).create()


class DriverIceberg:
    """Iceberg by pyiceberg, with the catalogs that are set up for it: rows of an append come
    through the driver, and the table has the transaction among its properties."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def _find(self, place: str) -> tuple[Any, str]:
        from pyiceberg.catalog import load_catalog

        catalog, _, name = place.partition(".")
        return load_catalog(catalog), name

    def has(self, place: str) -> bool:
        catalog, name = self._find(place)
        return bool(catalog.table_exists(name))

    def read(self, place: str, schema: str | None = None) -> "DataFrame":
        from pyspark.sql.pandas.types import from_arrow_schema

        if not self.has(place):
            raise ChasquiError(f"there is no Iceberg table {place}")
        catalog, name = self._find(place)
        table = catalog.load_table(name)
        tasks = list(table.scan().plan_files())
        names = {
            (one.field_id, one.name) for schema in table.schemas().values() for one in schema.fields
        }
        if any(task.delete_files for task in tasks) or len(dict(names)) < len(names):
            raise NotSupportedError(
                f"the Iceberg table {place} has deleted rows or renamed columns: read it by a "
                "session that has org.apache.iceberg:iceberg-spark-runtime"
            )
        schema = from_arrow_schema(table.schema().as_arrow())
        return _files(self._spark, schema, [task.file.file_path for task in tasks])

    def append(self, place: str, df: "DataFrame", txn: Txn) -> int | None:
        catalog, name = self._find(place)
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

    def create(self, place: str, df: "DataFrame") -> None:
        catalog, name = self._find(place)
        if catalog.table_exists(name):
            raise ChasquiError(f"there is an Iceberg table {place} already")
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
    """The rows in the driver, with times in UTC, whatever the session's zone is."""
    return df.toArrow().cast(arrow_schema(df.schema))


def _files(
    spark: "SparkSession", schema: Any, files: list[str], base: str | None = None
) -> "DataFrame":
    if not files:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema)
    if base is not None:  # what is in the names of folders below it is a column
        reader = reader.option("basePath", base)
    return reader.parquet(*files)


def _quoted(place: str) -> str:
    return ".".join(f"`{part}`" for part in place.split("."))


@contextmanager
def _setting(spark: "SparkSession", name: str, value: Any) -> Iterator[None]:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)
