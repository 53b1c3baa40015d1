"""Stream pages to Arrow: which column is filled from which part of an entry.

The core fills the wanted columns while it parses replies; here they get their names and become
Arrow arrays. Members of the delayed set and results are few and come as lists.
"""

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from chasqui._core.columns import ColumnBuilder, Columns
from chasqui._core.envelope import EnvelopeError, decode_delayed_member, decode_envelope
from chasqui.model import keys
from chasqui.spark.options import Options
from chasqui.spark.reading.arrays import filled, maps, moments, texts
from chasqui.spark.reading.shaping import Corrupt, JobRows, Shaper
from chasqui.spark.schemas import arrow_schema

_CREATED: Final = "created"
#: Per column of events: what it holds, and in which field, in the order in which events have them.
_EVENT_FIELDS: Final = {
    "event": ("text", keys.EVENT),
    "job_id": ("text", keys.EVENT_JOB_ID),
    "job_created_at": ("ulid", keys.EVENT_JOB_ID),
    "ts": ("moment", keys.EVENT_TS),
    "name": ("text", keys.NAME),
    "attempt": ("int32", keys.EVENT_ATTEMPT),
    "duration_us": ("int64", keys.EVENT_DURATION_US),
    "backoff_ms": ("int64", keys.EVENT_BACKOFF_MS),
    "delay_ms": ("int64", keys.EVENT_DELAY_MS),
    "reason": ("text", keys.REASON),
    # Not a column: it becomes job_created_at if the id does not hold it.
    _CREATED: ("moment", keys.EVENT_CREATED),
}
_JOB_FIELDS: Final = {"name": ("text", keys.NAME)}
_DLQ_FIELDS: Final = {
    **_JOB_FIELDS,
    "source_id": ("text", keys.SOURCE_ID),
    "reason": ("text", keys.REASON),
    "detail": ("text", keys.DETAIL),
    "error": ("text", keys.ERROR),
}
_HISTORY_FIELDS: Final = {
    "event": ("text", keys.EVENT),
    "ts": ("moment", keys.EVENT_TS),
    **_JOB_FIELDS,
    "duration_us": ("int64", keys.EVENT_DURATION_US),
    "reason": ("text", keys.REASON),
}
_FIELDS: Final = {"jobs": _JOB_FIELDS, "dlq": _DLQ_FIELDS, "history": _HISTORY_FIELDS}
_JOB_PARTS: Final = ("entry_id", "entry_ts", "job_id", "payload", "created_at", "attempt")


def _fields(known: dict[str, tuple[str, bytes]], wanted: Any) -> list[tuple[str, Any, bytes]]:
    """The columns of fields for the core. It must know the unwanted ones too, to skip them."""
    return [
        (name, kind if name in wanted else "skipped", field)
        for name, (kind, field) in known.items()
    ]


class EventDecoder:
    """Pages of the events stream."""

    def __init__(self, schema: StructType) -> None:
        self._schema = arrow_schema(schema)

    def builder(self) -> ColumnBuilder:
        names = set(self._schema.names)
        wanted = names | {_CREATED} if "job_created_at" in names else names
        return ColumnBuilder(
            _fields(_EVENT_FIELDS, wanted), names & {"entry_id", "entry_ts", "extra"}
        )

    def batch(self, queue: str, page: Columns) -> Any:
        """What a builder has gathered, as a record batch."""
        return pa.RecordBatch.from_arrays(
            [self._array(column.name, column.type, queue, page) for column in self._schema],
            schema=self._schema,
        )

    def _array(self, name: str, kind: Any, queue: str, page: Columns) -> Any:
        if name == "queue":
            return pa.repeat(pa.scalar(queue, pa.string()), page.rows)
        if name == "extra":
            assert page.extras is not None
            return maps(page.rows, kind, page.extras)
        column = filled(page.rows, kind, page.columns[name])
        if name == "job_created_at":
            given = filled(page.rows, kind, page.columns[_CREATED])
            if given.null_count < page.rows:
                return pc.coalesce(given, column)
        return column


