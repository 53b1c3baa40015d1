from typing import Any, Final

from chasqui._core.ulid import UlidFactory

DELAYED: Final = 1
UNIQUE: Final = 2
RELATIVE: Final = 4

def read_options(
    entries: list[Any],
    special: list[int],
    at: int,
    most_ahead_ms: int,
    encoded: dict[tuple[int | None, int], tuple[bytes | None, object]],
    ids: list[str | None],
    retries: list[bytes | None],
    kinds: list[int],
    dues: list[int],
) -> int: ...
def draw_delayed_ids(
    ulids: UlidFactory, now_ms: int, kinds: list[int], ids: list[str | None]
) -> list[str | None]: ...
def job_keys(
    kinds: list[int],
    ids: list[str | None],
    didx: bytes,
    trace: bytes | None,
    unique: bytes,
    dlid: bytes,
    result: bytes,
) -> list[bytes]: ...
