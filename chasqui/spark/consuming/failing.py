"""Jobs of a consuming query that failed: back for a retry, or to the dead-letter queue."""

import logging
import random
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xadd_event
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.blocking import BlockingConnection
from chasqui.consuming.fate import RETRIES_EXHAUSTED, Bury, Failure, Limits, RunAgain, on_failure
from chasqui.consumer.moves import MOVED, Move, bury, retry
from chasqui.errors import ChasquiError
from chasqui.events.writer import DLQ, FAILED, RETRY_SCHEDULED
from chasqui.model.keys import (
    DEFAULT_GROUP,
    EVENT_ATTEMPT,
    EVENT_BACKOFF_MS,
    EVENT_CREATED,
    REASON,
    Keys,
)
from chasqui.transport.request import Effect, Request, commands
from chasqui.managing.retention import Log, Trimmer
from chasqui.spark.connections import connected
from chasqui.spark.api import CHUNK, of_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)


def fail_jobs(
    df: "DataFrame",
    reason: str,
    *,
    is_final: bool = False,
    max_attempts: int = 25,
    group: str = DEFAULT_GROUP,
    **options: Any,
) -> dict[str, int]:
    """Fail jobs of a consuming query, as a handler that raised: back for a retry, or to the DLQ.

    Call it in foreachBatch with the bad rows (queue, entry_id, consumer); what it moved is no
    longer acknowledged with the batch. Returns how many were `retried`, `buried`, and `lost` to
    somebody else before. `is_final` buries them at once.
    """
    checked = of_server(options)

    def move(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            counts = {"retried": 0, "buried": 0, "lost": 0}
            groups: dict[tuple[str, str], list[str]] = {}
            for row in batch.to_pylist():
                groups.setdefault((row["queue"], row["consumer"]), []).append(row["entry_id"])
            for (queue, consumer), ids in groups.items():
                with connected(checked, queue) as connection:
                    mover = Mover(
                        connection, Keys(queue), group, consumer, reason, checked.write_events
                    )
                    mover.run(ids, Limits(max_attempts), is_final, counts)
            yield pa.RecordBatch.from_pylist([counts])

    moved = df.select("queue", "entry_id", "consumer").mapInArrow(
        move, "retried long, buried long, lost long"
    )
    row = moved.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in moved.columns))
    return {name: int(count) for name, count in row.first().asDict().items()}


def fetch(connection: BlockingConnection, keys: Keys, ids: list[str]) -> list[Entry]:
    """These entries of the stream, as far as they are still there."""
    replies = connection.call(
        commands(
            *(("XRANGE", keys.stream, one, one) for one in ids),
            effect=Effect.READ,
            builder=EntryBuilder("range", 1 << 40),
        )
    )
    found = replies if len(ids) > 1 else [replies]
    return [entry for entries in found for entry in entries]


class Mover:
    """Moves entries that one consumer holds out of the stream."""

    def __init__(
        self,
        connection: BlockingConnection,
        keys: Keys,
        group: str,
        consumer: str,
        reason: str,
        writes_events: bool,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._owner = (group, consumer)
        self._reason = reason
        self._writes_events = writes_events
        self._trimmer = Trimmer(Log.events(keys))

    def run(self, ids: list[str], limits: Limits, is_final: bool, counts: dict[str, int]) -> None:
        failure = Failure(is_final=is_final, detail=self._reason)
        for start in range(0, len(ids), CHUNK):
            retries: list[Move] = []
            burials: list[Move] = []
            entries = fetch(self._connection, self._keys, ids[start : start + CHUNK])
            counts["lost"] += min(CHUNK, len(ids) - start) - len(entries)
            for entry in entries:
                if entry.fault is not None:
                    burials.append(self._burial(entry, entry.fault))
                    continue
                verdict = on_failure(entry, failure, limits, random.random())
                if isinstance(verdict, RunAgain):
                    retries.append(Move(entry, verdict.attempt, delay_ms=verdict.delay_ms))
                elif isinstance(verdict, Bury):
                    burials.append(self._burial(entry, verdict.reason))
            if retries:
                request = retry(self._keys, *self._owner, retries)
                self._tell_retries(self._moved(request, retries, "retried", counts))
            if burials:
                request = bury(self._keys, *self._owner, burials, tells=False)
                self._tell_burials(self._moved(request, burials, "buried", counts))

    def _burial(self, entry: Entry, reason: str) -> Move:
        runs = entry.attempt + 1
        detail = None if reason == RETRIES_EXHAUSTED else self._reason
        return Move(entry, runs, attempt=runs, reason=reason, detail=detail, error=self._reason)

    def _moved(
        self, request: Request, moves: list[Move], done: str, counts: dict[str, int]
    ) -> list[Move]:
        """Move entries; those that were still there to be moved."""
        moved = [
            move
            for move, flag in zip(moves, self._connection.call(request), strict=True)
            if flag == MOVED
        ]
        counts[done] += len(moved)
        counts["lost"] += len(moves) - len(moved)
        return moved

    # ── Events, as a worker writes them ─────────────────────────────────────────────────────────

    def _tell_retries(self, moved: list[Move]) -> None:
        self._write(
            event
            for move in moved
            for event in (
                self._failed(move.entry),
                (RETRY_SCHEDULED, move.entry,
                 (EVENT_ATTEMPT, move.runs + 1, EVENT_BACKOFF_MS, move.delay_ms)),
            )
        )  # fmt: skip

    def _tell_burials(self, moved: list[Move]) -> None:
        self._write(
            event
            for move in moved
            for event in (
                self._failed(move.entry),
                (DLQ, move.entry, (EVENT_ATTEMPT, move.attempt, REASON, move.reason)),
            )
        )

    def _failed(self, entry: Entry) -> tuple[bytes, Entry, tuple[Any, ...]]:
        return FAILED, entry, (EVENT_ATTEMPT, entry.attempt + 1, REASON, self._reason)

    def _write(self, told: Iterable[tuple[bytes, Entry, tuple[Any, ...]]]) -> None:
        """Write events; best effort, as everywhere."""
        if not self._writes_events:
            return
        buffer, now_ms = CommandBuffer(), time.time_ns() // 1_000_000
        for event, entry, fields in told:
            if entry.untold_created_ms is not None:
                fields += (EVENT_CREATED, entry.untold_created_ms)
            xadd_event(buffer, self._keys.events, event, entry.job_id, now_ms, entry.name, fields)
        if buffer:
            request = Request(bytes(buffer), Effect.ONCE, count=buffer.commands, raises=False)
            try:
                self._connection.call(request)
                if (trim := self._trimmer.wrote(request.count)) is not None:
                    self._connection.call(trim)
            except ChasquiError as error:
                about = {"queue": self._keys.queue}
                logger.warning("events could not be written: %s", error, extra=about)