class JobDecoder:
    """Pages of jobs: entries of the stream, the dead-letter queue or the history."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._shaper = Shaper(options, schema)
        self._known = _FIELDS[options.table]
        #: Entries of the last batch that could not be read, id to reason; also those that
        #: parseMode left out of the batch.
        self.corrupt: dict[str, str] = {}

    def builder(self) -> ColumnBuilder:
        # Ids are always needed, to find the holder of an entry and to name a broken one. The
        # attempt makes the core read envelopes, so that it sees which are broken.
        parts = {"entry_id", "attempt", *(set(_JOB_PARTS) & set(self._shaper.schema.names))}
        if self._shaper.decodes_payloads:
            parts.add("envelope")
        return ColumnBuilder(_fields(self._known, self._shaper.schema.names), parts)

    def batch(
        self,
        queue: str,
        page: Columns,
        held: dict[bytes, tuple[str, int, int]] | None = None,
        *,
        only_held: bool = False,
    ) -> Any:
        """What a builder has gathered, as a record batch.

        `held` has per entry id its consumer, deliveries and idle time; with `only_held` other
        entries are left out.
        """
        arrays = {
            column.name: filled(page.rows, column.type, page.columns[column.name])
            for column in self._shaper.schema
            if column.name in page.columns and column.name != "payload"
        }
        if "name" in arrays and arrays["name"].null_count:
            arrays["name"] = pc.fill_null(arrays["name"], "")
        ids = filled(page.rows, pa.binary(), page.columns["entry_id"])
        if held is not None:
            nobody = (None, None, None)
            owners = [held.get(one, nobody) for one in ids.to_pylist()]
            for i, name in enumerate(("consumer", "deliveries", "idle_ms")):
                arrays[name] = pa.array([owner[i] for owner in owners])
        payloads, envelopes = (
            filled(page.rows, pa.binary(), page.columns[part]) if part in page.columns else None
            for part in ("payload", "envelope")
        )
        corrupt = {row: _unread(data) for row, data in page.corrupt.items()}
        rows = JobRows(page.rows, arrays, payloads, envelopes, corrupt, page.retries)
        wanted = None
        if only_held and held is not None:
            wanted = [one in held for one in ids.to_pylist()]
            wanted = None if all(wanted) else wanted
        batch = self._shaper.batch(queue, rows, lambda i: _text(ids, i), wanted)
        self.corrupt = {_text(ids, row): one.reason for row, one in rows.corrupt.items()}
        return batch


def _text(ids: Any, row: int) -> str:
    text: str = ids[row].as_py().decode()
    return text


def _unread(data: bytes) -> Corrupt:
    """An envelope that the core could not read, and why."""
    try:
        decode_envelope(data)
    except EnvelopeError as error:
        return Corrupt(data, f"envelope: {error}" if data else "the entry holds no envelope")
    raise AssertionError("the core has refused an envelope that it reads")


def delayed_batch(shaper: Shaper, queue: str, members: list[tuple[bytes, float]]) -> Any:
    """Members of the delayed set, with their scores, as a record batch."""
    found: list[Any] = []
    names: list[str | None] = []
    corrupt: dict[int, Corrupt] = {}
    for i, (member, _) in enumerate(members):
        name, one = None, None
        try:
            name, encoded = decode_delayed_member(member)
            one = decode_envelope(encoded)
        except EnvelopeError as error:
            corrupt[i] = Corrupt(member, f"envelope: {error}")
        names.append(name)
        found.append(one)
    dues = [int(score) for _, score in members]
    kinds = {column.name: column.type for column in shaper.schema}
    arrays: dict[str, Any] = {
        "run_at": moments(dues, kinds.get("run_at", pa.timestamp("us", "UTC"))),
        "job_id": texts([one and one.id for one in found]),
        "name": texts(names),
        "created_at": moments(
            [one and one.created_at_ms for one in found],
            kinds.get("created_at", pa.timestamp("us", "UTC")),
        ),
        "attempt": pa.array([one and min(one.attempt, 2**31 - 1) for one in found], pa.int32()),
    }
    rows = JobRows(
        len(members),
        arrays,
        pa.array([one and one.payload for one in found], pa.binary()),
        pa.array([member for member, _ in members], pa.binary()),
        corrupt,
        {i: one.retry for i, one in enumerate(found) if one and one.retry},
    )
    return shaper.batch(queue, rows, lambda i: f"due {dues[i]}")


def results_batch(shaper: Shaper, queue: str, results: list[tuple[bytes, bytes, int]]) -> Any:
    """Stored results (job id, value, milliseconds left) as a record batch."""
    values = pa.array([value for _, value, _ in results], pa.binary())
    ttls = [ttl_ms if ttl_ms >= 0 else None for _, _, ttl_ms in results]
    arrays = {
        "job_id": texts([job_id for job_id, _, _ in results]),
        "ttl_ms": pa.array(ttls, pa.int64()),
    }
    rows = JobRows(len(results), arrays, values, values)
    return shaper.batch(queue, rows, lambda i: str(results[i][0]))
