"""Jobs to add, as columns, and what an add came to."""

import time
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from chasqui._core.command import slices_by_size
from chasqui._core.instances import InstanceFactory
from chasqui._core.options import DELAYED, RELATIVE, draw_delayed_ids
from chasqui._core.ulid import UlidFactory
from chasqui.model.job import ResultSource, job_factory

T = TypeVar("T")

#: The most jobs in one script call: enough to be cheap, few enough not to block the server.
CHUNK_JOBS: Final = 250
CHUNK_BYTES: Final = 1 << 20

#: One for the process: ids of all producers rise together.
ulids = UlidFactory()


@dataclass(slots=True)
class NewJobs:
    """Jobs to add, as columns. `flags` and `due_ms` are None if no job has a delay or an id of its
    own: such jobs are plain, and add.lua takes them."""

    payloads: list[bytes]
    names: str | list[str]  # one for all of them, or one each
    ids: list[str | None] | None = None
    retries: list[bytes | None] | None = None
    flags: list[int] | None = None  # DELAYED + UNIQUE + RELATIVE, per job
    due_ms: list[int] | None = None  # since 1970, or from now if RELATIVE
    data: list[Any] | None = None  # what the payloads were made of: callers change their lists
    trace: str = ""  # the trace context of all of them; needs `flags` and `due_ms`
    owner: ResultSource | None = None  # where callers wait for the jobs that an add returns
    factory: "InstanceFactory[Any]" = job_factory  # of those jobs

    def jobs(self, ids: list[str], created_at_ms: int) -> list[Any]:
        """The jobs that an add returns, in order; none if `data` is None."""
        if self.data is None:
            return []
        return self.factory.make(
            len(ids), ids, self.names, self.data, 0, created_at_ms, True, self.owner, None
        )

    def draw_ids(self, now_ms: int) -> list[str]:
        """Give every job its final id; the ids."""
        given = self.ids or [None] * len(self.payloads)
        ids = [ulids.next(now_ms) if one is None else one for one in given]
        self.ids = list(ids)
        return ids

    def draw_delayed_ids(self, now_ms: int) -> None:
        """Give delayed jobs their ids. These are part of their keys, so the frame needs them."""
        if self.flags is not None:
            ids: list[str | None] = self.ids or [None] * len(self.payloads)
            self.ids = draw_delayed_ids(ulids, now_ms, self.flags, ids)

    def slices(self, most_jobs: int = CHUNK_JOBS) -> list[slice]:
        """Where to cut the jobs into chunks."""
        return slices_by_size(self.payloads, most_jobs, CHUNK_BYTES)

    @property
    def is_chunk(self) -> bool:
        """Whether all of them fit into one chunk."""
        return len(self.payloads) <= CHUNK_JOBS and len(self.slices()) == 1

    def chunk(self, part: slice) -> "NewJobs":
        """The jobs of one slice, without their data."""
        if part.stop - part.start == len(self.payloads):
            return self
        return NewJobs(
            self.payloads[part],
            self.names if isinstance(self.names, str) else self.names[part],
            _cut(self.ids, part),
            _cut(self.retries, part),
            _cut(self.flags, part),
            _cut(self.due_ms, part),
            trace=self.trace,
        )

    def immediate(self) -> int:
        """How many go straight into the stream; by our clock, where a clock decides."""
        if self.flags is None:
            return len(self.payloads)
        assert self.due_ms is not None
        now_ms = time.time_ns() // 1_000_000
        return sum(
            not flags & DELAYED or (not flags & RELATIVE and due_ms <= now_ms)
            for flags, due_ms in zip(self.flags, self.due_ms, strict=True)
        )


def _cut(column: list[T] | None, part: slice) -> list[T] | None:
    return None if column is None else column[part]


@dataclass(slots=True)  # not frozen: one is made for each add, and freezing takes as long again
class Added:
    """The outcome of an add: the ids, and the jobs if `NewJobs` had their data.

    If it had none, `taken` says how many of the ids belong to earlier jobs."""

    ids: list[str]
    created_at_ms: int
    jobs: list[Any]  # Job or sync.Job
    taken: int = 0
