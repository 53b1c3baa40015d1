"""Jobs of a consuming query that failed: back for a retry, or to the dead-letter queue."""

import logging
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xadd_event
from chasqui._core.entry import Entry
from chasqui.consuming.fate import (
    RETRIES_EXHAUSTED,
    Bury,
    Failure,
    Limits,
    RunAgain,
    on_failure,
)
from chasqui.consuming.moves import Move, bury, retry
from chasqui.errors import ChasquiError
from chasqui.events.kinds import DLQ, FAILED, RETRY_SCHEDULED
from chasqui.managing.entries import by_id
from chasqui.managing.retention import Log, Trimmer
from chasqui.model.keys import (
    DEFAULT_GROUP,
    EVENT_ATTEMPT,
    EVENT_BACKOFF_MS,
    EVENT_CREATED,
    REASON,
    Keys,
)
from chasqui.scripts.settling import SETTLED, Consumer
from chasqui.spark.connections import CHUNK, connected
from chasqui.spark.options import Options
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Request

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
    """Fail jobs of a consuming query, as if a handler had raised: they are retried or buried.

    Call it in foreachBatch with the bad rows (queue, entry_id, consumer). The jobs that it moves
    are not acknowledged with the batch. Returns how many were `retried`, `buried`, and `lost`: no
    longer held by this consumer. `is_final` buries them at once.
    """
    checked = Options.of_server(options)

    def move(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            counts = {"retried": 0, "buried": 0, "lost": 0}
            groups: dict[tuple[str, str], list[str]] = {}
            for row in batch.to_pylist():
                groups.setdefault((row["queue"], row["consumer"]), []).append(row["entry_id"])
            for (queue, consumer), ids in groups.items():
                owner = Consumer(Keys(queue), group, consumer)
                with connected(checked, queue) as connection:
                    mover = Mover(connection, owner, reason, checked.write_events)
                    mover.run(ids, Limits(max_attempts), is_final, counts)
            yield pa.RecordBatch.from_pylist([counts])

    moved = df.select("queue", "entry_id", "consumer").mapInArrow(
        move, "retried long, buried long, lost long"
    )
    row = moved.agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in moved.columns))
    return {name: int(count) for name, count in row.first().asDict().items()}


def fetch(connection: BlockingConnection, keys: Keys, ids: list[str]) -> list[Entry]:
    """Those of these entries that are still in the stream."""
    found = connection.run(by_id(keys.stream, ids))
    return [entry for entry in found if entry is not None]


class Mover:
    """Moves entries that one consumer holds out of the stream."""

    def __init__(
        self, connection: BlockingConnection, consumer: Consumer, reason: str, writes_events: bool
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._keys = consumer.keys
        self._reason = reason
        self._writes_events = writes_events
        self._trimmer = Trimmer(Log.events(consumer.keys))

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
                request = retry(self._consumer, retries)
                self._write_events(self._moved(request, retries, "retried", counts))
            if burials:
                request = bury(self._consumer, burials)
                self._write_events(self._moved(request, burials, "buried", counts))

    def _burial(self, entry: Entry, reason: str) -> Move:
        runs = entry.attempt + 1
        detail = None if reason == RETRIES_EXHAUSTED else self._reason
        return Move(entry, runs, attempt=runs, reason=reason, detail=detail, error=self._reason)

    def _moved(
        self, request: Request, moves: list[Move], done: str, counts: dict[str, int]
    ) -> list[Move]:
        """Move entries; those that were still held and so have moved."""
        moved = [
            move
            for move, flag in zip(moves, self._connection.call(request), strict=True)
            if flag == SETTLED
        ]
        counts[done] += len(moved)
        counts["lost"] += len(moves) - len(moved)
        return moved

    # ── Events, as a worker writes them ─────────────────────────────────────────────────────────

    def _write_events(self, moved: list[Move]) -> None:
        """Write for each job that its run failed, and what follows; best effort, as everywhere."""
        if not self._writes_events or not moved:
            return
        buffer, now_ms = CommandBuffer(), time.time_ns() // 1_000_000
        for move in moved:
            entry, stream = move.entry, self._keys.events
            events: list[tuple[bytes, tuple[Any, ...]]] = [
                (FAILED, (EVENT_ATTEMPT, entry.attempt + 1, REASON, self._reason))
            ]
            if move.delay_ms is None:
                events.append((DLQ, (EVENT_ATTEMPT, move.attempt, REASON, move.reason)))
            else:
                backoff = (EVENT_ATTEMPT, move.runs + 1, EVENT_BACKOFF_MS, move.delay_ms)
                events.append((RETRY_SCHEDULED, backoff))
            for event, fields in events:
                if entry.untold_created_ms is not None:
                    fields += (EVENT_CREATED, entry.untold_created_ms)
                xadd_event(buffer, stream, event, entry.job_id, now_ms, entry.name, fields)
        request = Request(bytes(buffer), Effect.ONCE, count=buffer.commands, raises=False)
        try:
            self._connection.call(request)
            if (trim := self._trimmer.wrote(request.count)) is not None:
                self._connection.call(trim)
        except ChasquiError as error:
            about = {"queue": self._keys.queue}
            logger.warning("events could not be written: %s", error, extra=about)
