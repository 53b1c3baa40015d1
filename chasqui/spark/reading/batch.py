"""Batch reads: a snapshot of a table, planned on the driver and read by the tasks.

A task reads a range of a stream that was counted when it was planned. The other tables have no ids
to cut by. The delayed set is cut by rank from its far end, which promotion does not shift.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from chasqui.model.keys import Keys
from chasqui.producing.job_options import unix_ms
from chasqui.scripts import managing
from chasqui.spark.connections import check_history, check_queues, connected, queues_of
from chasqui.spark.options import Options
from chasqui.spark.reading import ranges
from chasqui.spark.reading.decoding import delayed_batch, results_batch
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.spark.reading.pages import StreamPart, read_stream, stream_of
from chasqui.spark.reading.shaping import Shaper
from chasqui.spark.schemas import arrow_schema, check_subset
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import mappings

#: Results fetched by one command.
_RESULTS_PAGE: Final = 500


@dataclass
class RankPart(InputPartition):  # type: ignore[misc]
    """Members of a delayed set by their rank from the latest one down; `stop` is not included."""

    queue: str
    start: int
    stop: int


@dataclass
class ResultsPart(InputPartition):  # type: ignore[misc]
    """Stored results: of these jobs, or of all jobs if it names none."""

    queue: str
    job_ids: tuple[str, ...]


@dataclass
class QueuesPart(InputPartition):  # type: ignore[misc]
    """Queues to describe."""

    queues: tuple[str, ...]


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads one table once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_subset(schema, options)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """What the tasks will read."""
        options = self._options
        queues = queues_of(options)
        if options.table != "queues" or options.queue:
            check_queues(options, queues)
            check_history(options, queues)
        if options.table == "queues":
            return [QueuesPart(queues)]
        if options.table == "results":
            return [ResultsPart(queue, options.job_ids) for queue in queues]
        plan = self._ranks if options.table == "delayed" else self._ranges
        return [part for queue in queues for part in plan(queue)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one part."""
        if isinstance(partition, StreamPart):
            return read_stream(partition, self._options, self._schema)
        if isinstance(partition, RankPart):
            return self._read_delayed(partition)
        if isinstance(partition, ResultsPart):
            return self._read_results(partition)
        if isinstance(partition, QueuesPart):
            return self._read_queues(partition)
        return iter(())  # Spark makes one empty part where there are none

    # ── Streams ─────────────────────────────────────────────────────────────────────────────────

    def _ranges(self, queue: str) -> Iterator[StreamPart]:
        options = self._options
        stream = stream_of(Keys(queue), options.table)
        start, last = self._bounds(queue)
        if start is None:
            return
        with connected(options, queue) as connection:
            if last == "+":  # what comes later is not part of the snapshot
                last = connection.run(ranges.tip(stream)).id
            length = connection.execute("XLEN", stream, effect=Effect.READ)
            step = ranges.step_for(
                length, options.min_partitions, options.max_records_per_partition
            )
            walked = connection.run(
                ranges.walk(
                    stream,
                    ranges.Position(start, None),
                    ReadPacing(options, is_alone=True),
                    last,
                    step=step,
                    counts_loss=False,
                )
            )
        for part in ranges.cut(
            start, walked.marks, options.max_records_per_partition, options.min_partitions
        ):
            yield StreamPart(queue, part)

    def _bounds(self, queue: str) -> tuple[str | None, str]:
        """Behind which id to begin (None: nowhere) and where to end."""
        options = self._options
        if options.starting_offsets == "latest" or options.ending_offsets == "earliest":
            return None, "+"
        starts, ends = [ranges.BEGINNING], []
        if options.starting_offsets != "earliest":
            starts.append(ranges.full_id(json.loads(options.starting_offsets).get(queue, "0")))
        if options.starting_timestamp is not None:
            starts.append(ranges.before_ms(options.starting_timestamp))
        if options.ending_offsets != "latest":
            ends.append(ranges.full_id(json.loads(options.ending_offsets).get(queue, "0")))
        if options.ending_timestamp is not None:
            ends.append(ranges.until_ms(options.ending_timestamp))
        start = max(starts, key=ranges.order)
        return start, min(ends, key=ranges.order) if ends else "+"

    # ── The delayed set ─────────────────────────────────────────────────────────────────────────

    def _ranks(self, queue: str) -> Iterator[RankPart]:
        options = self._options
        with connected(options, queue) as connection:
            total = connection.execute("ZCARD", Keys(queue).delayed, effect=Effect.READ)
        parts = options.min_partitions or min(
            ranges.DEFAULT_TASKS, max(1, total // ranges.WORTH_A_TASK)
        )
        size = max(1, min(options.max_records_per_partition, -(-total // parts)))
        for start in range(0, total, size):
            yield RankPart(queue, start, min(start + size, total))

    def _read_delayed(self, part: RankPart) -> Iterator[Any]:
        options = self._options
        shaper = Shaper(options, self._schema)
        pacing = ReadPacing(options)
        start = part.start
        with connected(options, part.queue) as connection:
            while start < part.stop:
                stop = start + pacing.ask(part.stop - start)
                reply = connection.execute(
                    "ZREVRANGE",
                    Keys(part.queue).delayed,
                    start,
                    stop - 1,
                    "WITHSCORES",
                    effect=Effect.READ,
                )
                if not reply:
                    return
                members = _scored(reply)
                yield delayed_batch(shaper, part.queue, members)
                pacing.rest(stop - start, sum(len(member) for member, _ in members))
                start = stop

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def _read_results(self, part: ResultsPart) -> Iterator[Any]:
        shaper = Shaper(self._options, self._schema)
        keys = Keys(part.queue)
        with connected(self._options, part.queue) as connection:
            if part.job_ids:
                ids = [job_id.encode() for job_id in part.job_ids]
                for page in fetch_results(connection, keys, ids):
                    yield results_batch(shaper, part.queue, page)
                return
            prefix = keys.result("")
            cursor = b"0"
            while True:
                cursor, found = connection.execute(
                    "SCAN", cursor, "MATCH", prefix + b"*", "COUNT", 1000, effect=Effect.READ
                )
                ids = [key.removeprefix(prefix) for key in found]
                for page in fetch_results(connection, keys, ids):
                    yield results_batch(shaper, part.queue, page)
                if cursor == b"0":
                    return

    # ── Queues ──────────────────────────────────────────────────────────────────────────────────

    def _read_queues(self, part: QueuesPart) -> Iterator[Any]:
        schema = arrow_schema(self._schema)
        for queue in part.queues:
            with connected(self._options, queue) as connection:
                row = describe(connection, Keys(queue), self._options.group)
            moment = row["oldest_ts"]
            row["oldest_ts"] = None if moment is None else moment * 1000
            yield pa.RecordBatch.from_arrays(
                [pa.array([row[column.name]], column.type) for column in schema], schema=schema
            )


class PushdownReader(BatchReader):
    """Reads one table once, narrowed by filters on entry_ts. A class of its own, because Spark
    refuses to plan any reader that takes filters while pushdown is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take the filters on entry_ts; yield the others, which Spark applies."""
        low, high = self._options.starting_timestamp, self._options.ending_timestamp
        for one in filters:
            bounds = _bounds_ms(one)
            if bounds is None:
                yield one
                continue
            least, most, is_whole = bounds
            if least is not None:
                low = least if low is None else max(low, least)
            if most is not None:
                high = most if high is None else min(high, most)
            if not is_whole:  # entry ids have milliseconds; Spark does the rest
                yield one
        self._options = replace(self._options, starting_timestamp=low, ending_timestamp=high)


def _bounds_ms(one: Filter) -> tuple[int | None, int | None, bool] | None:
    """The bounds of a filter on entry_ts in milliseconds, and whether they say all of it."""
    if getattr(one, "attribute", None) != ("entry_ts",):
        return None
    value = getattr(one, "value", None)
    if not isinstance(value, datetime):
        return None
    ms, is_whole = max(0, unix_ms(value)), value.microsecond % 1000 == 0
    if isinstance(one, GreaterThanOrEqual):
        return (ms if is_whole else ms + 1), None, True
    if isinstance(one, GreaterThan):
        return ms + 1, None, True
    if isinstance(one, LessThanOrEqual):
        return None, ms, True
    if isinstance(one, LessThan):
        return (None, ms - 1, True) if is_whole and ms else (None, ms, not is_whole)
    if isinstance(one, EqualTo):
        return ms, ms, is_whole
    return None


def _scored(reply: list[Any]) -> list[tuple[bytes, float]]:
    """Members and scores, in RESP3 or RESP2."""
    if reply and isinstance(reply[0], list):
        return [(member, float(score)) for member, score in reply]
    return [(reply[i], float(reply[i + 1])) for i in range(0, len(reply), 2)]


def fetch_results(
    connection: BlockingConnection, keys: Keys, job_ids: list[bytes]
) -> Iterator[list[tuple[bytes, bytes, int]]]:
    """Those of these jobs that have a result, in pages: id, value, milliseconds to live."""
    for start in range(0, len(job_ids), _RESULTS_PAGE):
        part = job_ids[start : start + _RESULTS_PAGE]
        names = [keys.result(job_id.decode()) for job_id in part]
        values, *ttls = connection.call(
            commands(("MGET", *names), *(("PTTL", name) for name in names), effect=Effect.READ)
        )
        rows = zip(part, values, ttls, strict=True)
        yield [(job_id, value, ttl_ms) for job_id, value, ttl_ms in rows if value is not None]


def describe(connection: BlockingConnection, keys: Keys, group: str) -> dict[str, Any]:
    """One row of the table `queues`."""
    length, pending, delayed, dead, _, oldest_ms, _ = connection.call(managing.counts(keys, group))
    groups, first, newest, events, now = connection.call(
        commands(
            ("XINFO", "GROUPS", keys.stream),
            ("XRANGE", keys.events, "-", "+", "COUNT", 1),
            ("XREVRANGE", keys.events, "+", "-", "COUNT", 1),
            ("XLEN", keys.events),
            ("TIME",),
            effect=Effect.READ,
            raises=False,
        )
    )
    facts = _group_facts(groups, group)
    span_ms = None
    if first and newest:
        start_ms, end_ms = (ranges.order(one[0][0].decode())[0] for one in (first, newest))
        span_ms = end_ms - start_ms
    now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
    return {
        "queue": keys.queue,
        "length": length,
        "pending": pending,
        "lag": facts.get("lag"),
        "delayed": delayed,
        "dlq": dead,
        "oldest_ts": now_ms - oldest_ms if length else None,
        "consumers": facts.get("consumers", 0),
        "events": events,
        "events_span_ms": span_ms,
    }


def _group_facts(groups: Any, group: str) -> dict[str, Any]:
    for one in mappings(groups):
        facts = {name.decode(): value for name, value in one.items()}
        if facts["name"].decode(errors="replace") == group:
            return facts
    return {}
