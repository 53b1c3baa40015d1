from typing import Any, Generic, TypeVar

T = TypeVar("T")

class InstanceFactory(Generic[T]):
    def __init__(self, cls: type[T]) -> None: ...
    def make(self, count: int, *columns: Any) -> list[T]: ...
