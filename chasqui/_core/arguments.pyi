from typing import Any

class Arguments:
    def __init__(
        self,
        names: tuple[str, ...],
        types: tuple[type | None, ...],
        required: tuple[bool, ...],
        positional: int,
    ) -> None: ...
    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None: ...
    def fit(self, data: object) -> bool: ...

class BoundCall:
    task: Any
    data: Any
    def __init__(self, task: Any, data: Any) -> None: ...
