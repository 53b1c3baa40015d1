"""The report: everything a person wants to know of a day of jobs, as data.

`gather` computes, `chasqui.spark.html` draws. The data are plain values, so the same report is
JSON.
"""

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from chasqui.spark import rollups
from chasqui.spark.signatures import triage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Columns of the plots: so many windows at most.
WINDOWS: Final = 120
_NICE_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 86_400)
_MOST_NAMES: Final = 15
_MOST_SIGNATURES: Final = 20


def gather(events: "DataFrame", dead: "DataFrame | None" = None) -> dict[str, Any]:
    """The report over events, and over the dead-letter queue if it is given."""
    events = events.where("event != 'drained'").cache()
    try:
        span = events.agg(F.min("ts"), F.max("ts"), F.count("*")).first()
        first, last, count = span
        if not count:
            return {"events": 0, "queues": [], "window_s": None}
        window_s = _window_s((last - first).total_seconds())
        rolled = rollups.rollup(events, f"{window_s} seconds").cache()
        try:
            return {
                "events": count,
                "first": first.isoformat(),
                "last": last.isoformat(),
                "window_s": window_s,
                "queues": _queues(rolled),
                "totals": _totals(rolled),
                "timeline": _timeline(rolled, events, window_s),
                "heat": _heat(events, window_s),
                "names": _names(rolled),
                "funnel": _rows(
                    rollups.funnel(events)
                    .groupBy("attempts", "outcome")
                    .agg(F.sum("jobs").alias("jobs"))
                    .orderBy("attempts", "outcome")
                ),
                "signatures": _signatures(events),
                "dlq": [] if dead is None else _dead(dead),
            }
        finally:
            rolled.unpersist()
    finally:
        events.unpersist()


def _window_s(span_s: float) -> int:
    """A round window that gives a readable number of columns."""
    return next((nice for nice in _NICE_S if span_s / nice <= WINDOWS), 86_400)


def _queues(rolled: "DataFrame") -> list[str]:
    return [row[0] for row in rolled.select("queue").distinct().orderBy("queue").collect()]


def _totals(rolled: "DataFrame") -> dict[str, Any]:
    totals = rolled.agg(
        *(F.sum(name).alias(name) for name in rollups.COUNTED),
        F.sum("runs").alias("runs"),
        F.expr("kll_merge_agg_bigint(run_us_sketch)").alias("run_us_sketch"),
        F.sum("waits").alias("waits"),
        F.expr("kll_merge_agg_bigint(wait_ms_sketch)").alias("wait_ms_sketch"),
    )
    return dict(_rows(rollups.with_percentiles(totals))[0])


def _timeline(rolled: "DataFrame", events: "DataFrame", window_s: int) -> list[dict[str, Any]]:
    """Per window, all queues and names together; waits without the delay of delayed jobs."""
    window = f"{window_s} seconds"
    merged = rollups.with_percentiles(
        rollups.merge(rolled.withColumn("all", F.lit("")), window, by=("all",))
    ).drop("all", "wait_ms_p50", "wait_ms_p95", "wait_ms_p99", "waits")
    waited = (
        rollups.waits(events)
        .groupBy(F.window("ts", window).start.alias("start"))
        .agg(
            *(
                F.expr(f"percentile_approx(wait_ms, {rank}, 1000)").alias(f"wait_ms_{name}")
                for name, rank in rollups.PERCENTILES.items()
            )
        )
    )
    return _rows(merged.join(waited, "start", "left").orderBy("start"))


def _heat(events: "DataFrame", window_s: int) -> list[dict[str, Any]]:
    """Runs by window and duration; a bucket is a power of two, in microseconds."""
    bucket = F.floor(F.log2(F.greatest(F.col("duration_us"), F.lit(1)))).cast("int")
    return _rows(
        events.where("duration_us is not null")
        .groupBy(
            F.window("ts", f"{window_s} seconds").start.alias("start"), bucket.alias("log2_us")
        )
        .agg(F.count("*").alias("runs"))
        .orderBy("start", "log2_us")
    )


def _names(rolled: "DataFrame") -> list[dict[str, Any]]:
    """The slowest names, by their 95th percentile."""
    merged = rolled.groupBy("queue", "name").agg(
        *(F.sum(name).alias(name) for name in rollups.COUNTED),
        F.sum("runs").alias("runs"),
        F.expr("kll_merge_agg_bigint(run_us_sketch)").alias("run_us_sketch"),
        F.sum("waits").alias("waits"),
        F.expr("kll_merge_agg_bigint(wait_ms_sketch)").alias("wait_ms_sketch"),
    )
    slowest = rollups.with_percentiles(merged).orderBy(F.desc_nulls_last("run_us_p95"))
    return _rows(slowest.limit(_MOST_NAMES))


def _signatures(events: "DataFrame") -> list[dict[str, Any]]:
    failed = events.where("event = 'failed'")
    return _rows(triage(failed).limit(_MOST_SIGNATURES))


def _dead(dead: "DataFrame") -> list[dict[str, Any]]:
    return _rows(
        dead.groupBy("queue", "reason").agg(F.count("*").alias("jobs")).orderBy(F.desc("jobs"))
    )


def _rows(df: "DataFrame") -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.asDict().items()} for row in df.collect()]


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value
