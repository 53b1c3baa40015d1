"""Rows of jobs: payloads in the shape that the options ask for, and what cannot be read."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from chasqui._core.typed import unpack_column
from chasqui.errors import ChasquiError, PayloadError
from chasqui.model.payload import decode
from chasqui.spark.options import Options
from chasqui.spark.payload_types import array_of, shape_of
from chasqui.spark.schemas import PAYLOADS, arrow_schema

_ANY_SIZE = 1 << 40


class CorruptEntryError(ChasquiError):
    """An entry cannot be read, and the query asked to fail then."""


class Corrupt(NamedTuple):
    """A row that cannot be read: the bytes that it was read from, and why not."""

    data: bytes
    reason: str


@dataclass(slots=True)
class JobRows:
    """Rows that were read and are not shaped yet."""

    size: int
    #: Finished columns.
    arrays: dict[str, Any]
    #: Binary; null for a row without payload.
    payloads: Any = None
    #: Binary: what each row was read from. Needed if payloads are decoded.
    envelopes: Any = None
    #: By row, what could not be read.
    corrupt: dict[int, Corrupt] = field(default_factory=dict)
    #: By row, the retry settings of jobs that have some.
    retries: Mapping[int, Any] = field(default_factory=dict)

    def spoil(self, row: int, reason: str) -> None:
        self.corrupt[row] = Corrupt(self.envelopes[row].as_py() or b"", reason)


class Shaper:
    """Makes record batches of one table of jobs."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.schema = arrow_schema(schema)
        self._table = options.table
        self._format = options.payload_format
        self._parse_mode = options.parse_mode
        self._payload = PAYLOADS[options.table]
        if self._format == "struct" and self._payload in schema.names:
            self._shape = shape_of(self._payload, schema[self._payload].dataType)

    @property
    def decodes_payloads(self) -> bool:
        return self._format != "raw" and self._payload in self.schema.names

    def batch(
        self,
        queue: str,
        rows: JobRows,
        locate: Callable[[int], str],
        wanted: list[bool] | None = None,
    ) -> Any:
        """The rows as a record batch, or those that are `wanted`.

        `locate` says which entry a row is, for an error.
        """
        arrays = dict(rows.arrays)
        if self._payload in self.schema.names:  # first: it may find more that is corrupt
            kind = self.schema.field(self._payload).type
            arrays[self._payload] = self._payloads(rows, kind)
        if wanted is not None:
            rows.corrupt = {row: one for row, one in rows.corrupt.items() if wanted[row]}
        if rows.corrupt and self._parse_mode == "FAILFAST":
            first = min(rows.corrupt)
            raise CorruptEntryError(
                f"an entry of {self._table} of queue {queue!r} cannot be read: {locate(first)}: "
                f"{rows.corrupt[first].reason}"
            )
        for column in self.schema:
            if column.name not in arrays:
                arrays[column.name] = _array(column.name, column.type, queue, rows)
        batch = pa.RecordBatch.from_arrays(
            [arrays[column.name] for column in self.schema], schema=self.schema
        )
        if rows.corrupt and self._parse_mode == "DROPMALFORMED":
            wanted = wanted or [True] * rows.size
            wanted = [one and i not in rows.corrupt for i, one in enumerate(wanted)]
        return batch if wanted is None else batch.filter(pa.array(wanted, pa.bool_()))

    def _payloads(self, rows: JobRows, kind: Any) -> Any:
        if self._format == "raw":
            return rows.payloads
        if self._format == "json":
            texts = [self._json(data, rows, i) for i, data in enumerate(rows.payloads.to_pylist())]
            return pa.array(texts, kind)
        payloads = rows.payloads
        bitmap, ends, values = payloads.buffers()
        unpacked, reasons = unpack_column(
            self._shape, len(payloads), payloads.offset, bitmap, ends, values
        )
        for row, reason in reasons.items():
            rows.spoil(row, reason)
        return array_of(kind, unpacked)

    def _json(self, data: bytes | None, rows: JobRows, row: int) -> str | None:
        if data is None:
            return None
        try:
            value = decode(data, max_bytes=_ANY_SIZE)
            return json.dumps(value, ensure_ascii=False, default=_json_of)
        except (PayloadError, TypeError, ValueError) as error:
            rows.spoil(row, f"{self._payload}: {error}")
            return None


def _array(name: str, kind: Any, queue: str, rows: JobRows) -> Any:
    if name == "queue":
        return pa.repeat(pa.scalar(queue, pa.string()), rows.size)
    if name == "retry":
        found: Mapping[int, Any] = {row: _retry(*one) for row, one in rows.retries.items()}
    else:
        assert name == "_corrupt", name
        found = {row: one.data for row, one in rows.corrupt.items()}
    if not found:
        return pa.nulls(rows.size, kind)
    return pa.array([found.get(i) for i in range(rows.size)], kind)


def _retry(max_attempts: int | None, backoff: tuple[Any, ...] | None) -> dict[str, Any]:
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
