from collections.abc import Sequence
from typing import TypeAlias

from chasqui._core.buffer import CommandBuffer
from chasqui._core.entry import Entry
from chasqui._core.ulid import UlidFactory

Argument: TypeAlias = bytes | str | int | float

def evalsha_jobs(
    buffer: CommandBuffer,
    sha: bytes,
    keys: Sequence[bytes],
    arguments: Sequence[Argument],
    ulids: UlidFactory,
    now_ms: int,
    payloads: list[bytes],
    names: str | list[str] | None = "",
    ids: list[str | None] | None = None,
    retries: list[bytes | None] | None = None,
    due_ms: list[int] | None = None,
) -> list[str]: ...
def slices_by_size(payloads: list[bytes], most_jobs: int, most_bytes: int) -> list[slice]: ...
def common_name(names: list[str]) -> str | None: ...
def pack_jobs(
    ulids: UlidFactory,
    now_ms: int,
    payloads: list[bytes],
    ids: list[str | None] | None = None,
    retries: list[bytes | None] | None = None,
) -> bytes: ...
def xadd_event(
    buffer: CommandBuffer,
    key: bytes,
    event: bytes,
    job_id: str,
    ts_ms: int,
    name: str,
    fields: Sequence[Argument] | None = None,
) -> None: ...
def xadd_run_event(
    buffer: CommandBuffer,
    key: bytes,
    event: bytes,
    entry: Entry,
    ts_ms: int,
    attempt: int,
    duration_us: int = -1,
) -> None: ...
def xackdel(buffer: CommandBuffer, key: bytes, group: bytes, ids: list[bytes]) -> None: ...
def evalsha(
    buffer: CommandBuffer, sha: bytes, keys: Sequence[bytes], arguments: Sequence[Argument]
) -> None: ...
def xreadgroup(
    buffer: CommandBuffer,
    group: bytes,
    consumer: bytes,
    key: bytes,
    *,
    count: int | None = None,
    block_ms: int | None = None,
    claim_min_idle_ms: int | None = None,
    last_id: bytes = b">",
) -> None: ...
