"""Spark's types in payloads: what the writer writes, the reader reads."""

from datetime import UTC, date, datetime, time
from decimal import Context, Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from chasqui.errors import PayloadError
from chasqui.model.payload import decode
from chasqui.spark.options import OptionError, Options
from chasqui.spark.reading.batch import BatchReader
from chasqui.spark.reading.shaping import CorruptEntryError, JobRows, Shaper
from chasqui.spark.schemas import arrow_schema
from chasqui.spark.writing.rows import Mapping, jobs_of
from tests.servers import Server
from tests.spark.direct import batches, rows_of, writer


class Point(T.UserDefinedType):
    @classmethod
    def sqlType(cls) -> T.DataType:
        return T.ArrayType(T.DoubleType(), False)


def of(**fields: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in fields.items()])


# ── There and back ──────────────────────────────────────────────────────────────────────────────


def packed(schema: T.StructType, columns: dict[str, list[Any]]) -> list[bytes]:
    """Rows as payloads, by a writer."""
    options = Options.parse({"queue": "q"}, "w")
    (batch,) = pa.Table.from_pydict(columns, schema=arrow_schema(schema)).to_batches()
    ((_, jobs, _),) = jobs_of(batch, Mapping.of(options, schema), options)
    return list(jobs.payloads)


def unpacked(payloads: list[bytes], schema: T.DataType, mode: str = "FAILFAST") -> list[Any]:
    """Payloads by a schema, as a reader has them; and _corrupt beside it."""
    options = Options.parse({"queue": "q", "payloadSchema": "n int", "parseMode": mode}, "r")
    shaper = Shaper(options, of(payload=schema, _corrupt=T.BinaryType()))
    data = pa.array(payloads, pa.binary())
    batch = shaper.batch("q", JobRows(len(payloads), {}, data, data), lambda i: f"row {i}")
    batch.validate(full=True)
    if mode == "FAILFAST":
        return list(batch.column("payload").to_pylist())
    return [tuple(row.values()) for row in batch.to_pylist()]


INTEGERS = {T.ByteType(): 8, T.ShortType(): 16, T.IntegerType(): 32, T.LongType(): 64}
KEYS: dict[T.DataType, st.SearchStrategy[Any]] = {
    T.StringType(): st.text(),
    T.BinaryType(): st.binary(),
    T.DateType(): st.dates(),
    T.TimestampType(): st.datetimes(timezones=st.just(UTC)),
    T.TimestampNTZType(): st.datetimes(),
    T.TimeType(6): st.times(),
    **{
        kind: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for kind, bits in INTEGERS.items()
    },
    **{
        T.DecimalType(precision, scale): st.integers(-(10**precision) + 1, 10**precision - 1).map(
            lambda n, scale=scale: Decimal(n).scaleb(-scale, Context(prec=60))  # type: ignore[misc]
        )
        for precision, scale in ((1, 0), (5, 5), (10, 2), (18, 6), (19, 0), (38, 0), (38, 37))
    },
}
LEAVES: dict[T.DataType, st.SearchStrategy[Any]] = {
    **KEYS,
    T.BooleanType(): st.booleans(),
    T.FloatType(): st.floats(width=32),
    T.DoubleType(): st.floats(),
    T.NullType(): st.none(),
}
Typed = tuple[T.DataType, st.SearchStrategy[Any]]


