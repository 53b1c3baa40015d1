from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "nothing", "bool", "int8", "int16", "int32", "int64", "float", "double", "text", "binary",
    "date", "moment", "local", "clock", "decimal", "list", "map", "struct",
]  # fmt: skip
#: Name, kind, offset of the first row, then buffers or None: bitmap, values, ends. Of a decimal
#: also its scale; of what has columns inside, `(rows, columns)`.
Source: TypeAlias = tuple[str, Kind, int, Any, Any, Any] | tuple[str, Kind, int, Any, Any, Any, Any]

class Unkeepable(ValueError):
    column: str

def pack_maps(rows: int, columns: list[Source]) -> list[bytes]: ...
def pack_values(rows: int, column: Source) -> list[bytes]: ...
