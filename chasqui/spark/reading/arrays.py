"""Arrow arrays, made of the core's buffers without a copy, or of lists."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from chasqui._core.column import MAX_MS


def filled(rows: int, kind: Any, buffers: Sequence[bytes | None]) -> Any:
    """An array of a column that the core has filled; nothing is copied or checked."""
    lent = [None if one is None else pa.py_buffer(one) for one in buffers]
    return pa.Array.from_buffers(kind, rows, lent)


def maps(rows: int, kind: Any, extras: tuple[bytes, Any, Any]) -> Any:
    """An array of maps from text to text."""
    ends, names, values = extras
    count = len(names[1]) // 4 - 1
    return pa.MapArray.from_arrays(
        filled(rows + 1, pa.int32(), (None, ends)),
        filled(count, pa.string(), names),
        filled(count, pa.string(), values),
        type=kind,
    )


def texts(values: Sequence[bytes | str | None]) -> Any:
    """Text from UTF-8 bytes; other bytes become replacement characters."""
    try:
        return pa.array(values, pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [one.decode(errors="replace") if isinstance(one, bytes) else one for one in values],
            pa.string(),
        )


def moments(values_ms: Iterable[int | None], kind: Any) -> Any:
    """Times from unix milliseconds."""
    return pa.array(
        [None if ms is None or not 0 <= ms <= MAX_MS else ms * 1000 for ms in values_ms], kind
    )
