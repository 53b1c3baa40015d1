"""The same columns the slow way: what a ColumnBuilder must gather from a plain reply, and the maps
that must come out of Arrow's buffers."""

import re
import struct
from typing import TYPE_CHECKING, Any, Final

import msgpack  # type: ignore[import-untyped]

from chasqui._core.column import MAX_MS
from chasqui._core.columns import ColumnBuilder, Columns
from chasqui._core.envelope import EnvelopeError
from chasqui._core.maps import pack_maps
from tests.fuzz import reference

if TYPE_CHECKING:
    from chasqui._core.maps import Kind

#: Every kind of column, with two that share a field.
FIELDS: Final = (
    ("name", "text", b"n"),
    ("drawn", "ulid", b"n"),
    ("raw", "binary", b"reason"),
    ("long", "int64", b"reason"),
    ("short", "int32", b"source_id"),
    ("moment", "moment", b"source_id"),
    ("skipped", "skipped", b"skipped"),
)
PARTS: Final = (
    *("entry_id", "entry_ts", "job_id", "payload", "created_at", "attempt", "envelope"),
    "extra",
)
_KINDS: Final = {
    **{name: kind for name, kind, _ in FIELDS if kind != "skipped"},
    **dict.fromkeys(("entry_id", "job_id"), "text"),
    **dict.fromkeys(("payload", "envelope"), "binary"),
    **dict.fromkeys(("entry_ts", "created_at"), "moment"),
    "attempt": "int32",
}
_KNOWN: Final = {field for _, _, field in FIELDS}
_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def builder() -> ColumnBuilder:
    return ColumnBuilder(FIELDS, PARTS)  # type: ignore[arg-type]


# ── What a builder gathered ──────────────────────────────────────────────────────────────────────


def rows_of(found: Columns) -> list[dict[str, Any]]:
    """What was gathered, row by row, a value as bytes, a number or None."""
    if not found.rows:
        return []
    columns = {name: _values(found.rows, _KINDS[name], got) for name, got in found.columns.items()}
    assert found.extras is not None
    ends, names, values = found.extras
    bounds = struct.unpack(f"={found.rows + 1}i", ends)
    pairs = [_values(bounds[-1], "text", one) for one in (names, values)]
    rows = []
    for i in range(found.rows):
        row = {name: values[i] for name, values in columns.items()}
        inside = slice(bounds[i], bounds[i + 1])
        row["extra"] = list(zip(pairs[0][inside], pairs[1][inside], strict=True))
        row["corrupt"], row["retry"] = found.corrupt.get(i), repr(found.retries.get(i))
        rows.append(dict(sorted(row.items())))
    return rows


def _values(rows: int, kind: str, buffers: Any) -> list[Any]:
    bitmap, *rest = buffers
    found: list[Any]
    if kind in ("text", "binary"):
        ends, data = rest
        bounds = struct.unpack(f"={rows + 1}i", ends)
        found = [data[bounds[i] : bounds[i + 1]] for i in range(rows)]
        assert bounds[-1] == len(data)
    else:
        found = list(struct.unpack(f"={rows}{'i' if kind == 'int32' else 'q'}", rest[0]))
    if bitmap is not None:
        found = [value if bitmap[i >> 3] >> (i & 7) & 1 else None for i, value in enumerate(found)]
    return found


# ── What it must gather ──────────────────────────────────────────────────────────────────────────


def rows_from(reply: Any) -> Any:
    """The rows of a plain reply; the reply itself if it holds none, or MISSHAPEN."""
    if type(reply) is not list:
        return reply
    if reference.entries("range", reply, 1 << 62) is reference.MISSHAPEN:
        return reference.MISSHAPEN
    if any(entry is None or entry[1] is None or len(entry) != 2 for entry in reply):
        return reference.MISSHAPEN
    return [dict(sorted(_row(entry).items())) for entry in reply]


def _row(entry: list[Any]) -> dict[str, Any]:
    fields: dict[bytes, bytes] = {}
    for field, value in zip(entry[1][::2], entry[1][1::2], strict=True):
        fields.setdefault(field, value)
    row: dict[str, Any] = {"entry_id": entry[0], "corrupt": None, "retry": "None"}
    row["entry_ts"] = _moment(_number(entry[0].partition(b"-")[0]))
    for name, kind, field in FIELDS:
        if kind != "skipped":
            row[name] = _READ[kind](fields[field]) if field in fields else None
    row["extra"] = _extra(entry[1])
    row["envelope"] = envelope = fields.get(b"d")
    for name in ("job_id", "payload", "created_at", "attempt"):
        row[name] = None
    try:
        parts = None if envelope is None else reference.parts_of(envelope)
    except EnvelopeError:
        parts = None
    if parts is None:
        row["corrupt"] = envelope or b""
        return row
    row["job_id"] = parts.id.encode() or None
    row["payload"] = parts.payload
    row["created_at"] = _moment(parts.created_at_ms)
    row["attempt"] = min(parts.attempt, 2**31 - 1)
    row["retry"] = repr(parts.retry)
    return row