def _around(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def array(one: Typed) -> Typed:
        return T.ArrayType(one[0]), st.lists(st.none() | one[1], max_size=4)

    def mapping(key: Any, one: Typed) -> Typed:
        pairs = st.dictionaries(KEYS[key], st.none() | one[1], max_size=4)
        return T.MapType(key, one[0]), pairs.map(lambda found: list(found.items()))

    def structure(fields: dict[str, Typed]) -> Typed:
        values = {name: st.none() | one[1] for name, one in fields.items()}
        return of(**{name: one[0] for name, one in fields.items()}), st.fixed_dictionaries(values)

    return (
        inner.map(array)
        | st.builds(mapping, st.sampled_from(list(KEYS)), inner)
        | st.dictionaries(st.text(), inner, max_size=3).map(structure)
    )


TYPED = st.recursive(st.sampled_from(list(LEAVES.items())), _around, max_leaves=6)


@given(st.data())
def test_what_is_written_is_read(data: st.DataObject):
    kinds = data.draw(st.dictionaries(st.sampled_from("abcd"), TYPED, min_size=1), label="columns")
    rows = data.draw(
        st.lists(st.tuples(*(st.none() | one[1] for one in kinds.values())), min_size=1, max_size=9)
    )
    schema = of(**{name: kind for name, (kind, _) in kinds.items()})
    columns = {name: [row[i] for row in rows] for i, name in enumerate(kinds)}
    expected = pa.Table.from_pydict(columns, schema=arrow_schema(schema)).to_pylist()
    payloads = packed(schema, columns)
    assert repr(unpacked(payloads, schema)) == repr(expected)
    for one in payloads:
        decode(one)  # which a worker can, too
    backwards = T.StructType(schema.fields[::-1])
    names = schema.names
    found = [{name: row[name] for name in names} for row in unpacked(payloads, backwards)]
    assert repr(found) == repr(expected)


@given(st.data())
def test_a_payload_of_any_type_is_read(data: st.DataObject):
    kind, values = data.draw(TYPED)
    column = data.draw(st.lists(st.none() | values, min_size=1, max_size=9))
    if isinstance(kind, T.BinaryType):  # is msgpack already
        return
    expected = pa.array(column, arrow_schema(of(payload=kind)).field("payload").type).to_pylist()
    found = unpacked(packed(of(payload=kind), {"payload": column}), kind)
    assert repr(found) == repr(expected)


EVERY = of(
    flag=T.BooleanType(),
    tiny=T.ByteType(),
    short=T.ShortType(),
    whole=T.IntegerType(),
    long=T.LongType(),
    small=T.FloatType(),
    real=T.DoubleType(),
    text=T.StringType(),
    data=T.BinaryType(),
    day=T.DateType(),
    at=T.TimestampType(),
    local=T.TimestampNTZType(),
    clock=T.TimeType(6),
    price=T.DecimalType(10, 2),
    nothing=T.NullType(),
    tags=T.ArrayType(T.StringType()),
    items=T.ArrayType(of(sku=T.StringType(), price=T.DecimalType(38, 18), on=T.DateType())),
    labels=T.MapType(T.StringType(), T.MapType(T.IntegerType(), T.TimestampType())),
    customer=of(name=T.StringType(), address=of(city=T.StringType())),
)
AT = datetime(2026, 11, 18, 3, 16, 3, 123, UTC)
ROW: dict[str, Any] = {
    "flag": True,
    "tiny": -128,
    "short": 2**15 - 1,
    "whole": -(2**31),
    "long": 2**63 - 1,
    "small": 0.5,
    "real": float("-inf"),
    "text": "ünï",
    "data": b"\x00\xff",
    "day": date(1, 1, 1),
    "at": AT,
    "local": datetime(9999, 12, 31, 23, 59, 59, 999_999),
    "clock": time(3, 16, 3, 5),
    "price": Decimal("-0.10"),
    "nothing": None,
    "tags": ["a", None, ""],
    "items": [{"sku": "x", "price": Decimal("1.000000000000000001"), "on": AT.date()}, None],
    "labels": [("a", [(-7, AT), (8, None)]), ("b", None), ("c", [])],
    "customer": {"name": None, "address": {"city": "Cusco"}},
}


def test_every_type_goes_through_a_queue(each_server: Server, queue_name: str):
    columns = {name: [ROW[name], None] for name in EVERY.names}
    it = writer(each_server.url, EVERY, queue=queue_name)
    it.commit([it.write(batches(columns, EVERY))])
    given = {"url": each_server.url, "queue": queue_name, "payloadSchema": "n int"}
    options = Options.parse({**given, "parseMode": "FAILFAST"}, "r")
    reader = BatchReader(options, of(payload=EVERY))
    rows = [row["payload"] for part in reader.partitions() for row in rows_of(reader.read(part))]
    assert rows == [ROW, dict.fromkeys(EVERY.names)]


def test_a_worker_gets_the_forms_that_are_promised():
    (payload,) = packed(EVERY, {name: [value] for name, value in ROW.items()})
    forms = {
        "data": b"\x00\xff",
        "day": "0001-01-01",
        "at": "2026-11-18T03:16:03.000123+00:00",
        "local": "9999-12-31T23:59:59.999999",
        "clock": "03:16:03.000005",
        "price": "-0.10",
        "items": [{"sku": "x", "price": "1.000000000000000001", "on": "2026-11-18"}, None],
        "labels": {
            "a": {"-7": "2026-11-18T03:16:03.000123+00:00", "8": None}, "b": None, "c": {},
        },
    }  # fmt: skip
    assert decode(payload) == {**ROW, **forms}


def test_a_moment_that_python_cannot_hold_fails_the_task():
    schema = of(n=T.LongType(), at=T.TimestampType())
    batch = pa.record_batch(
        [pa.array([1]), pa.array([2**62], pa.timestamp("us", "UTC"))], schema=arrow_schema(schema)
    )
    options = Options.parse({"queue": "q"}, "w")
    with pytest.raises(PayloadError, match="column at: a date outside of the years 1 to 9999"):
        list(jobs_of(batch, Mapping.of(options, schema), options))


# ── What others write ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        (T.TimestampType(), "2026-11-18T03:16:03Z", datetime(2026, 11, 18, 3, 16, 3, 0, UTC)),
        (T.TimestampType(), "2026-11-18T05:16:03.000123+02:00", AT),
        (T.TimestampType(), "2026-11-18 03:16:03", datetime(2026, 11, 18, 3, 16, 3, 0, UTC)),
        (T.TimestampNTZType(), "2026-11-18 03:16", datetime(2026, 11, 18, 3, 16)),
        (T.DateType(), "20261118", date(2026, 11, 18)),
        (T.TimeType(6), "03:16", time(3, 16)),
        (T.DecimalType(10, 2), 7, Decimal("7.00")),
        (T.DecimalType(10, 2), 0.1, Decimal("0.10")),
        (T.DecimalType(10, 2), "1E+2", Decimal("100.00")),
        (T.DecimalType(10, 2), "0E-9", Decimal("0.00")),
        (T.DecimalType(10, 2), "1.500", Decimal("1.50")),
        (T.DecimalType(20, 0), 2**64 - 1, Decimal(2**64 - 1)),
        (T.LongType(), 3.0, 3),
        (T.DoubleType(), 3, 3.0),
        (T.DoubleType(), 2**64 - 1, float(2**64)),
        (T.FloatType(), 0.1, 0.10000000149011612),
        (T.BinaryType(), "bytes", b"bytes"),
        (T.MapType(T.IntegerType(), T.LongType()), {5: 6}, [(5, 6)]),
    ],
)
def test_other_forms_that_mean_the_same_are_read(kind: T.DataType, given: Any, read: Any):
    ((found,),) = (row.values() for row in unpacked([msgpack.packb({"c": given})], of(c=kind)))
    assert (found, type(found)) == (read, type(read))


