"""The options of the format `chasqui`: one table, checked on the driver before a job starts.

Spark passes options as text, with keys in any case; those in an `Options` are checked. The fields
below are the table: their names in camelCase are the options' names, and docs/spark.md lists them
from here.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from chasqui.managing.retention import check_reader
from chasqui.model.config import DEFAULT_URL, Endpoint
from chasqui.model.keys import DEFAULT_GROUP
from chasqui.spark.option_values import (
    flag,
    label,
    names,
    number,
    offsets,
    one_of,
    pattern,
    queue_names,
    seconds,
    share,
    text,
    url,
)
from chasqui.spark.payload_schema import schema_text

T = TypeVar("T")

TABLES: Final = ("jobs", "events", "dlq", "history", "delayed", "results", "queues")
#: Streams that lose entries only at their head, by trimming: losses can be counted.
LOGS: Final = ("events", "history")
#: Append-only, so they can be followed by id.
TAIL_TABLES: Final = (*LOGS, "dlq")

#: What Spark itself puts among the options of a source or sink.
_OF_SPARK = frozenset(("checkpointlocation", "path", "queryname"))
_ALIASES = {"subscribe": "queue", "path": "queue"}


class OptionError(ValueError):
    """An option that is refused; the text is one sentence that names it."""


def option(default: T, parse: Callable[[str], T], uses: str, meaning: str) -> T:
    """A row of the table. `uses`: r batch read, s streaming read, w batch and streaming write."""
    metadata = {"parse": parse, "uses": uses, "meaning": meaning}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


# ── The table ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options. Pickled to executors: holds no secret, no socket, no TLS context."""

    # Where
    url: str | None = option(None, url, "rsw", f"The server; default {DEFAULT_URL}. No password.")
    url_env: str | None = option(
        None,
        text,
        "rsw",
        "The environment variable, on driver and executors, that holds the URL. So no secret "
        "enters a plan, a log or a checkpoint.",
    )
    queue: tuple[str, ...] = option(
        (), queue_names, "rsw", "Queues, with commas. Also `subscribe`, or what load() is given."
    )
    subscribe_pattern: str | None = option(
        None, pattern, "rs", "A regular expression for whole queue names, instead of `queue`."
    )
    table: str = option("jobs", one_of(*TABLES), "rsw", f"What to read: {', '.join(TABLES)}.")
    group: str = option(DEFAULT_GROUP, lambda value: text(value) or "", "rs", "The consumer group.")
    # Reading
    mode: str = option(
        "tail", one_of("tail", "consume"), "s", "`consume` takes jobs as a worker does, with ack."
    )
    consumer: str | None = option(
        None, text, "s", "The stable name of a consuming query; needed by mode=consume."
    )
    consumer_lease: float = option(
        30.0, seconds, "s", "How long a consuming query that died keeps its name and its jobs."
    )
    write_events: bool = option(
        True,
        flag,
        "s",
        "Of a consuming query: write the lifecycle events that a worker would, for rollups and for "
        "programs that wait for a job.",
    )
    on_corrupt: str = option(
        "dlq",
        one_of("dlq", "ack"),
        "s",
        "Of a consuming query: with their batch, jobs that cannot be read go to the dead-letter "
        "queue, or are acknowledged like the others.",
    )
    starting_offsets: str = option(
        "", offsets, "rs", "earliest, latest or ids by queue; default earliest, streaming latest."
    )
    starting_timestamp: int | None = option(
        None, number(0), "rs", "Unix milliseconds, instead of startingOffsets."
    )
    ending_offsets: str = option("latest", offsets, "r", "As startingOffsets; included.")
    ending_timestamp: int | None = option(
        None, number(0), "r", "Unix milliseconds, included, instead of endingOffsets."
    )
    max_offsets_per_trigger: int = option(200_000, number(1), "s", "The most rows in a batch.")
    min_offsets_per_trigger: int = option(
        0, number(0), "s", "Wait for so many rows, but not longer than maxTriggerDelay."
    )
    max_trigger_delay: float = option(900.0, seconds, "s", "See minOffsetsPerTrigger.")
    min_partitions: int = option(
        0, number(1, 10_000), "rs", "At least so many tasks; default 4 once there are 4,000 rows."
    )
    max_records_per_partition: int = option(50_000, number(1), "rs", "The most rows of a task.")
    server_share: float = option(
        0.5,
        share,
        "rs",
        "How much of the server's time one task takes; after each page it rests, to leave the "
        "remainder to live workers. 1 is full speed.",
    )
    fetch_count: int = option(
        0,
        number(1, 100_000),
        "rs",
        "The most entries in a page; live workers wait while one is read, so large entries make "
        "it shorter. Default 250, and 1000 at full speed.",
    )
    max_read_rows_per_second: int = option(
        0, number(0), "rs", "The most rows that one task reads in a second; 0 is no limit."
    )
    read_from: str = option(
        "primary", one_of("primary", "replica"), "rs", "Read from a replica, to spare the primary."
    )
    fail_on_data_loss: bool = option(
        True, flag, "rs", "Fail if entries were trimmed unread; false goes on and counts them."
    )
    reader: str | None = option(
        None,
        check_reader,
        "s",
        "Events and history: the stable name of this query. While it lives, entries that it has "
        "not read are not trimmed, up to readerHold.",
    )
    reader_hold: int = option(
        1_000_000, number(1), "s", "The most entries that the stream keeps for this reader."
    )
    reader_lease: float = option(
        60.0, seconds, "s", "How long entries are held for a reader that ended or died."
    )
    payload_format: str = option(
        "raw", one_of("raw", "json", "struct"), "rsw", "raw msgpack, JSON text, or payloadSchema."
    )
    payload_schema: str | None = option(
        None, schema_text, "rs", "DDL of the payload, such as `order_id bigint, to string`."
    )
    parse_mode: str = option(
        "PERMISSIVE",
        one_of("PERMISSIVE", "DROPMALFORMED", "FAILFAST"),
        "rs",
        "What to do with entries that cannot be read or do not fit payloadSchema: keep their "
        "bytes in _corrupt, drop, fail.",
    )
    include_pending: bool = option(
        False, flag, "r", "Jobs: who holds them. Adds consumer, deliveries, idle_ms."
    )
    pushdown: bool = option(
        False,
        flag,
        "r",
        "Let filters on entry_ts narrow what is read; needs "
        "spark.sql.python.filterPushdown.enabled.",
    )
    job_ids: tuple[str, ...] = option((), names, "r", "Results: of these jobs.")
    scan: bool = option(
        False, flag, "r", "Results: of all jobs, by going through every key of the database."
    )
    # Writing
    delivery: str = option(
        "exactly_once",
        one_of("exactly_once", "at_least_once", "dedup"),
        "w",
        "exactly_once stages and publishes; at_least_once adds directly; dedup adds each id once.",
    )
    dedup_ttl: float = option(86_400.0, seconds, "w", "How long an id stays taken with dedup.")
    txn_app_id: str | None = option(
        None,
        label,
        "w",
        "Names the write, so that a failed job can be run again; default a new "
        "name for each batch write, the query's id for a stream.",
    )
    txn_version: int = option(
        0, number(0), "w", "Of a batch write: a version that was published is not written again."
    )
    stage_ttl: float = option(
        86_400.0, seconds, "w", "How long staged rows of a failed task stay in memory."
    )
    max_backlog: int = option(
        900_000,
        number(1),
        "w",
        "The most jobs that may wait in the stream; other producers may trim it at 1,000,000.",
    )
    on_backlog: str = option(
        "wait", one_of("wait", "fail"), "w", "At maxBacklog: wait for the workers, or fail."
    )
    job_name: str = option("", lambda value: text(value) or "", "w", "The name of all jobs.")
    id_column: str = option("job_id", str, "w", "The job's id; drawn where it is null.")
    name_column: str = option("name", str, "w", "The job's name.")
    queue_column: str = option("queue", str, "w", "The queue of each row, if `queue` is not given.")
    run_at_column: str = option("run_at", str, "w", "When to run it; null is now.")
    attempts_column: str = option("attempts", str, "w", "The most runs of the job.")
    backoff_column: str = option("backoff_ms", str, "w", "The wait before each retry.")
    payload_column: str = option(
        "payload", str, "w", "The payload; without such a column all others become a map."
    )

    @classmethod
    def parse(cls, given: Mapping[str, str], use: str) -> "Options":
        """The options that Spark passes. `use`: r, s or w, as in the table, or rs for any read."""
        values: dict[str, Any] = {}
        for key, value in given.items():
            name = key.lower()
            row = _ROWS.get(_ALIASES.get(name, name))
            if row is None:
                if name in _OF_SPARK or name.startswith("spark."):
                    continue
                raise OptionError(_unknown(key))
            if name == "path" and "queue" in values:
                continue
            if not set(use) & set(row.metadata["uses"]):
                raise OptionError(f"option {camel(row.name)} is not for {_USES[use]}")
            try:
                values[row.name] = row.metadata["parse"](value)
            except (ValueError, TypeError) as error:
                raise OptionError(f"option {camel(row.name)}: {error}") from None
        options = cls(**values)
        return _checked(options, use, values)

    @classmethod
    def of_server(cls, given: Mapping[str, Any]) -> "Options":
        """Options that name a server, for functions that take their queues from rows."""
        return cls.parse({"queue": "any", **as_text(given)}, "rs")

    def endpoint(self) -> Endpoint:
        """The server. Read again wherever it is needed, so that secrets stay in the environment."""
        if self.url_env is not None:
            return Endpoint.parse(_from_environment(self.url_env))
        return Endpoint.parse(self.url or DEFAULT_URL)


