"""Spark's types in payloads: which there are."""

import pytest
from pyspark.sql import types as T

from chasqui.spark.options import OptionError
from tests.spark.direct import writer


class Point(T.UserDefinedType):
    @classmethod
    def sqlType(cls) -> T.DataType:
        return T.ArrayType(T.DoubleType(), False)


def of(**fields: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in fields.items()])


REFUSED = [
    (T.VariantType(), "column c: a payload cannot hold variant"),
    (T.DayTimeIntervalType(), "column c: a payload cannot hold interval day to second"),
    (T.YearMonthIntervalType(), "column c: a payload cannot hold interval year to month"),
    (T.CalendarIntervalType(), "column c: a payload cannot hold interval"),
    (T.CharType(3), r"column c: a payload cannot hold char\(3\)"),
    (T.VarcharType(3), r"column c: a payload cannot hold varchar\(3\)"),
    (Point(), "column c: a payload cannot hold the user-defined type Point"),
    (T.GeometryType(4326), "column c: a payload cannot hold geometry"),
    (T.DecimalType(5, -2), r"column c: a payload cannot hold decimal\(5,-2\)"),
    (T.ArrayType(of(v=T.VariantType())), r"column c.element.v: a payload cannot hold variant"),
    (T.MapType(T.StringType(), Point()), "column c.value: a payload cannot hold the user-defined"),
    (T.MapType(T.DoubleType(), T.StringType()), "column c: .* a map with keys of double; they are"),
    (T.MapType(of(n=T.LongType()), T.StringType()), "a map with keys of struct<n:bigint>"),
    (T.StructType([T.StructField("n", T.LongType())] * 2), "column c: it has two fields 'n'"),
]


@pytest.mark.parametrize(("kind", "sentence"), REFUSED)
@pytest.mark.parametrize("column", ["c", "payload"])
def test_what_no_payload_can_hold_is_refused_before_a_task_starts(
    kind: T.DataType, sentence: str, column: str
):
    with pytest.raises(OptionError, match=sentence.replace("column c", f"column {column}")):
        writer("redis://127.0.0.1:1", of(**{column: kind}), queue="q")


def test_a_payload_has_a_deepest_level():
    kind: T.DataType = T.LongType()
    for _ in range(128):
        kind = T.ArrayType(kind)
    writer("redis://127.0.0.1:1", of(payload=kind), queue="q")
    for column in (of(c=kind), of(payload=T.ArrayType(kind))):
        with pytest.raises(OptionError, match="is nested 128 levels at most"):
            writer("redis://127.0.0.1:1", column, queue="q")


def test_columns_that_would_become_one_are_refused():
    schema = T.StructType([T.StructField("n", T.LongType())] * 2)
    with pytest.raises(OptionError, match="there are two columns 'n'"):
        writer("redis://127.0.0.1:1", schema, queue="q")


def test_json_is_text():
    with pytest.raises(OptionError, match="column 'payload' must be string with payloadFormat=jso"):
        writer("redis://127.0.0.1:1", of(payload=T.LongType()), queue="q", payloadFormat="json")
