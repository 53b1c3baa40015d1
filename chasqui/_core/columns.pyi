from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias, final

from chasqui._core.envelope import RetryTuple
from chasqui._core.reply import Builder

Kind: TypeAlias = Literal["text", "binary", "int32", "int64", "moment", "ulid", "skipped"]
Buffers: TypeAlias = tuple[bytes | None, ...]

class Columns:
    rows: int
    columns: dict[str, Buffers]
    extras: tuple[bytes, Buffers, Buffers] | None
    retries: dict[int, RetryTuple]
    corrupt: dict[int, bytes]

@final
class ColumnBuilder(Builder):
    def __init__(
        self,
        fields: Iterable[tuple[str, Kind, bytes]],
        parts: Collection[str] = (),
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def size(self) -> int: ...
    def take(self) -> Columns: ...
