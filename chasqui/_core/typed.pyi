from typing import Any, TypeAlias

from chasqui._core.maps import Kind

#: Name, kind, the word for its type, whether it may be null, precision, scale, shapes inside.
Shape: TypeAlias = tuple[str, Kind, str, bool, int, int, list["Shape"]]
#: Rows, Arrow's buffers, columns inside.
Unpacked: TypeAlias = tuple[int, list[bytes | None], list["Unpacked"]]

def unpack_column(
    shape: Shape, rows: int, offset: int, bitmap: Any, ends: Any, values: Any
) -> tuple[Unpacked, dict[int, str]]: ...