def test_what_is_missing_is_null_and_what_is_unknown_is_skipped():
    schema = of(a=T.LongType(), s=of(b=T.LongType(), c=T.StringType()))
    given: list[Any] = [{}, {"a": None, "x": [{"y": 1}]}, {"s": {"c": "d"}, 5: 6, b"a": 7}, None]
    assert unpacked([msgpack.packb(one) for one in given], schema) == [
        {"a": None, "s": None},
        {"a": None, "s": None},
        {"a": None, "s": {"b": None, "c": "d"}},
        None,
    ]
    twice = b"\x82\xa1s\x81\xa1b\x01\xa1s\x81\xa1b\x02"
    assert unpacked([twice], schema) == [{"a": None, "s": {"b": 2, "c": None}}]


@pytest.mark.parametrize("key", [b"", b"a", b"\xa1a\x07", b"\xdf", b"x" * 300, 5, -(2**40), None])
def test_a_key_that_is_no_text_is_skipped(key: Any):
    schema = of(a=T.LongType(), b=T.LongType())
    given = msgpack.packb({"b": 1, key: "x", "a": 2})
    assert unpacked([given], schema) == [{"a": 2, "b": 1}]


MISFITS: list[tuple[T.DataType, Any, str]] = [
    (T.DecimalType(10, 2), {}, r"payload.c: expected decimal\(10,2\), got map"),
    (T.DecimalType(10, 2), "0.001", r"expected decimal\(10,2\), got text that does not fit"),
    (T.DecimalType(10, 2), 10**8, r"expected decimal\(10,2\), got int that does not fit"),
    (T.DecimalType(10, 2), "1E+999999999", "got text that does not fit"),
    (T.DecimalType(10, 2), "1E-999999999", "got text that does not fit"),
    (T.DecimalType(10, 2), float("nan"), "got float that does not fit"),
    (T.DecimalType(10, 2), "seven", "got text that does not fit"),
    (T.DecimalType(10, 2), True, "got bool"),
    (T.DecimalType(10, 2), b"\x07" * 9, "got bytes"),
    (T.DateType(), b"2026-11-18", "expected date, got bytes"),
    (T.ByteType(), 128, "expected tinyint, got int out of range"),
    (T.IntegerType(), -(2**31) - 1, "expected int, got int out of range"),
    (T.LongType(), 2**63, "expected bigint, got int out of range"),
    (T.LongType(), 1.5, "expected bigint, got float"),
    (T.LongType(), 1e300, "expected bigint, got float"),
    (T.LongType(), float("nan"), "expected bigint, got float"),
    (T.LongType(), "7", "expected bigint, got text"),
    (T.LongType(), True, "expected bigint, got bool"),
    (T.FloatType(), 1e300, "expected float, got float out of range"),
    (T.BooleanType(), 1, "expected boolean, got int"),
    (T.StringType(), 1, "expected string, got int"),
    (T.StringType(), b"x", "expected string, got bytes"),
    (T.BinaryType(), [1], "expected binary, got list"),
    (T.DateType(), "2026-02-30", "expected date, got text that does not fit"),
    (T.DateType(), 20_000, "expected date, got int"),
    (T.TimestampType(), "soon", "expected timestamp, got text that does not fit"),
    (T.TimestampType(), "0001-01-01T00:00:00+05:00", "got text that does not fit"),
    (T.TimestampNTZType(), "2026-11-18T03:16:03Z", "expected timestamp_ntz, got text that does no"),
    (T.TimeType(6), "24:00:00", r"expected time\(6\), got text that does not fit"),
    (T.NullType(), 0, "expected void, got int"),
    (T.ArrayType(T.LongType()), {}, "payload.c: expected array, got map"),
    (T.ArrayType(T.LongType()), [1, "x"], r"payload.c\[1\]: expected bigint, got text"),
    (T.ArrayType(T.LongType(), False), [None], r"payload.c\[0\]: expected bigint, got null"),
    (of(n=T.LongType()), [1], "payload.c: expected struct, got list"),
    (T.ArrayType(of(n=T.DateType())), [{}, {"n": "x"}], r"payload.c\[1\].n: expected date, got te"),
    (T.StructType([T.StructField("n", T.LongType(), False)]), {}, "c.n: expected bigint, got noth"),
    (T.MapType(T.StringType(), T.LongType()), [], "payload.c: expected map, got list"),
    (T.MapType(T.ByteType(), T.LongType()), {"300": 1}, "c.key: expected tinyint, got text that d"),
    (T.MapType(T.StringType(), T.LongType()), {"a": "b"}, "payload.c.value: expected bigint, got "),
]


