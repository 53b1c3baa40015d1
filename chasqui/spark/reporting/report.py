"""The report: what you want to know about a day of jobs, as data.

`gather` computes it, html.py draws it. The data are plain values, so the report is also JSON. It
says which events are missing because they were trimmed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql import functions as F

from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.spark.api import read
from chasqui.spark.archiving.archive import entry_order, read_archive, read_losses
from chasqui.spark.connections import check_queues, connected, queues_of
from chasqui.spark.options import OptionError, Options
from chasqui.spark.reading import ranges
from chasqui.spark.reporting import rollups
from chasqui.spark.reporting.signatures import triage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: The most windows, which are the columns of the plots.
WINDOWS: Final = 120
_NICE_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 86_400)
_MOST_NAMES: Final = 15
_MOST_SIGNATURES: Final = 20
#: The columns of dead jobs that a report reads; not their payloads.
_DEAD: Final = ("queue", "entry_id", "entry_ts", "job_id", "name", "reason", "detail", "error")

_NOTHING: Final[dict[str, Any]] = {"window_s": None, "timeline": []}

#: Per queue: `first`, the time of the first event that is left (None: there is none), and
#: `trimmed`, how many there were before it (None: unknown).
Kept: TypeAlias = dict[str, Any]
#: Called before each step with its name, in a few words.
Step: TypeAlias = Callable[[str], object]


def report_queue(
    spark: "SparkSession",
    queue: str,
    *,
    since: datetime | None = None,
    on_step: Step = str,
    **options: Any,
) -> dict[str, Any]:
    """The report on what the server has now of a queue, or of several, with commas.

    Events that are trimmed while they are read are counted and reported. `options` name the server.
    `on_step` is called with a few words before each step.
    """
    on_step("reading events")
    with events_now(spark, queue, since=since, **options) as (events, lacks):
        dead = read(spark, "dlq", queue, **options, columns=_DEAD)
        return _gather(events, dead, lacks, on_step)


@contextmanager
def events_now(
    spark: "SparkSession", queue: str, *, since: datetime | None = None, **options: Any
) -> Iterator[tuple["DataFrame", dict[str, Any]]]:
    """All events that the server has now, cached, and which are missing.

    `html.missing` puts the latter, a part of a report, into sentences.
    """
    start = None if since is None else int(since.timestamp() * 1000)
    kept = kept_events(queue, **options)
    events = read(
        spark, "events", queue, **options, startingTimestamp=start, failOnDataLoss=False
    ).cache()
    try:
        events.count()  # all of them, now
        losses = _trimmed_meanwhile(events, kept, kept_events(queue, **options), since)
        yield events, _lacks(losses, kept, since)
    finally:
        events.unpersist()


def report_archive(
    spark: "SparkSession",
    archive: str,
    queue: str,
    *,
    since: datetime | None = None,
    on_step: Step = str,
    **options: Any,
) -> dict[str, Any]:
    """The report on archived events. `options` name the server that is asked for dead jobs.

    If it cannot be reached, or does not have the queue, the report says why they are unknown.
    """
    on_step("reading the archive")
    names = Options.of_server({**options, "queue": queue}).queue
    every = read_archive(spark, archive).where(F.col("queue").isin(*names))
    events, kept = every, list[Kept]()
    if since is not None:
        events, older = _split(every, since)
        covered = {row[0] for row in older.collect()}
        begun = events.where(~F.col("queue").isin(*covered)) if covered else events
        rows = begun.groupBy("queue").agg(F.min("ts")).orderBy("queue").collect()
        kept = [{"queue": name, "first": _utc(first), "trimmed": None} for name, first in rows]
    losses = read_losses(spark, archive).where(F.col("queue").isin(*names))
    unknown = why_unknown(queue, **options)
    dead = None if unknown else read(spark, "dlq", queue, **options, columns=_DEAD)
    report = gather(events, dead, losses=losses, kept=kept, since=since, on_step=on_step)
    return {**report, "dlq_unknown": unknown}


def _split(archived: "DataFrame", since: datetime) -> tuple["DataFrame", "DataFrame"]:
    """The events since then, and the queues that have older ones.

    Days are folders, so of days long before then only the names are read. A day is in the time zone
    of the session that wrote it, so the days next to `since` are read too.
    """
    day = _utc(since).date()
    is_near = F.col("date") >= F.lit(day - timedelta(days=1))
    is_older = (F.col("date") <= F.lit(day + timedelta(days=1))) & (F.col("ts") < F.lit(since))
    near = archived.where(is_near)
    older = archived.where(~is_near).select("queue").union(near.where(is_older).select("queue"))
    return near.where(F.col("ts") >= F.lit(since)), older.distinct()


def why_unknown(queue: str, **options: Any) -> str | None:
    """Why the server does not know these queues; None if it does."""
    try:
        checked = Options.of_server({**options, "queue": queue})
        check_queues(checked, checked.queue)
    except (ChasquiError, OptionError) as error:
        return str(error)
    return None


def kept_events(queue: str, **options: Any) -> list[Kept]:
    """Which events of a queue, or of several with commas, its server still has."""
    checked = Options.of_server({**options, "queue": queue})
    kept = []
    for name in queues_of(checked):
        with connected(checked, name) as connection:
            first, trimmed = connection.run(ranges.oldest(Keys(name).events))
        moment = None if first is None else ranges.time_of(first)
        kept.append({"queue": name, "first": moment, "first_id": first, "trimmed": trimmed})
    return kept


def gather(
    events: "DataFrame",
    dead: "DataFrame | None" = None,
    *,
    losses: "DataFrame | Iterable[Mapping[str, Any]] | None" = None,
    kept: Iterable[Kept] = (),
    since: datetime | None = None,
    on_step: Step = str,
) -> dict[str, Any]:
    """The report on events and, if `dead` is given, on that dlq table.

    `losses` are rows of `read_losses`. With `kept`, from `kept_events`, and `since`, the report
    says which queues have no events from so far back.
    """
    if losses is not None and not isinstance(losses, Iterable):
        losses = [row.asDict() for row in losses.collect()]
    events = events.cache()
    try:
        return _gather(events, dead, _lacks(losses or (), kept, since), on_step)
    finally:
        events.unpersist()


def _gather(
    events: "DataFrame", dead: "DataFrame | None", lacks: dict[str, Any], on_step: Step
) -> dict[str, Any]:
    on_step("counting events")
    first, last, count = events.agg(F.min("ts"), F.max("ts"), F.count("*")).first()
    report = {"made": datetime.now(UTC).isoformat(), "events": count, **lacks, "dlq": None}
    if dead is not None:
        on_step("grouping dead jobs")
        report["dlq"] = _dead(dead)
    if not count:
        return {**report, **_NOTHING}
    window_s = _window_s((last - first).total_seconds())
    cells = _cells(events, window_s).cache()
    try:
        on_step("computing percentiles of run times")
        totals, by_queue, timeline = _summed(cells)
        heat, names = _heat(cells), _names(cells)
        on_step("computing percentiles of waits")
        waited = _waited(events, window_s)
        on_step("grouping retries and failures")
        return {
            **report,
            "first": _plain(first),
            "last": _plain(last),
            "window_s": window_s,
            "queues": [row["queue"] for row in by_queue],
            "by_queue": by_queue,
            "totals": {**totals, **waited.get(None, {})},
            "timeline": [{**row, **waited.get(row["start"], {})} for row in timeline],
            "heat": heat,
            **names,
            "funnel": _rows(
                rollups.funnel(events)
                .groupBy("attempts", "outcome")
                .agg(F.sum("jobs").alias("jobs")),
                "attempts",
                "outcome",
            ),
            "signatures": _rows(triage(events).limit(_MOST_SIGNATURES)),
        }
    finally:
        cells.unpersist()


# ── What is missing ─────────────────────────────────────────────────────────────────────────────


def _trimmed_meanwhile(
    events: "DataFrame", before: list[Kept], after: list[Kept], since: datetime | None
) -> list[dict[str, Any]]:
    """Events that were trimmed between two looks, and were not read in between."""
    losses = []
    for was, now in zip(before, after, strict=True):
        if was["trimmed"] is None or now["trimmed"] == was["trimmed"] or was["first"] is None:
            continue
        end = now["first"] or datetime.now(UTC)
        if since is not None and end <= since:
            continue
        lost = None  # events between the first one and `since` are not counted
        if since is None or since <= was["first"]:
            mine = events.where(F.col("queue") == was["queue"])
            if now["first_id"] is not None:
                first = F.lit(now["first_id"])
                mine = mine.where(entry_order("entry_id") < entry_order(first))
            lost = now["trimmed"] - was["trimmed"] - mine.count()
        if lost != 0:
            start = was["first"] if since is None else max(since, was["first"])
            losses.append(
                {"queue": was["queue"], "after_ts": start, "before_ts": end, "lost": lost}
            )
    return losses


def _lacks(
    losses: Iterable[Mapping[str, Any]], kept: Iterable[Kept], since: datetime | None
) -> dict[str, Any]:
    """The part of a report that says what is missing."""
    names = ("queue", "first", "trimmed")
    rows = [{name: _plain(one[name]) for name in names} for one in kept]
    queues = [row["queue"] for row in rows]
    return {
        "queues": queues, "since": _plain(since), "kept": rows, "losses": _since(losses, since),
    }  # fmt: skip


def _since(losses: Iterable[Mapping[str, Any]], since: datetime | None) -> list[dict[str, Any]]:
    """The losses of the time that was asked for, in order."""
    names = ("queue", "after_ts", "before_ts", "lost")
    rows = [{name: _plain(row[name]) for name in names} for row in losses]
    if since is not None:
        rows = [row for row in rows if row["before_ts"] > _plain(since)]
    return sorted(rows, key=lambda row: (row["before_ts"], row["queue"]))


# ── Numbers ─────────────────────────────────────────────────────────────────────────────────────


def _window_s(span_s: float) -> int:
    """A round window for at most WINDOWS columns; beyond the list, whole days."""
    days = math.ceil(span_s / WINDOWS / 86_400)
    return next((nice for nice in _NICE_S if span_s / nice <= WINDOWS), days * 86_400)


def _cells(events: "DataFrame", window_s: int) -> "DataFrame":
    """How many events of each kind and run time there were, per queue, name and window.

    Every run time on the page is computed from these cells, so that its parts agree: two sketches
    of the same values would not. Run times are cut to three digits, which bounds the number of
    cells.
    """
    us = F.greatest(F.col("duration_us"), F.lit(1))
    step = F.greatest(F.pow(F.lit(10), F.floor(F.log10(us)) - 2), F.lit(1))
    is_run = F.col("event").isin("completed", "failed") & F.col("duration_us").isNotNull()
    return events.groupBy(
        "queue",
        F.coalesce("name", F.lit("")).alias("name"),
        F.window("ts", f"{window_s} seconds").start.alias("start"),
        "event",
        F.when(is_run, (F.floor(us / step) * step).cast("bigint")).alias("run_us"),
    ).agg(F.count("*").alias("n"))


def _sums() -> list["Column"]:
    """Sums of cells, for `agg`: what a rollup counts, and percentiles of run times."""
    counts = (
        F.sum(F.when(F.col("event") == event, F.col("n")).otherwise(0)).alias(name)
        for name, event in rollups.COUNTED.items()
    )
    ranks = (
        F.expr(f"cast(percentile(run_us, {rank}D, n) as bigint)").alias(f"run_us_{name}")
        for name, rank in rollups.PERCENTILES.items()
    )
    return [*counts, *ranks]


def _summed(
    cells: "DataFrame",
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The totals; the sums per queue; per window. A window without events has no row."""
    rows = _rows(cells.groupingSets([[], ["queue"], ["start"]], "queue", "start").agg(*_sums()))
    found: dict[str, list[dict[str, Any]]] = {"": [], "queue": [], "start": []}
    for row in rows:
        by = {name: row.pop(name) for name in ("queue", "start")}
        kind = next((name for name, value in by.items() if value is not None), "")
        found[kind].append({kind: by[kind], **row} if kind else row)
    (totals,) = found[""]
    by_queue, timeline = (sorted(found[n], key=itemgetter(n)) for n in ("queue", "start"))
    return totals, by_queue, timeline


