"""Reads jobs that are to be shown or deleted. They will not run, so they may have any size."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import Envelope, decode_delayed_member, decode_envelope
from chasqui.transport.request import Effect, Plan, Request, commands

#: More bytes than Redis stores in one value.
ANY_SIZE: Final = 1 << 40
#: Entries read at a time in a search.
PAGE: Final = 1000


def ranges(*calls: tuple[Any, ...]) -> Request:
    """XRANGE and XREVRANGE calls. The reply is a list of entries; with several calls, a list of
    such lists."""
    return commands(*calls, effect=Effect.READ, builder=EntryBuilder("range", ANY_SIZE))


def by_id(stream: bytes, ids: Sequence[bytes | str]) -> Plan[list[Entry | None]]:
    """The entries with these ids, in one round trip; None for an entry that is gone."""
    if not ids:
        return []
    replies = yield ranges(*(("XRANGE", stream, one, one) for one in ids))
    return [next(iter(found), None) for found in (replies if len(ids) > 1 else [replies])]


def search(
    stream: bytes, job_ids: Collection[str], start: bytes = b"-", end: bytes = b"+"
) -> Plan[Entry | None]:
    """The first entry from `start` to `end` whose job is one of these. A stream has no index by
    job id, so this reads page by page."""
    while True:
        page: list[Entry] = yield ranges(("XRANGE", stream, start, end, "COUNT", PAGE))
        for entry in page:
            if entry.job_id in job_ids:
                return entry
        if len(page) < PAGE:
            return None
        start = b"(" + page[-1].id


def delayed_job(member: bytes) -> tuple[str, Envelope]:
    """Name and envelope of a job, from its member of the delayed set. Raises EnvelopeError."""
    name, encoded = decode_delayed_member(member)
    return name, decode_envelope(encoded)