def as_text(given: Mapping[str, Any]) -> dict[str, str]:
    """Options as Spark passes them, without those that are None."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
        if value is not None
    }


_USES = {"r": "batch reads", "s": "streaming reads", "rs": "reads", "w": "writes"}


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


_ROWS = {camel(row.name).lower(): row for row in dataclasses.fields(Options)}


def _unknown(key: str) -> str:
    every = {camel(row.name).lower(): camel(row.name) for row in _ROWS.values()}
    near = difflib.get_close_matches(key.lower(), every, 1)
    return f"there is no option {key!r}" + (f"; did you mean {every[near[0]]}?" if near else "")


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise OptionError(
            f"option urlEnv names the environment variable {variable}, and it is not set here: "
            "set it before the session starts, on executors with spark.executorEnv"
        )
    try:
        Endpoint.parse(value)
    except ValueError as error:
        raise OptionError(f"the environment variable {variable}: {error}") from None
    return value


def _checked(options: Options, use: str, given: Mapping[str, Any]) -> Options:
    """The options, with defaults filled in that depend on other options."""
    if options.url is not None and options.url_env is not None:
        raise OptionError("give either url or urlEnv, not both")
    options.endpoint()
    if options.starting_timestamp is not None and "starting_offsets" in given:
        raise OptionError("give either startingOffsets or startingTimestamp, not both")
    if options.ending_timestamp is not None and "ending_offsets" in given:
        raise OptionError("give either endingOffsets or endingTimestamp, not both")
    if not options.starting_offsets:
        start = "latest" if use == "s" else "earliest"
        options = dataclasses.replace(options, starting_offsets=start)
    if options.payload_format == "struct" and use != "w" and options.payload_schema is None:
        raise OptionError("payloadFormat=struct needs payloadSchema")
    if options.payload_schema is not None and options.payload_format != "struct":
        options = dataclasses.replace(options, payload_format="struct")
    if use == "w":
        _check_write(options, given)
    else:
        _check_read(options, use)
    return options


def _check_read(options: Options, use: str) -> None:
    if options.queue and options.subscribe_pattern:
        raise OptionError("give either queue or subscribePattern, not both")
    if not options.queue and not options.subscribe_pattern and options.table != "queues":
        raise OptionError("say which queue to read: option queue, or load(<queue>)")
    if use == "s" and options.mode == "tail" and options.table not in TAIL_TABLES:
        raise OptionError(
            f"table {options.table} cannot be followed as a stream: say table=events, history or "
            "dlq"
            + (", or mode=consume to take jobs as a worker does" if options.table == "jobs" else "")
        )
    if options.reader is not None:
        if options.table not in LOGS or options.mode == "consume":
            raise OptionError(
                "option reader: only a stream of table=events or history holds something back"
            )
        if options.reader_lease < 1:
            raise OptionError("option readerLease: must be at least 1s")
    if options.mode == "consume":
        if options.table != "jobs":
            raise OptionError("mode=consume is for table=jobs")
        if options.consumer is None:
            raise OptionError("mode=consume needs consumer, a stable name for this query")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", options.consumer):
            raise OptionError("option consumer: must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
        if options.consumer_lease < 1:
            raise OptionError("option consumerLease: must be at least 1s")
        if not options.queue:
            raise OptionError("mode=consume needs queue: a pattern may change what it matches")
        if options.read_from == "replica":
            raise OptionError("mode=consume writes, so it cannot read from a replica")
        if options.parse_mode == "DROPMALFORMED" and options.on_corrupt == "ack":
            raise OptionError(
                "parseMode=DROPMALFORMED with onCorrupt=ack would acknowledge jobs that nobody has "
                "seen: leave onCorrupt at dlq, or take parseMode=PERMISSIVE"
            )
    if options.table == "results" and not (options.job_ids or options.scan):
        raise OptionError(
            "table results needs jobIds, or scan=true to go through all keys of the database; "
            "chasqui.spark.with_results(df) joins results to rows"
        )


def _check_write(options: Options, given: Mapping[str, Any]) -> None:
    if options.table != "jobs":
        raise OptionError(f"only table jobs can be written, not {options.table}")
    if len(options.queue) > 1:
        raise OptionError("name one queue to write to, or give each row its own with queueColumn")
    if options.payload_format == "struct":
        raise OptionError("payloadFormat=struct is for reads; a struct column is written as it is")
    if "txn_version" in given and options.txn_app_id is None:
        raise OptionError("option txnVersion needs txnAppId: without a name every run is a new one")


def table_of_options() -> list[tuple[str, str, str, str]]:
    """Per option: name, default, where it is taken, meaning. docs/spark.md is made from it."""
    blank = Options()
    rows = []
    for row in dataclasses.fields(Options):
        default = getattr(blank, row.name)
        shown = str(default).lower() if isinstance(default, bool) else default or "-"
        if row.metadata["parse"] is seconds:
            shown = f"{default:g}s"
        uses = row.metadata["uses"]
        where = ", ".join(word for letter, word in _SHORT.items() if letter in uses)
        rows.append((camel(row.name), str(shown), where, row.metadata["meaning"]))
    return rows


_SHORT = {"r": "read", "s": "readStream", "w": "write"}
