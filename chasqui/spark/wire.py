"""Entries to Arrow columns: whole columns at a time, no dict and no object per row for events.

A decoder is made for the columns that are wanted and fills only those. Bytes go straight into
Arrow, which checks their UTF-8; what is no UTF-8, or no number, is looked at again value by value,
so that one odd row costs itself and not the page.
"""

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from chasqui import keys
from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import EnvelopeError, decode_delayed_member, decode_envelope
from chasqui.errors import ChasquiError, PayloadError
from chasqui.payload import decode
from chasqui.spark.arrays import MAX_MS, integers, moments, moments_of_ids, moments_of_ulids, texts
from chasqui.spark.options import Options
from chasqui.spark.schemas import PAYLOADS, arrow_schema

_ANY_SIZE = 1 << 40
_EVENT_FIELDS: Final = {
    "event": keys.EVENT,
    "job_id": keys.EVENT_JOB_ID,
    "ts": keys.EVENT_TS,
    "name": keys.NAME,
    "attempt": keys.EVENT_ATTEMPT,
    "duration_us": keys.EVENT_DURATION_US,
    "backoff_ms": keys.EVENT_BACKOFF_MS,
    "delay_ms": keys.EVENT_DELAY_MS,
    "reason": keys.REASON,
}
_DLQ_FIELDS: Final = {
    "source_id": keys.SOURCE_ID,
    "reason": keys.REASON,
    "detail": keys.DETAIL,
    "error": keys.ERROR,
}


class CorruptEntryError(ChasquiError):
    """An entry cannot be read, and the query asked to fail then."""


# ── Decoders ────────────────────────────────────────────────────────────────────────────────────


def decoder_of(options: Options, schema: StructType) -> "EventDecoder | JobDecoder":
    """The decoder of a stream table's pages."""
    if options.table == "events":
        return EventDecoder(schema)
    return JobDecoder(options, schema)


#: The rows of one layout, and the values of each of its fields.
_Part: TypeAlias = tuple[list[int], dict[bytes, tuple[bytes, ...]]]


class EventDecoder:
    """Pages of the events stream, as plain replies of XRANGE."""

    builder = None

    def __init__(self, schema: StructType) -> None:
        self._schema = arrow_schema(schema)

    def batch(self, queue: str, page: list[Any]) -> Any:
        """A page as a record batch.

        Entries with the same fields in the same order are taken together, column by column: a page
        has few such layouts. Then the rows are put back into their order.
        """
        layouts: dict[tuple[bytes, ...], tuple[list[int], list[list[bytes]]]] = {}
        for row, (_, fields) in enumerate(page):
            names = tuple(fields[::2])
            found = layouts.get(names)
            if found is None:
                found = layouts[names] = ([], [])
            found[0].append(row)
            found[1].append(fields[1::2])
        parts = [
            (rows, dict(zip(names, zip(*values, strict=True), strict=True)))
            for names, (rows, values) in layouts.items()
        ]
        places = None
        if len(parts) > 1:
            rows_in_order = np.concatenate([np.array(rows) for rows, _ in parts])
            places = pa.array(np.argsort(rows_in_order))
        ids = [entry_id for entry_id, _ in page]
        return pa.RecordBatch.from_arrays(
            [self._array(column, queue, ids, parts, places) for column in self._schema],
            schema=self._schema,
        )

    def _array(
        self, column: Any, queue: str, ids: list[bytes], parts: list[_Part], places: Any
    ) -> Any:
        name, kind = column.name, column.type
        if name == "queue":
            return pa.repeat(pa.scalar(queue, pa.string()), len(ids))
        if name == "entry_id":
            return texts(ids)
        if name == "entry_ts":
            return moments_of_ids(ids, kind)
        if name == "extra":
            return _maps(len(ids), parts, kind)
        field = _EVENT_FIELDS["job_id" if name == "job_created_at" else name]
        if not any(field in values for _, values in parts):
            return pa.nulls(len(ids), kind)
        array = pa.concat_arrays(
            [
                _convert(name, values[field], kind)
                if field in values
                else pa.nulls(len(rows), kind)
                for rows, values in parts
            ]
        )
        return array if places is None else array.take(places)


def _convert(name: str, values: Sequence[bytes], kind: Any) -> Any:
    if name == "job_created_at":
        return moments_of_ulids(values, kind)
    if name == "ts":
        times = integers(values, pa.int64())
        is_sound = pc.and_(pc.greater_equal(times, 0), pc.less_equal(times, MAX_MS))
        return pc.multiply(pc.if_else(is_sound, times, None), 1000).cast(kind)
    return integers(values, kind) if pa.types.is_integer(kind) else texts(values)


