"""How Spark's types are written in a payload, and columns in the form that the core takes.

A payload is msgpack with keys that are text or bytes. Dates and times are ISO 8601 text, decimals
are text, structs are maps by field name; docs/spark.md has the table. The driver refuses the types
that a payload cannot hold.
"""

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_type

from chasqui.model.payload import MAX_DEPTH
from chasqui.spark.options import OptionError

if TYPE_CHECKING:
    from chasqui._core.maps import Kind, Source
    from chasqui._core.typed import Shape, Unpacked

_INTEGERS: Final = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
_TIMES: Final = (types.DateType, types.TimestampType, types.TimestampNTZType, types.TimeType)
#: Types of map keys. All but binary become text.
_KEYS: Final = (types.StringType, types.BinaryType, types.DecimalType, *_INTEGERS, *_TIMES)
_KEPT: Final = (
    *_KEYS,
    types.NullType,
    types.BooleanType,
    types.FloatType,
    types.DoubleType,
    types.ArrayType,
    types.MapType,
    types.StructType,
)
#: Arrow's types to the core's names for them; `kind_of` adds decimals, times and nested types.
KINDS: "Final[dict[Any, Kind]]" = {
    pa.null(): "nothing",
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "text",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "local",
    pa.time64("ns"): "clock",
}
_NARROW: Final = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}


def check_form(path: str, kind: types.DataType, depth: int = 0) -> None:
    """Refuse a type that a payload cannot hold.

    `path` is its name for the user, such as `items.price`; `depth` is how deep it is nested.
    """
    if type(kind) not in _KEPT or (isinstance(kind, types.DecimalType) and kind.scale < 0):
        raise OptionError(f"column {path}: a payload cannot hold {_named(kind)}")
    is_simple = not isinstance(kind, (types.ArrayType, types.MapType, types.StructType))
    if depth >= MAX_DEPTH and not is_simple:
        raise OptionError(f"column {path}: a payload is nested {MAX_DEPTH} levels at most")
    if isinstance(kind, types.ArrayType):
        check_form(f"{path}.element", kind.elementType, depth + 1)
    elif isinstance(kind, types.MapType):
        if type(kind.keyType) not in _KEYS:
            raise OptionError(
                f"column {path}: a payload cannot hold a map with keys of {_named(kind.keyType)}; "
                "they are string, binary, an integer, decimal, date or a time"
            )
        check_form(f"{path}.key", kind.keyType, depth + 1)
        check_form(f"{path}.value", kind.valueType, depth + 1)
    elif isinstance(kind, types.StructType):
        names = [field.name for field in kind.fields]
        for field in kind.fields:
            if names.count(field.name) > 1:
                raise OptionError(f"column {path}: it has two fields {field.name!r}")
            check_form(f"{path}.{field.name}", field.dataType, depth + 1)


def _named(kind: types.DataType) -> str:
    name: str = kind.simpleString()
    if isinstance(kind, types.UserDefinedType):
        return f"the user-defined type {type(kind).__name__}"
    return name


def kind_of(kind: Any) -> "Kind":
    """The core's name for an Arrow type."""
    is_ = pa.types
    if (known := KINDS.get(kind)) is not None:
        return known
    if is_.is_timestamp(kind):
        return "moment"
    if is_.is_decimal(kind):
        return "decimal"
    if is_.is_struct(kind):
        return "struct"
    return "map" if is_.is_map(kind) else "list"


def source_of(name: str, column: Any) -> "Source":
    """A column in the form that the core takes: its buffers, and the columns inside it."""
    if column.type in _NARROW:
        column = column.cast(_NARROW[column.type])
    kind = kind_of(column.type)
    bitmap, *rest = column.buffers()
    head = (name, kind, column.offset, bitmap)
    if kind in ("text", "binary"):
        return *head, rest[1], rest[0]
    if kind == "struct":
        fields = [source_of(one.name, column.field(i)) for i, one in enumerate(column.type)]
        return *head, None, None, (len(column), fields)
    if kind == "list":
        element = column.values
        return *head, None, rest[0], (len(element), [source_of("", element)])
    if kind == "map":
        pair = [source_of("", one) for one in (column.keys, column.items)]
        return *head, None, rest[0], (len(column.keys), pair)
    if kind == "decimal":
        return *head, rest[0], None, column.type.scale
    return *head, rest[0] if rest else None, None


# ── Reading ─────────────────────────────────────────────────────────────────────────────────────


def shape_of(name: str, kind: types.DataType, is_nullable: bool = True) -> "Shape":
    """A type in the form that the core takes to read its values."""
    inside: list[Shape] = []
    precision, scale = 0, 0
    expected = kind.simpleString()
    if isinstance(kind, types.StructType):
        inside = [shape_of(one.name, one.dataType, one.nullable) for one in kind.fields]
        expected = "struct"
    elif isinstance(kind, types.ArrayType):
        inside = [shape_of("element", kind.elementType, kind.containsNull)]
        expected = "array"
    elif isinstance(kind, types.MapType):
        values = shape_of("value", kind.valueType, kind.valueContainsNull)
        inside = [shape_of("key", kind.keyType, False), values]
        expected = "map"
    elif isinstance(kind, types.DecimalType):
        precision, scale = kind.precision, kind.scale
    arrow = to_arrow_type(kind, timezone="UTC")
    return name, kind_of(arrow), expected, is_nullable, precision, scale, inside


def array_of(kind: Any, unpacked: "Unpacked") -> Any:
    """An array of values that the core has read; nothing is copied."""
    rows, buffers, inside = unpacked
    if pa.types.is_map(kind):
        pairs = pa.struct([kind.key_field, kind.item_field])
        children = [array_of(pairs, (inside[0][0], [None], inside))]
    elif pa.types.is_list(kind):
        children = [array_of(kind.value_type, inside[0])]
    elif pa.types.is_struct(kind):
        children = [array_of(one.type, part) for one, part in zip(kind, inside, strict=True)]
    else:
        children = None
    lent = [None if one is None else pa.py_buffer(one) for one in buffers]
    return pa.Array.from_buffers(kind, rows, lent, children=children)
