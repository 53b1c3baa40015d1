from typing import Any

def pack(value: object, max_bytes: int) -> bytes | None: ...
def pack_rows(
    entries: list[Any],
    start: int,
    max_bytes: int,
    payloads: list[bytes],
    names: list[str],
    data: list[Any],
    special: list[int],
) -> int: ...
def unpack(data: bytes) -> Any: ...
