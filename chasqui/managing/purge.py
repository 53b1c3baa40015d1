"""Deletes the jobs of a queue that no worker has begun."""

from chasqui._core.entry import Entry
from chasqui._core.envelope import EnvelopeError
from chasqui.managing.entries import delayed_job, ranges
from chasqui.model.keys import Keys
from chasqui.scripts import managing
from chasqui.transport.request import Effect, Plan, commands

#: Jobs deleted together.
_PAGE = 500


def purge_waiting(keys: Keys) -> Plan[int]:
    """Delete the jobs that wait in the stream now; how many they were.

    If a reply is lost on the way, its jobs are deleted but not counted.
    """
    newest = yield ranges(("XREVRANGE", keys.stream, "+", "-", "COUNT", 1))
    if not newest:
        return 0
    last, start, deleted = newest[0].id, b"-", 0
    while True:
        page: list[Entry] = yield ranges(("XRANGE", keys.stream, start, last, "COUNT", _PAGE))
        if page:
            flags = yield managing.purge(keys, page)
            deleted += flags.count(b"1")
        if len(page) < _PAGE:
            return deleted
        start = b"(" + page[-1].id


def purge_delayed(keys: Keys) -> Plan[int]:
    """Delete the jobs that are delayed now; how many they were."""
    left = yield commands(("ZCARD", keys.delayed), effect=Effect.READ)
    deleted = 0
    while left > 0:
        members: list[bytes] = yield commands(
            ("ZRANGE", keys.delayed, 0, min(left, _PAGE) - 1), effect=Effect.READ
        )
        if not members:
            break
        removed = yield commands(
            *(("ZREM", keys.delayed, member) for member in members), effect=Effect.IDEMPOTENT
        )
        gone = [
            key
            for member, was_there in zip(
                members, removed if len(members) > 1 else [removed], strict=True
            )
            if was_there
            for job_id in (_id_of(member),)
            for key in (keys.didx(job_id), keys.dlid(job_id), keys.unique(job_id))
        ]
        if gone:
            yield commands(("UNLINK", *gone), effect=Effect.IDEMPOTENT)
        deleted += len(gone) // 3
        left -= len(members)
    return deleted


def _id_of(member: bytes) -> str:
    """The job's id; empty if the member cannot be read."""
    try:
        return delayed_job(member)[1].id
    except EnvelopeError:
        return ""
