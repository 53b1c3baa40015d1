"""The dead-letter queue: looking through it, moving jobs back, deleting them. Plans, no I/O."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from chasqui import scripts
from chasqui._core.command import cut
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.adding import ANSWER_TTL_S, CHUNK_BYTES, CHUNK_JOBS
from chasqui.model.config import MAX_COUNT
from chasqui.producing.job_options import unix_ms
from chasqui.errors import PayloadError
from chasqui.model.keys import (
    ATTEMPTS,
    CONSUMER,
    DETAIL,
    ERROR,
    FAILED_AT,
    REASON,
    SOURCE_ID,
    TRACEBACK,
    TRACEPARENT,
    Keys,
    shown,
)
from chasqui.model.payload import decode
from chasqui.plans import Plans, check_flag, check_limit
from chasqui.transport.request import Effect, Plan, Request, commands

#: Entries read at a time: a few first, more while they are small.
PAGE: Final = 500
FIRST_PAGE: Final = 16
#: About as many bytes.
PAGE_BYTES: Final = 4 * CHUNK_BYTES
# An entry is here because it could not run: it is listed whatever its size.
_ANY_SIZE = 1 << 40
_DLQ_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_MAX_ID_PART = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DeadJob:
    """One entry of the dead-letter queue."""

    dlq_id: str
    #: The entry's id in the stream that it came from.
    source_id: str
    reason: str
    detail: str | None
    #: The envelope as it was.
    envelope: bytes
    name: str
    #: What follows is empty or None where the envelope could not be read.
    job_id: str
    attempt: int
    payload: bytes | None
    #: Written by our workers only: type and message, the end of the traceback, runs, when, by whom.
    error: str | None = None
    traceback: str | None = None
    attempts: int | None = None
    failed_at_ms: int | None = None
    consumer: str | None = None

    @property
    def data(self) -> Any:
        """The payload, decoded. Raises PayloadError where that cannot be done."""
        if self.payload is None:
            raise PayloadError(f"the envelope of {self.dlq_id} cannot be read: {self.reason}")
        return decode(self.payload)

    @property
    def added_ms(self) -> int:
        """When it came here, in unix milliseconds by the server's clock."""
        return int(self.dlq_id.partition("-")[0])

    def to_dict(self) -> dict[str, Any]:
        """chasquimq's form; `payload` is the envelope there."""
        return {
            "dlq_id": self.dlq_id,
            "source_id": self.source_id,
            "reason": self.reason,
            "detail": self.detail,
            "payload": self.envelope,
            "name": self.name,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead jobs are meant; what is None does not narrow it down."""

    #: As they are listed, `dlq_id`.
    ids: Sequence[str] | None = None
    name: str | None = None
    reason: str | None = None
    #: By the time they were dead-lettered.
    since: datetime | None = None
    until: datetime | None = None
    where: Callable[[DeadJob], bool] | None = None

    def __post_init__(self) -> None:
        if self.ids is not None:
            if isinstance(self.ids, str | Mapping) or not isinstance(self.ids, Iterable):
                raise TypeError(f"ids must be a list of DLQ ids, got {type(self.ids).__name__}")
            ids = list(self.ids)
            for i, one in enumerate(ids):
                if (
                    not isinstance(one, str)
                    or not _DLQ_ID.fullmatch(one)
                    or max(_id_order(one)) > _MAX_ID_PART
                ):
                    raise ValueError(f"ids[{i}] must be the id of a dead job, got {shown(one)}")
            # Oldest first, as without ids.
            object.__setattr__(self, "ids", sorted(set(ids), key=_id_order))
        for name in ("name", "reason"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a str, got {type(text).__name__}")
        for name in ("since", "until"):
            moment = getattr(self, name)
            if moment is not None and not isinstance(moment, datetime):
                raise TypeError(f"{name} must be a datetime, got {type(moment).__name__}")

    def takes(self, job: DeadJob) -> bool:
        return (
            (self.name is None or job.name == self.name)
            and (self.reason is None or job.reason == self.reason)
            and (self.since is None or job.added_ms >= unix_ms(self.since))
            and (self.until is None or job.added_ms <= unix_ms(self.until))
            and (self.where is None or bool(self.where(job)))
        )

    def jobs(self, entries: Iterable[Entry]) -> Iterator[DeadJob]:
        """Those among the entries that are meant."""
        return (job for job in map(_dead_job, entries) if self.takes(job))

    @property
    def looks_inside(self) -> bool:
        """Whether an entry must be read to know if it is meant."""
        return any(one is not None for one in (self.name, self.reason, self.where))

    @property
    def bounds(self) -> tuple[str, str]:
        """The range of DLQ ids that the times allow."""
        low = "-" if self.since is None else str(max(0, unix_ms(self.since)))
        high = "+" if self.until is None else str(max(0, unix_ms(self.until)))
        return low, high


EVERYTHING: Final = Selection()


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

    Read back from its end, a few entries first: whoever knows when a job died finds it there,
    however many died before.
    """
    low, high, count = max(0, since_ms), str(until_ms), FIRST_PAGE
    while True:
        entries: list[Entry] = yield commands(
            ("XREVRANGE", keys.dlq, high, low, "COUNT", count),
            effect=Effect.READ,
            builder=EntryBuilder("range", _ANY_SIZE),
        )
        for entry in entries:
            if entry.job_id == job_id:
                return _dead_job(entry)
        if len(entries) < count:
            return None
        high, count = f"({entries[-1].id.decode()}", _next_count(count, entries)


class Pages:
    """The entries that may be meant, oldest first, page by page.

    The server bounds a page by entries, not by bytes: each tells how many the next may have.
    What came later than `last` is not looked at.
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
        """The next of them. `done` is how many of those before count towards the limit."""
        count = self._count
        if not self._selection.looks_inside:
            # As many as are still wanted, and as many again as were asked for in vain.
            count = min(count, self._limit - done + self._asked - done)
        ids = self._selection.ids
        if ids is None:
            entries = yield from self._read_range(count)
            self.are_over = len(entries) < count
        else:
            entries = yield from self._read_ids(ids[self._asked : self._asked + count])
            self.are_over = self._asked + count >= len(ids)
        self._asked += count
        self._count = _next_count(self._count, entries)
        return entries

    def _read_range(self, count: int) -> Plan[list[Entry]]:
        low, high = self._selection.bounds
        start = low if self._after is None else f"({self._after}"
        last = self._last
        if last is not None and (high == "+" or int(high) >= _id_order(last)[0]):
            high = last
        entries: list[Entry] = yield commands(
            ("XRANGE", self._keys.dlq, start, high, "COUNT", count),
            effect=Effect.READ,
            builder=EntryBuilder("range", _ANY_SIZE),
        )
        if entries:
            self._after = entries[-1].id.decode()
        return entries

    def _read_ids(self, ids: Sequence[str]) -> Plan[list[Entry]]:
        if not ids:
            return []
        replies = yield commands(
            *(("XRANGE", self._keys.dlq, one, one) for one in ids),
            effect=Effect.READ,
            builder=EntryBuilder("range", _ANY_SIZE),
        )
        return [entry for reply in (replies if len(ids) > 1 else [replies]) for entry in reply]


def _next_count(count: int, entries: list[Entry]) -> int:
    """How many entries to read after these: twice as many, as far as their size allows."""
    size = sum(map(_size, entries)) or 1
    return max(1, min(2 * count, PAGE, PAGE_BYTES * max(1, len(entries)) // size))


def _size(entry: Entry) -> int:
    return len(entry.envelope or b"") + sum(map(len, (entry.extra or {}).values()))


def _last_id(keys: Keys) -> Plan[str]:
    """The newest entry's id: a job that is moved and fails again must not be met again."""
    newest: list[Entry] = yield commands(
        ("XREVRANGE", keys.dlq, "+", "-", "COUNT", 1),
        effect=Effect.READ,
        builder=EntryBuilder("range", _ANY_SIZE),
    )
    return newest[0].id.decode() if newest else "0-0"


def replay(
    plans: Plans, limit: int, selection: Selection = EVERYTHING, *, dry_run: bool = False
) -> Plan[int]:
    """Move dead jobs back into the stream, oldest first, with no attempt counted; how many.

    Those whose envelope cannot be read stay where they are. With `dry_run` they are only counted.
    """
    check_limit(limit)
    check_flag("dry_run", dry_run)
    keys = plans.keys
    done = 0
    pages = Pages(keys, selection, limit, last=(yield from _last_id(keys)))
    while done < limit and not pages.are_over:
        page = yield from pages.read(done)
        meant = [
            entry for entry in page if entry.fault is None and selection.takes(_dead_job(entry))
        ]
        meant = meant[: limit - done]
        if dry_run:
            done += len(meant)
        else:
            for part in _parts(meant):
                done += yield scripts.call(
                    scripts.REPLAY,
                    [
                        *(keys.dlq, keys.stream, plans.numbering.answer_key()),
                        *(keys.result(entry.job_id) for entry in part),
                    ],
                    [plans.maxlen, ANSWER_TTL_S, *_words(part)],
                    Effect.IDEMPOTENT,
                )
        del page, meant  # before the next are read
    return done


def delete(
    keys: Keys, limit: int, selection: Selection = EVERYTHING, *, dry_run: bool = False
) -> Plan[int]:
    """Delete dead jobs for good, oldest first; how many. Their ids may be used again at once.

    Should a reply be lost on the way, the jobs that it was about are gone but not counted.
    """
    check_limit(limit)
    check_flag("dry_run", dry_run)
    done = 0
    pages = Pages(keys, selection, limit, last=(yield from _last_id(keys)))
    while done < limit and not pages.are_over:
        page = yield from pages.read(done)
        meant = [entry for entry in page if selection.takes(_dead_job(entry))][: limit - done]
        request = _deletion(keys, meant)
        count = len(meant)
        del page, meant  # before the next are read
        done += (yield request) if count and not dry_run else count
    return done


def _deletion(keys: Keys, entries: list[Entry]) -> Request:
    names, words = [keys.dlq, keys.unique("")], list[bytes | int]()
    for entry in entries:
        names += (keys.unique(entry.job_id), keys.dlid(entry.job_id))
        words += (entry.id, entry.created_at_ms if entry.fault is None else b"")
    return scripts.call(scripts.DELETE_DEAD, names, words, Effect.IDEMPOTENT)


def _parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    for part in cut([entry.envelope or b"" for entry in entries], CHUNK_JOBS, CHUNK_BYTES):
        yield entries[part]


def _words(entries: list[Entry]) -> Iterator[bytes | str]:
    for entry in entries:
        yield entry.id
        yield entry.with_attempt(0)
        yield entry.name
        yield (entry.extra or {}).get(TRACEPARENT, b"")


def _dead_job(entry: Entry) -> DeadJob:
    extra = {name: value.decode(errors="replace") for name, value in (entry.extra or {}).items()}
    return DeadJob(
        dlq_id=entry.id.decode(),
        source_id=extra.get(SOURCE_ID, ""),
        reason=extra.get(REASON, ""),
        detail=extra.get(DETAIL),
        envelope=entry.envelope or b"",
        name=entry.name,
        job_id=entry.job_id,
        attempt=entry.attempt,
        payload=entry.payload if entry.fault is None else None,
        error=extra.get(ERROR),
        traceback=extra.get(TRACEBACK),
        attempts=_number(extra.get(ATTEMPTS)),
        failed_at_ms=_number(extra.get(FAILED_AT)),
        consumer=extra.get(CONSUMER),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _id_order(dlq_id: str) -> tuple[int, int]:
    ms, _, sequence = dlq_id.partition("-")
    return int(ms), int(sequence)
