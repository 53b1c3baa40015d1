"""Turns Arrow rows into jobs: the driver checks the columns, the tasks encode the rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

from chasqui._core.envelope import check_msgpack
from chasqui._core.maps import Unkeepable, pack_maps, pack_values
from chasqui._core.options import DELAYED, UNIQUE
from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.model.keys import check_job_id, check_job_name, check_queue_name
from chasqui.model.payload import ENVELOPE_ROOM, MAX_BYTES, MAX_DEPTH, encode
from chasqui.producing.job_options import retry_of
from chasqui.producing.new_jobs import NewJobs
from chasqui.spark.options import OptionError, Options, camel
from chasqui.spark.payload_types import check_form, source_of

_INTEGERS = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
#: The types that each mapped column may have.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "queue_column": ((types.StringType,), "string"),
    "id_column": ((types.StringType,), "string"),
    "name_column": ((types.StringType,), "string"),
    "run_at_column": ((types.TimestampType,), "timestamp"),
    "attempts_column": (_INTEGERS, "an integer"),
    "backoff_column": (_INTEGERS, "an integer (milliseconds)"),
}
_MAX_PAYLOAD = MAX_BYTES - ENVELOPE_ROOM


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which column holds what; None if no column does."""

    queue: str | None
    id: str | None
    name: str | None
    run_at: str | None
    attempts: str | None
    backoff: str | None
    payload: str | None
    #: Without a payload column: the columns that become the payload, as a map.
    rest: tuple[str, ...]

    @classmethod
    def of(cls, options: Options, schema: types.StructType) -> "Mapping":
        """The mapping of a DataFrame; OptionError if a column does not fit."""
        fields = {field.name: field.dataType for field in schema.fields}
        found: dict[str, str | None] = {}
        blank = Options()
        for option, (kinds, wanted) in (*_KINDS.items(), ("payload_column", ((), ""))):
            name = getattr(options, option)
            found[option] = name if name in fields else None
            if name not in fields:
                if name != getattr(blank, option):
                    raise OptionError(
                        f"option {camel(option)}: there is no column {name!r} among "
                        f"{', '.join(fields)}"
                    )
            elif kinds and not isinstance(fields[name], kinds):
                raise OptionError(
                    f"column {name!r} must be {wanted} to be used as {camel(option)}, and is "
                    f"{fields[name].simpleString()}"
                )
        if not options.queue and found["queue_column"] is None:
            raise OptionError("say which queue to write to: option queue, or a column queue")
        if options.delivery == "dedup" and found["id_column"] is None:
            raise OptionError("delivery=dedup needs a column of ids: job_id, or idColumn")
        mapped = {name for name in found.values() if name is not None}
        rest = tuple(name for name in fields if name not in mapped)
        _check_payload(options, found["payload_column"], rest, schema)
        return cls(
            None if options.queue else found["queue_column"],
            found["id_column"],
            found["name_column"],
            found["run_at_column"],
            found["attempts_column"],
            found["backoff_column"],
            found["payload_column"],
            rest,
        )


def _check_payload(
    options: Options, payload: str | None, rest: tuple[str, ...], schema: types.StructType
) -> None:
    """Refuse columns that a payload cannot hold."""
    names = [field.name for field in schema.fields]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"there are two columns {twice!r}")
    for name in rest if payload is None else (payload,):
        kind = schema[name].dataType
        is_json = name == payload and options.payload_format == "json"
        if is_json and not isinstance(kind, (types.StringType, types.BinaryType)):
            raise OptionError(
                f"column {name!r} must be string with payloadFormat=json, and is "
                f"{kind.simpleString()}"
            )
        check_form(name, kind, 0 if name == payload else 1)


def jobs_of(
    batch: Any, mapping: Mapping, options: Options
) -> Iterator[tuple[str, NewJobs, list[int]]]:
    """Per queue the jobs of a record batch, and when each is due (unix ms; 0 for now)."""
    if mapping.queue is None:
        yield options.queue[0], *_jobs(batch, mapping, options)
        return
    queues = batch.column(mapping.queue)
    if queues.null_count:
        raise ValueError(f"column {mapping.queue!r} is null in a row: every job needs a queue")
    for queue in pc.unique(queues).to_pylist():
        part = batch.filter(pc.equal(queues, queue))
        yield check_queue_name(queue), *_jobs(part, mapping, options)


