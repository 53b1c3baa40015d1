"""Payloads read by a schema the slow way, and the columns that came of it as they go back."""

import contextlib
import datetime
import decimal
import re
import struct
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import msgpack  # type: ignore[import-untyped]

from chasqui._core.envelope import check_msgpack
from chasqui._core.maps import pack_values
from chasqui._core.typed import unpack_column

if TYPE_CHECKING:
    from chasqui._core.maps import Kind, Source
    from chasqui._core.typed import Shape, Unpacked

#: The row does not fit.
MISFIT: Final = "misfit"

_BITS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_FORMATS: Final = {
    **dict(zip(_BITS, "bhiq", strict=True)),
    **dict.fromkeys(("moment", "local", "clock"), "q"),
    "float": "f",
    "double": "d",
    "date": "i",
}
_EPOCH: Final = datetime.datetime(1970, 1, 1)
_PRECISION, _SCALE = 10, 2


class _MisfitError(Exception):
    pass


class _Pairs(list[Any]):
    """A map, with every pair that it has."""


def _shape(name: str, kind: "Kind", *inside: "Shape", is_nullable: bool = True) -> "Shape":
    digits = (_PRECISION, _SCALE) if kind == "decimal" else (0, 0)
    return name, kind, kind, is_nullable, *digits, list(inside)


#: Every kind, alone and inside of each that has others inside; the names are their kinds.
_LEAVES: Final[tuple["Shape", ...]] = tuple(
    _shape(kind, kind)
    for kind in (
        *("nothing", "bool", *_BITS, "float", "double", "text", "binary"),  # type: ignore[arg-type]
        *("date", "moment", "local", "clock", "decimal"),
    )
)
_COLUMNS: Final[tuple["Shape", ...]] = (
    *_LEAVES,
    _shape("list", "list", _shape("", "list", _shape("", "struct", *_LEAVES))),
    _shape("map", "map", _shape("", "int32", is_nullable=False), _shape("", "text")),
    _shape("dates", "map", _shape("", "date", is_nullable=False), _shape("", "map",
           _shape("", "text", is_nullable=False), _shape("", "decimal"))),
    _shape("struct", "struct", _shape("int8", "int8", is_nullable=False), _shape("", "binary")),
)  # fmt: skip
NAMES: Final = tuple(column[0] for column in _COLUMNS)
#: What the first byte of an input chooses from: a column with a text beside it.
SHAPES: Final = tuple(
    _shape("payload", "struct", one, _shape("beside", "text")) for one in _COLUMNS
)
_GOOD: Final = msgpack.packb({"beside": "x", "list": [[{"int16": 7}], None], "map": {"7": ""}})


def read(shape: "Shape", rows: list[bytes]) -> tuple["Unpacked", dict[int, str]]:
    """What the core makes of the rows."""
    ends = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    layout = struct.pack(f"={len(ends)}i", *ends)
    return unpack_column(shape, len(rows), 0, None, layout, b"".join(rows))


def rows_around(shape: "Shape", data: bytes) -> tuple["Unpacked", list[Any]]:
    """The columns of an input between two rows that fit, and the rows by the core's word."""
    unpacked, reasons = read(shape, [_GOOD, data, _GOOD])
    rows = _values(shape, unpacked)
    for row in reasons:
        assert rows[row] is None
        rows[row] = MISFIT
    return unpacked, rows


def rows_expected(shape: "Shape", data: bytes) -> list[Any]:
    return [_expected(shape, row) for row in (_GOOD, data, _GOOD)]


def rows_again(shape: "Shape", unpacked: "Unpacked") -> list[Any]:
    """The rows as they are read after the columns were packed."""
    again, reasons = read(shape, pack_values(unpacked[0], _source(shape, unpacked)))
    assert not reasons
    return _values(shape, again)


def pack_harmed(shape: "Shape", unpacked: "Unpacked", mark: int) -> None:
    """Pack the columns with one buffer cut short or with other bytes in it: whatever comes of it,
    nothing beyond a buffer is read."""
    buffers = [one for one in _walk(unpacked) if one[0][one[1]]]
    held, place = buffers[mark % len(buffers)]
    data = bytearray(held[place])
    at = (mark >> 8) % len(data)
    if mark & 0x80:
        del data[at:]
    else:
        data[at] = mark >> 24
    held[place] = bytes(data)
    with contextlib.suppress(ValueError, TypeError):
        pack_values(unpacked[0], _source(shape, unpacked))


def _walk(unpacked: "Unpacked") -> list[tuple[list[Any], int]]:
    _, buffers, inside = unpacked
    own: list[tuple[list[Any], int]] = [(buffers, place) for place in range(len(buffers))]
    return own + [one for part in inside for one in _walk(part)]


def _source(shape: "Shape", unpacked: "Unpacked") -> "Source":
    name, kind, _, _, _, scale, shapes = shape
    rows, (bitmap, *rest), inside = unpacked
    has_ends = kind in ("text", "binary", "list", "map")
    ends = rest.pop(0) if has_ends else None
    values = rest[0] if rest else None
    if kind == "decimal":
        return name, kind, 0, bitmap, values, ends, scale
    if not shapes:
        return name, kind, 0, bitmap, values, ends
    columns = [_source(*pair) for pair in zip(shapes, inside, strict=True)]
    count = rows if kind == "struct" else inside[0][0]
    return name, kind, 0, bitmap, values, ends, (count, columns)


