"""Data sets that a command names as FORMAT:PATH, to enqueue or to export."""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Formats that chasqui.spark.archiving.tables reads and writes, and those that Spark does alone.
_TABLES: Final = ("parquet", "delta", "iceberg")
_FILES: Final = ("json", "csv", "orc")
#: Variables that may make Spark take a plain path as one of another file system.
_ELSEWHERE: Final = (
    "HADOOP_CONF_DIR", "SPARK_CONF_DIR", "SPARK_ENV_LOADED", "SPARK_HOME", "SPARK_REMOTE"
)  # fmt: skip
_DEFAULT_FS: Final = "spark.hadoop.fs.defaultFS"
HELP: Final = "parquet:, json:, csv:, orc:, delta: or iceberg:."


def data_set(option: str, text: str, example: str) -> tuple[str, str]:
    """The format and the path that an option names."""
    kind, _, path = text.partition(":")
    if not path or kind not in _TABLES + _FILES:
        raise ValueError(f"{option} takes a format and a path, such as {example}")
    return kind, path


def is_missing(path: str, conf: Mapping[str, str]) -> bool:
    """Whether nothing is at a path, as far as that is known without Spark: False for a URL or a
    pattern, and if the path may be on another machine."""
    if re.search(r"[:*?\[\]{}\\]", path) or _DEFAULT_FS in conf:
        return False
    return not any(map(os.environ.get, _ELSEWHERE)) and not os.path.exists(path)


def load(spark: "SparkSession", kind: str, path: str) -> "DataFrame":
    """A data set; the first line of CSV holds the column names."""
    if kind in _TABLES:
        from chasqui.spark.archiving.tables import tables_of

        return tables_of(spark, kind, path).read(path)
    options: dict[str, Any] = {"header": True, "inferSchema": True} if kind == "csv" else {}
    return spark.read.format(kind).options(**options).load(path)


def save(df: "DataFrame", kind: str, path: str) -> int:
    """Write rows to a new data set; how many it has then."""
    if kind in _TABLES:
        from chasqui.spark.archiving.tables import tables_of

        tables = tables_of(df.sparkSession, kind, path)
        tables.create(path, df)
        return int(tables.read(path).count())
    if kind == "csv":  # CSV has no structs, maps or bytes
        df = df.drop("retry", "extra", "_corrupt")
    df.write.format(kind).options(header=True).mode("error").save(path)
    return int(df.sparkSession.read.format(kind).options(header=True).load(path).count())
