from collections.abc import Callable
from typing import final

@final
class UlidFactory:
    def __init__(self, entropy: Callable[[int], bytes] = ...) -> None: ...
    def next(self, now_ms: int) -> str: ...
