from typing import Any

class Refused(ValueError):
    why: str
    path: list[Any]
    value: Any
    size: int

def pack(value: object, max_bytes: int) -> bytes: ...
def pack_rows(
    entries: list[Any],
    start: int,
    max_bytes: int,
    payloads: list[bytes],
    names: list[str],
    data: list[Any],
    special: list[int],
) -> int: ...
def pack_calls(
    calls: list[Any],
    kind: type,
    task: object,
    max_bytes: int,
    payloads: list[bytes],
    data: list[Any],
) -> int: ...
def unpack(data: bytes) -> Any: ...
