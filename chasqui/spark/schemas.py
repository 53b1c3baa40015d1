"""The columns of the tables and their types, for Spark and for Arrow."""

from typing import Any, Final

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from chasqui.spark.options import OptionError, Options
from chasqui.spark.payload_types import check_form

_RETRY = (
    "struct<max_attempts: bigint, backoff_kind: string, delay_ms: bigint, max_delay_ms: bigint, "
    "multiplier: double, jitter_ms: bigint>"
)
_ENTRY: Final = {"queue": "string", "entry_id": "string", "entry_ts": "timestamp"}
_JOB: Final = {
    "job_id": "string",
    "name": "string",
    "payload": "binary",
    "created_at": "timestamp",
    "attempt": "int",
    "retry": _RETRY,
}
_CORRUPT: Final = {"_corrupt": "binary"}
_HELD: Final = {"consumer": "string", "deliveries": "bigint", "idle_ms": "bigint"}

#: Per table its columns, in order, with their types in DDL.
COLUMNS: Final[dict[str, dict[str, str]]] = {
    "jobs": {**_ENTRY, **_JOB, **_CORRUPT},
    "events": {
        **_ENTRY,
        "event": "string",
        "job_id": "string",
        "ts": "timestamp",
        "name": "string",
        "attempt": "int",
        "duration_us": "bigint",
        "backoff_ms": "bigint",
        "delay_ms": "bigint",
        "reason": "string",
        "job_created_at": "timestamp",
        "extra": "map<string, string>",
    },
    "dlq": {
        **_ENTRY,
        **_JOB,
        "source_id": "string",
        "reason": "string",
        "detail": "string",
        "error": "string",
        **_CORRUPT,
    },
    "history": {
        **_ENTRY,
        "event": "string",
        "ts": "timestamp",
        **_JOB,
        "duration_us": "bigint",
        "reason": "string",
        **_CORRUPT,
    },
    "delayed": {"queue": "string", "run_at": "timestamp", **_JOB, **_CORRUPT},
    "results": {
        "queue": "string",
        "job_id": "string",
        "value": "binary",
        "ttl_ms": "bigint",
        **_CORRUPT,
    },
    "queues": {
        "queue": "string",
        "length": "bigint",
        "pending": "bigint",
        "lag": "bigint",
        "delayed": "bigint",
        "dlq": "bigint",
        "oldest_ts": "timestamp",
        "consumers": "bigint",
        "events": "bigint",
        "events_span_ms": "bigint",
    },
}
#: The column of a table that payloadFormat shapes.
PAYLOADS: Final = {
    **dict.fromkeys(("jobs", "dlq", "history", "delayed"), "payload"),
    "results": "value",
}


def columns_of(options: Options) -> dict[str, str]:
    """The columns that these options give, with their types in DDL."""
    columns = dict(COLUMNS[options.table])
    if options.table == "jobs" and (options.include_pending or options.mode == "consume"):
        columns = {**columns, **_HELD}
    shaped = PAYLOADS.get(options.table)
    if shaped is not None and options.payload_format == "json":
        columns[shaped] = "string"
    elif shaped is not None and options.payload_format == "struct":
        columns[shaped] = f"struct<{options.payload_schema}>"
    return columns


def ddl(options: Options) -> str:
    """The schema as DDL, which Spark parses."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns_of(options).items())


def check_subset(schema: StructType, options: Options) -> None:
    """Refuse a schema of the user's with columns or types that the table does not have.

    A subset is fine: only its columns are decoded.
    """
    columns = columns_of(options)
    for field in schema.fields:
        if field.name not in columns:
            raise OptionError(
                f"table {options.table} has no column {field.name!r}; it has {', '.join(columns)}"
            )
        wanted, given = _plain(columns[field.name]), _plain(field.dataType.simpleString())
        is_shaped = field.name == PAYLOADS.get(options.table) and wanted.startswith("struct")
        if wanted != given and not is_shaped:
            raise OptionError(
                f"column {field.name!r} of table {options.table} is {columns[field.name]}, "
                f"and the schema that was given says {field.dataType.simpleString()}"
            )
        if is_shaped:
            check_form(field.name, field.dataType)


def arrow_schema(schema: StructType) -> Any:
    """The schema for Arrow, exactly as Spark expects it of record batches."""
    return to_arrow_schema(schema, timezone="UTC")


def _plain(kind: str) -> str:
    return kind.replace(" ", "").lower()
