from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "bool", "int8", "int16", "int32", "int64", "float", "double", "text", "binary", "packed"
]
#: Name, kind, offset of the first row, then buffers or None: bitmap, values, ends.
Source: TypeAlias = tuple[str, Kind, int, Any, Any, Any]

def pack_maps(rows: int, columns: list[Source]) -> list[bytes]: ...
