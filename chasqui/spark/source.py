"""The format `chasqui`: checks the options and picks the reader or writer."""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from chasqui.spark.options import OptionError, Options
from chasqui.spark.schemas import ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ChasquiDataSource(DataSource):  # type: ignore[misc]
    """Queues as DataFrames; docs/spark.md has its tables and options."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options

    @classmethod
    def name(cls) -> str:
        return "chasqui"

    def schema(self) -> str:
        return ddl(self._parse("rs"))

    def reader(self, schema: StructType) -> DataSourceReader:
        from chasqui.spark.reading.batch import BatchReader, PushdownReader

        options = self._parse("r")
        return (PushdownReader if options.pushdown else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from chasqui.spark.consuming.reader import ConsumeReader
        from chasqui.spark.reading.tail import TailReader

        options = self._parse("s")
        return (ConsumeReader if options.mode == "consume" else TailReader)(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from chasqui.spark.writing.writers import BatchWriter

        _refuse_overwrite(overwrite)
        return BatchWriter(self._parse("w"), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from chasqui.spark.writing.writers import StreamWriter

        _refuse_overwrite(overwrite)
        return StreamWriter(self._parse("w"), schema)

    def _parse(self, use: str) -> Options:
        return Options.parse(self.options, use)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise OptionError("a queue is only added to: write with mode append, not overwrite")


def register(spark: "SparkSession") -> None:
    """Make `format("chasqui")` known to a session."""
    spark.dataSource.register(ChasquiDataSource)