@pytest.mark.parametrize(("kind", "given", "sentence"), MISFITS)
def test_what_does_not_fit_is_told_with_its_place(kind: T.DataType, given: Any, sentence: str):
    schema = of(before=T.StringType(), c=kind, tags=T.ArrayType(T.StringType()))
    bad = msgpack.packb({"before": "x", "tags": ["y"], "c": given})
    with pytest.raises(CorruptEntryError, match=f"jobs of queue 'q' .*: row 0: .*{sentence}"):
        unpacked([bad], schema)
    good = msgpack.packb({"before": "x", "tags": ["y"]})
    fine = ({"before": "x", "c": None, "tags": ["y"]}, None)
    assert unpacked([good, bad, good], schema, "PERMISSIVE") == [fine, (None, bad), fine]
    assert unpacked([good, bad, good], schema, "DROPMALFORMED") == [fine, fine]


@given(st.binary(max_size=40))
def test_bytes_that_are_no_payload_cost_their_row(data: bytes):
    schema = of(a=T.LongType(), b=T.ArrayType(T.StringType()))
    good = msgpack.packb({"a": 1, "b": ["x"]})
    first, middle, last = unpacked([good, data, good], schema, "PERMISSIVE")
    assert first == last == ({"a": 1, "b": ["x"]}, None)
    assert middle[1] in (None, data)


# ── What has no form ────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize(("kind", "sentence"), REFUSED)
def test_nor_can_it_be_read(kind: T.DataType, sentence: str):
    options = Options.parse({"queue": "q", "payloadSchema": "n int"}, "r")
    with pytest.raises(OptionError, match=sentence.replace("column c", "column payload.c")):
        BatchReader(options, of(payload=of(c=kind)))


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
