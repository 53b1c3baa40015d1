"""Dead jobs as values, and which of them a caller means."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from chasqui._core.entry import Entry
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
    shown,
)
from chasqui.model.payload import decode
from chasqui.producing.job_options import unix_ms

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

    @classmethod
    def of(cls, entry: Entry) -> "DeadJob":
        extra = {
            name: value.decode(errors="replace") for name, value in (entry.extra or {}).items()
        }
        return cls(
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

    @property
    def data(self) -> Any:
        """The payload, decoded. Raises PayloadError where that cannot be done."""
        if self.payload is None:
            raise PayloadError(f"the envelope of {self.dlq_id} cannot be read: {self.reason}")
        return decode(self.payload)

    @property
    def added_ms(self) -> int:
        """When it was buried, in unix milliseconds by the server's clock."""
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
    """Which dead jobs are meant; a condition that is None lets all through."""

    #: As they are listed, `dlq_id`.
    ids: Sequence[str] | None = None
    name: str | None = None
    reason: str | None = None
    #: By the time at which they were buried.
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
                    or max(id_order(one)) > _MAX_ID_PART
                ):
                    raise ValueError(f"ids[{i}] must be the id of a dead job, got {shown(one)}")
            # Oldest first, as without ids.
            object.__setattr__(self, "ids", sorted(set(ids), key=id_order))
        for name in ("name", "reason"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a str, got {type(text).__name__}")
        for name in ("since", "until"):
            moment = getattr(self, name)
            if moment is not None and not isinstance(moment, datetime):
                raise TypeError(f"{name} must be a datetime, got {type(moment).__name__}")

    def takes(self, job: DeadJob) -> bool:
        """Whether the job meets every condition but `ids`, by which the reader goes."""
        return (
            (self.name is None or job.name == self.name)
            and (self.reason is None or job.reason == self.reason)
            and (self.since is None or job.added_ms >= unix_ms(self.since))
            and (self.until is None or job.added_ms <= unix_ms(self.until))
            and (self.where is None or bool(self.where(job)))
        )

    def jobs(self, entries: Iterable[Entry]) -> Iterator[DeadJob]:
        """Those among the entries that are meant."""
        return (job for job in map(DeadJob.of, entries) if self.takes(job))

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


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def id_order(dlq_id: str) -> tuple[int, int]:
    """What sorts DLQ ids oldest first."""
    ms, _, sequence = dlq_id.partition("-")
    return int(ms), int(sequence)


EVERYTHING: Final = Selection()
