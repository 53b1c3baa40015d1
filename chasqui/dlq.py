"""The dead-letter queue: looking through it, moving jobs back, deleting them. Plans, no I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chasqui import scripts
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.errors import PayloadError
from chasqui.keys import (
    ATTEMPTS,
    CONSUMER,
    DETAIL,
    ERROR,
    FAILED_AT,
    REASON,
    SOURCE_ID,
    TRACEBACK,
    Keys,
)
from chasqui.payload import decode
from chasqui.plans import CHUNK_JOBS, Plans
from chasqui.request import Effect, Plan, commands

#: Entries read at a time.
PAGE: Final = 500
# An entry is here because it could not run: it is listed whatever its size.
_ANY_SIZE = 1 << 40


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

    ids: Sequence[str] | None = None
    name: str | None = None
    reason: str | None = None
    #: By the time they were dead-lettered.
    since: datetime | None = None
    until: datetime | None = None
    where: Callable[[DeadJob], bool] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ids, str):
            raise TypeError("ids must be a list of DLQ ids, got a single str")
        for name in ("since", "until"):
            moment = getattr(self, name)
            if moment is not None and not isinstance(moment, datetime):
                raise TypeError(f"{name} must be a datetime, got {type(moment).__name__}")

    def takes(self, job: DeadJob) -> bool:
        return (
            (self.ids is None or job.dlq_id in self.ids)
            and (self.name is None or job.name == self.name)
            and (self.reason is None or job.reason == self.reason)
            and (self.where is None or bool(self.where(job)))
        )

    @property
    def bounds(self) -> tuple[str, str]:
        """The range of DLQ ids that the times allow."""
        low = "-" if self.since is None else str(_ms(self.since))
        high = "+" if self.until is None else str(_ms(self.until))
        return low, high


EVERYTHING: Final = Selection()


def peek(keys: Keys, limit: int, selection: Selection = EVERYTHING) -> Plan[list[DeadJob]]:
    """The oldest dead jobs that are meant, at most `limit`."""
    found: list[DeadJob] = []
    after: str | None = None
    while len(found) < limit:
        page, after = yield from read_page(keys, selection, after, min(PAGE, limit))
        found += [job for job, _ in page if selection.takes(job)]
        if after is None:
            break
    return found[:limit]


def read_page(
    keys: Keys, selection: Selection, after: str | None, count: int = PAGE
) -> Plan[tuple[list[tuple[DeadJob, Entry]], str | None]]:
    """The next `count` entries behind the id `after`, and the id to go on from (None: the end)."""
    low, high = selection.bounds
    start = low if after is None else f"({after}"
    entries: list[Entry] = yield commands(
        ("XRANGE", keys.dlq, start, high, "COUNT", count),
        effect=Effect.READ,
        builder=EntryBuilder("range", _ANY_SIZE),
    )
    page = [(_dead_job(entry), entry) for entry in entries]
    return page, page[-1][0].dlq_id if len(page) == count else None


def replay(
    plans: Plans, limit: int, selection: Selection = EVERYTHING, *, dry_run: bool = False
) -> Plan[int]:
    """Move dead jobs back into the stream, oldest first, with no attempt counted; how many.

    Those whose envelope cannot be read stay where they are. With `dry_run` they are only counted.
    Should a reply be lost on the way, the repeat moves nothing twice but counts those jobs as gone.
    """
    done = 0
    after: str | None = None
    while done < limit:
        page, after = yield from read_page(plans.keys, selection, after)
        meant = [entry for job, entry in page if entry.fault is None and selection.takes(job)]
        meant = meant[: limit - done]
        if dry_run:
            done += len(meant)
        else:
            for part in _parts(meant):
                done += yield scripts.call(
                    scripts.REPLAY,
                    [plans.keys.dlq, plans.keys.stream],
                    [plans.maxlen, *_triples(part)],
                    Effect.IDEMPOTENT,
                )
        if after is None:
            break
    return done


def delete(
    keys: Keys, limit: int, selection: Selection = EVERYTHING, *, dry_run: bool = False
) -> Plan[int]:
    """Delete dead jobs for good, oldest first; how many."""
    done = 0
    after: str | None = None
    while done < limit:
        page, after = yield from read_page(keys, selection, after)
        meant = [job.dlq_id for job, _ in page if selection.takes(job)][: limit - done]
        if meant and not dry_run:
            done += yield commands(("XDEL", keys.dlq, *meant), effect=Effect.IDEMPOTENT)
        else:
            done += len(meant)
        if after is None:
            break
    return done


def _parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    for start in range(0, len(entries), CHUNK_JOBS):
        yield entries[start : start + CHUNK_JOBS]


def _triples(entries: list[Entry]) -> Iterator[bytes | str]:
    for entry in entries:
        yield entry.id
        yield entry.with_attempt(0)
        yield entry.name


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


def _ms(moment: datetime) -> int:
    """A naive time is UTC, as everywhere."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