# ── What the core has read ───────────────────────────────────────────────────────────────────────


def _values(shape: "Shape", unpacked: "Unpacked") -> list[Any]:
    """A column as Python's values, a decimal without its point, times as numbers."""
    _, kind, _, _, _, _, shapes = shape
    rows, (bitmap, *rest), inside = unpacked
    parts = [_values(*pair) for pair in zip(shapes, inside, strict=True)]
    found: list[Any]
    if kind == "struct":
        names = [one[0] for one in shapes]
        found = [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]
    elif kind == "nothing":
        found = [None] * rows
    elif kind == "bool":
        found = [_bit(rest[0], i) for i in range(rows)]
    elif kind in ("text", "binary", "list", "map"):
        bounds = struct.unpack(f"={rows + 1}i", rest[0] or b"")
        of = rest[1] if len(rest) > 1 else parts[0]
        if kind == "map":
            of = list(zip(*parts, strict=True))
        assert of is not None
        assert bounds[-1] == len(of)
        found = [of[bounds[i] : bounds[i + 1]] for i in range(rows)]
    elif kind == "decimal":
        data = rest[0] or b""
        sixteen = [data[16 * i : 16 * i + 16] for i in range(rows)]
        found = [int.from_bytes(one, "little", signed=True) for one in sixteen]
    else:
        found = list(struct.unpack(f"={rows}{_FORMATS[kind]}", rest[0] or b""))
    if bitmap is None:
        return found
    return [value if _bit(bitmap, i) else None for i, value in enumerate(found)]


def _bit(bitmap: bytes | None, at: int) -> bool:
    assert bitmap is not None
    return bool(bitmap[at >> 3] >> (at & 7) & 1)


# ── What it must read ────────────────────────────────────────────────────────────────────────────


def _expected(shape: "Shape", data: bytes) -> Any:
    try:
        check_msgpack(data)
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            object_pairs_hook=_Pairs,
            unicode_errors="surrogateescape",
        )
        return _read(shape, value)
    except (ValueError, ArithmeticError, _MisfitError):
        return MISFIT


def _read(shape: "Shape", value: Any) -> Any:
    """A value by its shape; raises if it does not fit."""
    _, kind, _, is_nullable, _, _, shapes = shape
    if value is None:
        return _fit(is_nullable, None)
    if kind == "struct":
        _fit(type(value) is _Pairs)
        return _read_struct(shapes, value)
    if kind == "list":
        _fit(type(value) is list)
        return [_read(shapes[0], one) for one in value]
    if kind == "map":
        _fit(type(value) is _Pairs)
        return [(_read_key(shapes[0], key), _read(shapes[1], one)) for key, one in value]
    if kind == "text":
        _fit(type(value) is str)
        return value.encode()
    if kind == "binary":
        _fit(type(value) in (str, bytes))
        return value if type(value) is bytes else value.encode(errors="surrogateescape")
    if kind == "bool":
        return _fit(type(value) is bool, value)
    _fit(kind != "nothing" and type(value) in (str, int, float))
    if kind in ("date", "moment", "local", "clock"):
        return _read_time(kind, _fit(type(value) is str, value))
    if kind == "decimal":
        return _read_decimal(value)
    _fit(type(value) is not str)
    return _read_number(kind, value)


def _read_struct(shapes: list["Shape"], pairs: list[Any]) -> dict[str, Any]:
    by_name = {one[0]: one for one in shapes}
    row: dict[str, Any] = {}
    for key, value in pairs:
        if type(key) is str and key in by_name:
            row[key] = _read(by_name[key], value)
    return {name: row[name] if name in row else _read(one, None) for name, one in by_name.items()}


def _read_key(shape: "Shape", key: Any) -> Any:
    if shape[1] in _BITS and type(key) is str:
        _fit(re.fullmatch("-?[0-9]{1,19}", key) is not None)
        key = int(key)
    return _read(shape, key)


def _read_number(kind: str, value: Any) -> Any:
    if kind == "double":
        return float(value)
    if kind == "float":
        return struct.unpack("=f", struct.pack("=f", float(value)))[0]
    number = int(value)  # raises for NaN and infinities
    half = 1 << _BITS[kind] - 1
    return _fit(number == value and -half <= number < half, number)


def _read_decimal(value: Any) -> int:
    number = decimal.Decimal(repr(value) if type(value) is float else value)
    _fit(number.is_finite())
    if not number:
        return 0
    _fit(-_SCALE <= number.adjusted() < _PRECISION)
    scaled = Fraction(number) * 10**_SCALE
    return _fit(scaled.denominator == 1 and abs(scaled) < 10**_PRECISION, int(scaled))


def _read_time(kind: str, text: str) -> int:
    text.encode()
    if kind == "date":
        return (datetime.date.fromisoformat(text) - _EPOCH.date()).days
    if kind == "clock":
        clock = datetime.time.fromisoformat(text)
        _fit(clock.tzinfo is None)
        moment = datetime.datetime.combine(_EPOCH, clock)
    else:
        moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        _fit(kind == "moment")
        moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
    us = (moment - _EPOCH) // datetime.timedelta(microseconds=1)
    return us * 1000 if kind == "clock" else us


def _fit(is_fit: bool, value: Any = None) -> Any:
    if not is_fit:
        raise _MisfitError
    return value
