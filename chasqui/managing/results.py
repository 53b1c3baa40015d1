"""Stored results of jobs."""

from collections.abc import Iterable
from typing import Any, Final

from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.model import payload
from chasqui.model.keys import Keys, check_ids
from chasqui.transport.request import Effect, Plan, commands

#: Results that one command asks for: a server takes a million words, and is held up by fewer.
MGET_KEYS: Final = 5000


def stored(keys: Keys, job_ids: Iterable[str]) -> Plan[list[bytes | None]]:
    """The stored return values, encoded; None where there is none."""
    job_ids = check_ids(job_ids)
    if not job_ids:
        return []
    parts = (job_ids[i : i + MGET_KEYS] for i in range(0, len(job_ids), MGET_KEYS))
    replies: list[Any] = yield (
        commands(("MGET", *map(keys.result, part)), effect=Effect.READ) for part in parts
    )
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return [value for reply in replies for value in reply]


def decoded(keys: Keys, job_ids: Iterable[str]) -> Plan[list[Any]]:
    """The same, decoded."""
    job_ids = check_ids(job_ids)
    values = yield from stored(keys, job_ids)
    return list(map(_decoded, job_ids, values))


def _decoded(job_id: str, value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return payload.decode(value)
    except PayloadTooLargeError as error:
        what = f"the stored result of job {job_id}"
        raise PayloadTooLargeError(error.size, error.limit, what) from None
    except PayloadError as error:
        raise PayloadError(f"the stored result of job {job_id} cannot be read: {error}") from None