def _waited(events: "DataFrame", window_s: int) -> dict[str | None, dict[str, Any]]:
    """Waits per window, and of all windows under None, without the delay of delayed jobs."""
    start = F.window("ts", f"{window_s} seconds").start
    waits = rollups.waits(events).withColumn("start", start)
    rows = waits.rollup("start").agg(
        *(
            F.expr(f"percentile_approx(wait_ms, {rank}, 1000)").alias(f"wait_ms_{name}")
            for name, rank in rollups.PERCENTILES.items()
        )
    )
    return {row.pop("start"): row for row in _rows(rows)}


def _heat(cells: "DataFrame") -> list[dict[str, Any]]:
    """Runs by window and duration: from 1, 2, 5, 10, … microseconds on."""
    us = F.col("run_us")
    power = F.pow(F.lit(10), F.floor(F.log10(us)))
    digit = F.when(us >= 5 * power, 5).when(us >= 2 * power, 2).otherwise(1)
    runs = cells.where("run_us is not null").groupBy(
        "start", (power * digit).cast("bigint").alias("from_us")
    )
    return _rows(runs.agg(F.sum("n").alias("runs")), "start", "from_us")


def _names(cells: "DataFrame") -> dict[str, Any]:
    """The slowest names, by their 95th percentile, and how many there are in all."""
    every = cells.where("event != 'drained'").groupBy("queue", "name").agg(*_sums())
    counted = every.withColumn("names_in_all", F.expr("count(*) over ()"))
    slowest = counted.orderBy(F.desc_nulls_last("run_us_p95"), "queue", "name").limit(_MOST_NAMES)
    rows = _rows(slowest)
    count = max((row.pop("names_in_all") for row in rows), default=0)
    return {"names": rows, "names_in_all": count}


def _dead(dead: "DataFrame") -> dict[str, Any]:
    dead = dead.select(*_DEAD).cache()
    try:
        by_reason = _rows(dead.groupBy("reason").agg(F.count("*").alias("jobs")))
        by_reason.sort(key=lambda row: (-row["jobs"], row["reason"] or ""))
        return {
            "jobs": sum(row["jobs"] for row in by_reason),
            "reasons": by_reason,
            "signatures": _rows(triage(dead).limit(_MOST_SIGNATURES)),
        }
    finally:
        dead.unpersist()


def _rows(df: "DataFrame", *by: str) -> list[dict[str, Any]]:
    """A few rows as plain values; sorted here, because sorting in Spark is an extra job."""
    rows = [{name: _plain(value) for name, value in row.asDict().items()} for row in df.collect()]
    return sorted(rows, key=itemgetter(*by)) if by else rows


def _plain(value: Any) -> Any:
    return _utc(value).isoformat() if isinstance(value, datetime) else value


def _utc(moment: datetime) -> datetime:
    """Spark gives times without a zone, in that of this process."""
    return moment.astimezone(UTC)