def _extra(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    found: dict[bytes, bytes] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        if field not in _KNOWN and field != b"d":
            found.setdefault(_text(field), _text(value))
    return list(found.items())


def _text(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()


def _number(value: bytes) -> int | None:
    if not re.fullmatch(rb"-?[0-9]{1,19}", value):
        return None
    return int(value) if -(1 << 63) <= int(value) < 1 << 63 else None


def _short(value: bytes) -> int | None:
    number = _number(value)
    return number if number is not None and -(1 << 31) <= number < 1 << 31 else None


def _moment(ms: int | None) -> int | None:
    return None if ms is None or not 0 <= ms <= MAX_MS else ms * 1000


def _drawn(value: bytes) -> int | None:
    text = value.decode("latin-1")
    if len(text) != 26 or not text.isascii() or any(c not in _DIGITS for c in text.upper()):
        return None
    ms = 0
    for char in text[:10].upper():
        ms = ms << 5 | _DIGITS.index(char)
    return _moment(ms)


_READ: Final = {
    "text": _text,
    "binary": bytes,
    "int64": _number,
    "int32": _short,
    "moment": lambda value: _moment(_number(value)),
    "ulid": _drawn,
}


# ── Maps ─────────────────────────────────────────────────────────────────────────────────────────

MAP_KINDS: Final[tuple["Kind", ...]] = (
    *("bool", "int8", "int16", "int32", "int64", "float", "double", "text", "binary"),
)
_FORMATS: Final = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float": "f"}


def column_of(data: bytes) -> tuple[int, "Kind", int, Any, Any, Any]:
    """An input as rows, kind, offset, and the three buffers of one column."""
    head, rest = data[:6].ljust(6, b"\0"), data[6:]
    kind, rows, offset = MAP_KINDS[head[0] % len(MAP_KINDS)], head[1] % 16, head[2] % 8
    bits, ends = head[4] % 8, 4 * (head[5] % 32)
    bitmap, values = rest[:bits], rest[bits + ends :]
    return (
        rows,
        kind,
        offset,
        bitmap if head[3] & 1 else None,
        None if head[3] & 2 else values,
        None if head[3] & 4 else rest[bits : bits + ends],
    )


def packed(data: bytes) -> list[bytes] | None:
    """What the core makes of it; None if it is refused."""
    rows, kind, offset, bitmap, values, ends = column_of(data)
    try:
        return pack_maps(rows, [("c", kind, offset, bitmap, values, ends)])
    except (ValueError, TypeError):
        return None


def maps_of(data: bytes) -> list[bytes] | None:
    """What it must make of it."""
    rows, kind, offset, bitmap, values, ends = column_of(data)
    last = offset + rows
    if bitmap is not None and len(bitmap) < (last + 7) // 8:
        return None
    found = []
    for at in range(offset, last):
        if kind in ("text", "binary"):
            if ends is None or len(ends) < 4 * (last + 1):
                return None
        elif values is None or len(values) < _size(kind, last):
            return None
        value: bytes | None = b"\xc0"
        if bitmap is None or bitmap[at >> 3] >> (at & 7) & 1:
            value = _value(kind, at, values, ends)
        if value is None:
            return None
        found.append(b"\x81\xa1c" + value)
    return found


def _size(kind: str, rows: int) -> int:
    return (rows + 7) // 8 if kind == "bool" else rows * struct.calcsize(_FORMATS.get(kind, "d"))


def _value(kind: str, at: int, values: bytes, ends: bytes) -> bytes | None:
    if kind == "bool":
        return b"\xc3" if values[at >> 3] >> (at & 7) & 1 else b"\xc2"
    if kind in ("text", "binary"):
        start, end = struct.unpack_from("=2i", ends, 4 * at)
        if not 0 <= start <= end <= len(values or b""):
            return None
        run = (values or b"")[start:end]
        return _head(kind == "text", len(run)) + run
    form = f"={_FORMATS.get(kind, 'd')}"
    (number,) = struct.unpack_from(form, values, at * struct.calcsize(form))
    return bytes(msgpack.packb(number))


def _head(is_text: bool, size: int) -> bytes:
    if is_text and size < 32:
        return bytes([0xA0 | size])
    if size < 256:
        return bytes([0xD9 if is_text else 0xC4, size])
    return struct.pack(">BH", 0xDA if is_text else 0xC5, size)