def _jobs(batch: Any, mapping: Mapping, options: Options) -> tuple[NewJobs, list[int]]:
    size = batch.num_rows
    ids = _ids(batch, mapping)
    dues = [0] * size
    if mapping.run_at is not None:
        column = batch.column(mapping.run_at).cast(pa.int64())
        dues = [0 if due is None else max(0, due // 1000) for due in column.to_pylist()]
    names: str | list[str] = check_job_name(options.job_name)
    if mapping.name is not None:
        given = batch.column(mapping.name)
        different = [
            one if one is not None else options.job_name for one in pc.unique(given).to_pylist()
        ]
        for one in different:
            check_job_name(one)
        if len(different) == 1:  # most often
            names = different[0]
        else:
            names = [one if one is not None else options.job_name for one in given.to_pylist()]
    is_unique = options.delivery == "dedup"
    kinds = None
    if is_unique or any(dues):
        kinds = [
            (DELAYED if due else 0) | (UNIQUE if is_unique and job_id is not None else 0)
            for due, job_id in zip(dues, ids or [None] * size, strict=True)
        ]
    jobs = NewJobs(
        _payloads(batch, mapping, options),
        names,
        ids if ids is not None or kinds is None else [None] * size,
        _retries(batch, mapping),
        kinds,
        dues if kinds is not None else None,
    )
    return jobs, dues


def _ids(batch: Any, mapping: Mapping) -> list[str | None] | None:
    if mapping.id is None:
        return None
    column = batch.column(mapping.id)
    if column.null_count == batch.num_rows:
        return None
    ids: list[str | None] = column.to_pylist()
    for one in ids:
        if one is not None:
            check_job_id(one)
    return ids


def _retries(batch: Any, mapping: Mapping) -> list[bytes | None] | None:
    if mapping.attempts is None and mapping.backoff is None:
        return None
    nothing = [None] * batch.num_rows
    attempts = batch.column(mapping.attempts).to_pylist() if mapping.attempts else nothing
    backoffs = batch.column(mapping.backoff).to_pylist() if mapping.backoff else nothing
    known: dict[tuple[int | None, int | None], bytes | None] = {}
    out = []
    for pair in zip(attempts, backoffs, strict=True):
        if pair not in known:
            known[pair] = retry_of(*pair)
        out.append(known[pair])
    return out if any(out) else None


# ── Payloads ────────────────────────────────────────────────────────────────────────────────────


def _payloads(batch: Any, mapping: Mapping, options: Options) -> list[bytes]:
    try:
        payloads = _packed(batch, mapping, options)
    except Unkeepable as error:
        raise PayloadError(f"column {error.column}: {error}, which a payload cannot hold") from None
    # The types were checked, so only the size is left to check.
    if (size := max(map(len, payloads), default=0)) > _MAX_PAYLOAD:
        raise PayloadTooLargeError(size, _MAX_PAYLOAD)
    return payloads


def _packed(batch: Any, mapping: Mapping, options: Options) -> list[bytes]:
    if mapping.payload is None:
        columns = [source_of(name, batch.column(name)) for name in mapping.rest]
        return pack_maps(batch.num_rows, columns)
    column = batch.column(mapping.payload)
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [_checked(one) for one in column.to_pylist()]
    if options.payload_format == "json":
        return [encode(_parsed(one)) for one in column.to_pylist()]
    return pack_values(batch.num_rows, source_of(mapping.payload, column))


def _checked(data: bytes | None) -> bytes:
    """Bytes of a binary payload column, which must be msgpack, as a jobs table has them."""
    if data is None:
        return b"\xc0"
    try:
        check_msgpack(data, MAX_DEPTH)
    except ValueError as error:
        raise PayloadError(
            f"a binary payload must be msgpack, and one is not: {error}; bytes as such go into a "
            "column of a map"
        ) from None
    return data


def _parsed(text: Any) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (TypeError, ValueError) as error:
        raise PayloadError(f"payloadFormat=json, and a payload is no JSON: {error}") from None
