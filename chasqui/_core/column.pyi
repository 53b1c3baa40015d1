from typing import Final, final

MAX_MS: Final[int]

@final
class Column:
    def __init__(self, name: str, kind: str, field: bytes | None = None) -> None: ...
    @property
    def name(self) -> str: ...