_KNOWN = frozenset(_EVENT_FIELDS.values())


def _maps(size: int, parts: list[_Part], kind: Any) -> Any:
    """Per row the fields that are no column of their own."""
    found = sorted(
        (row, field, value)
        for rows, values in parts
        for field in values.keys() - _KNOWN
        for row, value in zip(rows, values[field], strict=True)
    )
    counts: Any = np.zeros(size + 1, np.int32)
    for row, _, _ in found:
        counts[row + 1] += 1
    offsets = pa.array(np.cumsum(counts, dtype=np.int32), pa.int32())
    names = texts([field for _, field, _ in found])
    values = texts([value for _, _, value in found])
    return pa.MapArray.from_arrays(offsets, names, values, type=kind)


class JobDecoder:
    """Pages of jobs: entries of the stream or the dead-letter queue, members of the delayed set."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._schema = arrow_schema(schema)
        self._table = options.table
        self._format = options.payload_format
        self._parse_mode = options.parse_mode

    @property
    def builder(self) -> EntryBuilder:
        return EntryBuilder("range", _ANY_SIZE)

    def batch(
        self,
        queue: str,
        page: list[Entry],
        held: dict[bytes, tuple[str, int, int]] | None = None,
    ) -> Any:
        """A page of entries as a record batch. `held`: per entry id its consumer, deliveries and
        idle time."""
        entries = [entry for entry in page if entry is not None and entry.fault != "gone"]
        ids = [entry.id for entry in entries]
        good = [entry.fault is None for entry in entries]
        corrupt = {i: entries[i].envelope or b"" for i, is_good in enumerate(good) if not is_good}
        raw = _Raw(
            queue=queue,
            job_ids=[entry.job_id or None for entry in entries],
            names=[entry.name for entry in entries],
            payloads=[e.payload if ok else None for e, ok in zip(entries, good, strict=True)],
            created=[e.created_at_ms if ok else None for e, ok in zip(entries, good, strict=True)],
            attempts=[e.attempt if ok else None for e, ok in zip(entries, good, strict=True)],
            retries=[entry.retry for entry in entries],
            envelopes=[entry.envelope for entry in entries],
            corrupt=corrupt,
        )
        own: dict[str, Callable[[Any], Any]] = {
            "entry_id": lambda kind: texts(ids),
            "entry_ts": lambda kind: moments_of_ids(ids, kind),
        }
        for name, field in _DLQ_FIELDS.items():
            own[name] = partial(_extra, entries, field)
        if held is not None:
            nobody = (None, None, None)
            owners = [held.get(one, nobody) for one in ids]
            for place, name in enumerate(("consumer", "deliveries", "idle_ms")):
                own[name] = partial(pa.array, [owner[place] for owner in owners])
        return self._build(raw, own, lambda i: ids[i].decode())

    def delayed_batch(self, queue: str, members: list[tuple[bytes, float]]) -> Any:
        """Members of the delayed set, with their scores, as a record batch."""
        found: list[Any] = []
        names: list[str | None] = []
        corrupt: dict[int, bytes] = {}
        for i, (member, _) in enumerate(members):
            try:
                name, encoded = decode_delayed_member(member)
                names.append(name)
                found.append((encoded, decode_envelope(encoded)))
            except EnvelopeError:
                if len(names) == i:
                    names.append(None)
                found.append(None)
                corrupt[i] = member
        raw = _Raw(
            queue=queue,
            job_ids=[one and one[1].id for one in found],
            names=names,
            payloads=[one and one[1].payload for one in found],
            created=[one and one[1].created_at_ms for one in found],
            attempts=[one and one[1].attempt for one in found],
            retries=[one and one[1].retry for one in found],
            envelopes=[one and one[0] for one in found],
            corrupt=corrupt,
        )
        dues = [int(score) for _, score in members]
        return self._build(
            raw, {"run_at": lambda kind: moments(dues, kind)}, lambda i: f"due {dues[i]}"
        )

    def results_batch(self, queue: str, rows: list[tuple[bytes, bytes, int]]) -> Any:
        """Stored results (job id, value, milliseconds left) as a record batch."""
        raw = _Raw(
            queue=queue,
            job_ids=[job_id for job_id, _, _ in rows],
            names=[],
            payloads=[value for _, value, _ in rows],
            created=[],
            attempts=[],
            retries=[],
            envelopes=[value for _, value, _ in rows],
            corrupt={},
        )
        ttls = [ttl_ms if ttl_ms >= 0 else None for _, _, ttl_ms in rows]
        return self._build(
            raw, {"ttl_ms": lambda kind: pa.array(ttls, kind)}, lambda i: str(rows[i][0])
        )

    def _build(
        self, raw: "_Raw", own: dict[str, Callable[[Any], Any]], place: Callable[[int], str]
    ) -> Any:
        shaped = PAYLOADS[self._table]
        arrays: dict[str, Any] = {}
        for column in self._schema:  # the payload first: it may find more that is corrupt
            if column.name == shaped:
                arrays[shaped] = self._payloads(raw, column.type)
        if raw.corrupt and self._parse_mode == "FAILFAST":
            first = min(raw.corrupt)
            raise CorruptEntryError(
                f"an entry of {self._table} of queue {raw.queue!r} cannot be read: {place(first)}"
            )
        size = len(raw.job_ids)
        for column in self._schema:
            name = column.name
            if name in own:
                arrays[name] = own[name](column.type)
            elif name not in arrays:
                arrays[name] = raw.array(name, column.type, size)
        batch = pa.RecordBatch.from_arrays(
            [arrays[column.name] for column in self._schema], schema=self._schema
        )
        if raw.corrupt and self._parse_mode == "DROPMALFORMED":
            batch = batch.filter(pa.array([i not in raw.corrupt for i in range(size)]))
        return batch

    def _payloads(self, raw: "_Raw", kind: Any) -> Any:
        if self._format == "raw":
            return pa.array(raw.payloads, kind)
        values: list[Any] = [None] * len(raw.payloads)
        for i, data in enumerate(raw.payloads):
            if data is None:
                continue
            try:
                value = decode(data, max_bytes=_ANY_SIZE)
                if self._format == "json":
                    values[i] = json.dumps(value, ensure_ascii=False, default=_json_of)
                elif isinstance(value, dict):
                    values[i] = value
                else:
                    raw.spoil(i)
            except (PayloadError, TypeError, ValueError):
                raw.spoil(i)
        if self._format == "json":
            return pa.array(values, kind)
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return self._one_by_one(values, kind, raw)

    @staticmethod
    def _one_by_one(values: list[Any], kind: Any, raw: "_Raw") -> Any:
        for i, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                values[i] = None
                raw.spoil(i)
        return pa.array(values, kind)


class _Raw:
    """Jobs as lists, before they become arrays."""

    __slots__ = (
        "attempts",
        "corrupt",
        "created",
        "envelopes",
        "job_ids",
        "names",
        "payloads",
        "queue",
        "retries",
    )

    def __init__(
        self,
        *,
        queue: str,
        job_ids: list[Any],
        names: list[str | None],
        payloads: list[bytes | None],
        created: list[int | None],
        attempts: list[int | None],
        retries: list[Any],
        envelopes: list[bytes | None],
        corrupt: dict[int, bytes],
    ) -> None:
        self.queue = queue
        self.job_ids = job_ids
        self.names = names
        self.payloads = payloads
        self.created = created
        self.attempts = attempts
        self.retries = retries
        self.envelopes = envelopes
        #: By row, the bytes that could not be read.
        self.corrupt = corrupt

    def spoil(self, row: int) -> None:
        self.corrupt[row] = self.envelopes[row] or b""

    def array(self, name: str, kind: Any, size: int) -> Any:
        if name == "queue":
            return pa.repeat(pa.scalar(self.queue, pa.string()), size)
        if name == "job_id":
            return texts(self.job_ids)
        if name == "name":
            return texts(self.names)
        if name == "created_at":
            return moments(self.created, kind)
        if name == "attempt":
            return pa.array([None if n is None else min(n, 2**31 - 1) for n in self.attempts], kind)
        if name == "retry":
            if not any(self.retries):
                return pa.nulls(size, kind)
            return pa.array([_retry(one) for one in self.retries], kind)
        assert name == "_corrupt", name
        if not self.corrupt:
            return pa.nulls(size, kind)
        return pa.array([self.corrupt.get(i) for i in range(size)], kind)


def _extra(entries: list[Entry], field: bytes, kind: Any) -> Any:
    return texts([(entry.extra or {}).get(field) for entry in entries])


def _retry(retry: Any) -> dict[str, Any] | None:
    if retry is None:
        return None
    max_attempts, backoff = retry
    kind, delay_ms, max_delay_ms, multiplier, jitter_ms = backoff or (None,) * 5
    return {
        "max_attempts": max_attempts,
        "backoff_kind": kind,
        "delay_ms": _bounded(delay_ms),
        "max_delay_ms": _bounded(max_delay_ms),
        "multiplier": multiplier,
        "jitter_ms": _bounded(jitter_ms),
    }


def _bounded(value: int | None) -> int | None:
    return None if value is None else min(value, 2**63 - 1)


def _json_of(value: object) -> str:
    """Bytes as base64, as Spark's own to_json writes them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError
