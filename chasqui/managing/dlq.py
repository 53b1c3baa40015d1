"""The dead-letter queue: looking through it, moving jobs back, deleting them. Plans, no I/O."""

from typing import Final

from chasqui._core.command import slices_by_size
from chasqui._core.entry import Entry
from chasqui.managing.dead_jobs import EVERYTHING, DeadJob, Selection, id_order
from chasqui.managing.entries import by_id, ranges
from chasqui.model.config import MAX_COUNT, check_flag, check_limit
from chasqui.model.keys import FLOW, Keys
from chasqui.producing.new_jobs import CHUNK_BYTES, CHUNK_JOBS
from chasqui.producing.operations import QueueOperations
from chasqui.scripts import managing
from chasqui.transport.request import Plan

#: Entries read at a time: a few first, more while they are small.
PAGE: Final = 500
FIRST_PAGE: Final = 16
#: About as many bytes.
PAGE_BYTES: Final = 4 * CHUNK_BYTES


def peek(keys: Keys, limit: int, selection: Selection = EVERYTHING) -> Plan[list[DeadJob]]:
    """The oldest dead jobs that are meant, at most `limit`."""
    check_limit(limit)
    found: list[DeadJob] = []
    pages = Pages(keys, selection, limit)
    while len(found) < limit and not pages.are_over:
        found += selection.jobs((yield from pages.read(len(found))))
    return found[:limit]


def find(keys: Keys, job_id: str, since_ms: int, until_ms: int) -> Plan[DeadJob | None]:
    """A job's latest entry of those that came in this time, by the server's clock.

    It reads back from the end of that time, a few entries first: if you know when a job died, it
    is found there, however many died before.
    """
    low, high, count = max(0, since_ms), str(until_ms), FIRST_PAGE
    while True:
        entries: list[Entry] = yield ranges(("XREVRANGE", keys.dlq, high, low, "COUNT", count))
        for entry in entries:
            if entry.job_id == job_id:
                return DeadJob.of(entry)
        if len(entries) < count:
            return None
        high, count = f"({entries[-1].id.decode()}", _next_count(count, entries)


class Pages:
    """The entries that may be meant, oldest first, page by page; none behind the id `last`.

    The server bounds a page by entries, not by bytes: the size of each page says how many entries
    the next one may have.
    """

    def __init__(
        self, keys: Keys, selection: Selection, limit: int = MAX_COUNT, last: str | None = None
    ) -> None:
        #: There is nothing more to read.
        self.are_over = False
        self._keys = keys
        self._selection = selection
        self._limit = limit
        self._last = last
        self._after: str | None = None
        self._count = FIRST_PAGE
        #: How many entries were asked for so far.
        self._asked = 0

    def read(self, done: int = 0) -> Plan[list[Entry]]:
        """The next page. `done` is how many entries before it count towards the limit."""
        count = self._count
        if not self._selection.looks_inside:
            # As many as are still wanted, and as many again as were asked for in vain.
            count = min(count, self._limit - done + self._asked - done)
        ids = self._selection.ids
        if ids is None:
            entries = yield from self._read_range(count)
            self.are_over = len(entries) < count
        else:
            found = yield from by_id(self._keys.dlq, ids[self._asked : self._asked + count])
            entries = [entry for entry in found if entry is not None]
            self.are_over = self._asked + count >= len(ids)
        self._asked += count
        self._count = _next_count(self._count, entries)
        return entries

    def _read_range(self, count: int) -> Plan[list[Entry]]:
        low, high = self._selection.bounds
        start = low if self._after is None else f"({self._after}"
        last = self._last
        if last is not None and (high == "+" or int(high) >= id_order(last)[0]):
            high = last
        entries: list[Entry] = yield ranges(("XRANGE", self._keys.dlq, start, high, "COUNT", count))
        if entries:
            self._after = entries[-1].id.decode()
        return entries


def _next_count(count: int, entries: list[Entry]) -> int:
    """How many entries to read after these: twice as many, as far as their size allows."""
    size = sum(map(_size, entries)) or 1
    return max(1, min(2 * count, PAGE, PAGE_BYTES * max(1, len(entries)) // size))


def _size(entry: Entry) -> int:
    return len(entry.envelope or b"") + sum(map(len, (entry.extra or {}).values()))


def replay(
    operations: QueueOperations,
    limit: int,
    selection: Selection = EVERYTHING,
    *,
    dry_run: bool = False,
) -> Plan[int]:
    """Move dead jobs back into the stream, oldest first, with no attempt counted; how many.

    Those whose envelope cannot be read stay in the DLQ, and those that stand for the end of a flow:
    they come back by themselves once what failed before them succeeds. With `dry_run` jobs are only
    counted.
    """
    pages = yield from _all_until_now(operations.keys, limit, selection, dry_run)
    done = 0
    while done < limit and not pages.are_over:
        page = yield from pages.read(done)
        page = [one for one in page if _is_whole(one) and selection.takes(DeadJob.of(one))]
        del page[limit - done :]
        if dry_run:
            done += len(page)
            continue
        for part in slices_by_size([one.envelope or b"" for one in page], CHUNK_JOBS, CHUNK_BYTES):
            key = operations.encoder.reply_key()
            done += yield managing.replay(
                operations.keys, key, page[part], operations.max_stream_len
            )
        del page  # before the next one is read
    return done


def _is_whole(entry: Entry) -> bool:
    return entry.fault is None and FLOW not in (entry.extra or ())


def delete(
    keys: Keys, limit: int, selection: Selection = EVERYTHING, *, dry_run: bool = False
) -> Plan[int]:
    """Delete dead jobs for good, oldest first; how many. Their ids may be used again at once.

    If a reply is lost on the way, the jobs that it was about are gone but not counted.
    """
    pages = yield from _all_until_now(keys, limit, selection, dry_run)
    done = 0
    while done < limit and not pages.are_over:
        page = yield from pages.read(done)
        page = [one for one in page if selection.takes(DeadJob.of(one))][: limit - done]
        if page:
            done += len(page) if dry_run else (yield managing.delete_dead(keys, page))
        del page  # before the next one is read
    return done


def _all_until_now(keys: Keys, limit: int, selection: Selection, dry_run: bool) -> Plan[Pages]:
    """What is dead now: a job that is moved and fails again must not be met again."""
    check_limit(limit)
    check_flag("dry_run", dry_run)
    newest: list[Entry] = yield ranges(("XREVRANGE", keys.dlq, "+", "-", "COUNT", 1))
    return Pages(keys, selection, limit, newest[0].id.decode() if newest else "0-0")
