"""Arrow rows to jobs: which column says what, checked on the driver, encoded by the tasks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

from chasqui._core.envelope import check_msgpack
from chasqui._core.maps import pack_maps
from chasqui._core.options import DELAYED, UNIQUE
from chasqui.adding import Batch
from chasqui.drafts import retry_of
from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.keys import check_job_id, check_job_name, check_queue_name
from chasqui.payload import ENVELOPE_ROOM, MAX_BYTES, MAX_DEPTH, encode
from chasqui.spark.options import OptionError, Options, camel

if TYPE_CHECKING:
    from chasqui._core.maps import Kind, Source

_INTEGERS = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
#: What each mapped column may be.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "queue_column": ((types.StringType,), "string"),
    "id_column": ((types.StringType,), "string"),
    "name_column": ((types.StringType,), "string"),
    "run_at_column": ((types.TimestampType,), "timestamp"),
    "attempts_column": (_INTEGERS, "an integer"),
    "backoff_column": (_INTEGERS, "an integer (milliseconds)"),
}
_MAX_PAYLOAD = MAX_BYTES - ENVELOPE_ROOM
#: The types whose values the core packs by itself.
_SIMPLE: "dict[Any, Kind]" = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "text",
    pa.binary(): "binary",
}


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which column says what; None where no column does."""

    queue: str | None
    id: str | None
    name: str | None
    run_at: str | None
    attempts: str | None
    backoff: str | None
    payload: str | None
    #: Without a payload column: the columns that become its map.
    rest: tuple[str, ...]

    @classmethod
    def of(cls, options: Options, schema: types.StructType) -> "Mapping":
        """The mapping of a DataFrame; OptionError where it does not fit."""
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
        return cls(
            None if options.queue else found["queue_column"],
            found["id_column"],
            found["name_column"],
            found["run_at_column"],
            found["attempts_column"],
            found["backoff_column"],
            found["payload_column"],
            tuple(name for name in fields if name not in mapped),
        )


def jobs_of(
    batch: Any, mapping: Mapping, options: Options
) -> Iterator[tuple[str, Batch, list[int]]]:
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


def _jobs(batch: Any, mapping: Mapping, options: Options) -> tuple[Batch, list[int]]:
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
    jobs = Batch(
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
    if mapping.payload is not None:
        column = batch.column(mapping.payload)
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            return [_checked(one) for one in column.to_pylist()]
        values = _values(column)
        if options.payload_format == "json":
            return [encode(_parsed(one)) for one in values]
        return [encode(one) for one in values]
    if not mapping.rest:
        return [encode({})] * batch.num_rows
    packer = msgpack.Packer(use_bin_type=True)
    payloads = pack_maps(
        batch.num_rows, [_source(name, batch.column(name), packer.pack) for name in mapping.rest]
    )
    # Arrow's types bound what is in them, so there is nothing to check but their size.
    if (size := max(map(len, payloads), default=0)) > _MAX_PAYLOAD:
        raise PayloadTooLargeError(size, _MAX_PAYLOAD)
    return payloads


def _source(name: str, column: Any, pack: Callable[[Any], bytes]) -> "Source":
    """A column as the core takes it: its buffers, or else its values packed one by one."""
    kind = _SIMPLE.get(column.type)
    if kind is None:
        return name, "packed", 0, None, list(map(pack, _values(column))), None
    bitmap, *rest = column.buffers()
    if kind in ("text", "binary"):
        ends, values = rest
        return name, kind, column.offset, bitmap, values, ends
    return name, kind, column.offset, bitmap, rest[0], None


def _checked(data: bytes | None) -> bytes:
    """Bytes of a binary payload column are msgpack already, as a jobs table gives them."""
    if data is None:
        return b"\xc0"
    if len(data) > _MAX_PAYLOAD:
        raise PayloadTooLargeError(len(data), _MAX_PAYLOAD)
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


def _values(column: Any) -> list[Any]:
    """A column as values that a payload can hold."""
    values: list[Any] = column.to_pylist()
    make = _maker(column.type)
    return values if make is None else [None if one is None else make(one) for one in values]


def _maker(kind: Any) -> Callable[[Any], Any] | None:
    """What turns a value of an Arrow type into one for a payload; None where it is one."""
    is_ = pa.types
    if is_.is_timestamp(kind) or is_.is_date(kind) or is_.is_time(kind):
        return lambda value: value.isoformat()
    if is_.is_decimal(kind) or is_.is_duration(kind):
        return str
    if is_.is_struct(kind):
        inner = {field.name: _maker(field.type) for field in kind}
        return lambda value: {name: _apply(inner[name], one) for name, one in value.items()}
    if is_.is_map(kind):
        of_key, of_item = _maker(kind.key_type), _maker(kind.item_type)
        return lambda value: {_key(_apply(of_key, k)): _apply(of_item, v) for k, v in value}
    if is_.is_list(kind) or is_.is_large_list(kind):
        of_value = _maker(kind.value_type)
        return None if of_value is None else lambda v: [_apply(of_value, one) for one in v]
    return None


def _apply(make: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if make is None or value is None else make(value)


def _key(value: Any) -> Any:
    return value if isinstance(value, str | bytes) else str(value)
