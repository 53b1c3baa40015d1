"""Events in, numbers out: the same functions over a batch, an archive or a stream.

Events are best effort, so nothing here assumes pairs: each number counts one kind of event. Run and
wait times are stored as KLL sketches, which can be merged: minutes into hours, queues into one.
"""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Per column of a rollup the event that it counts.
COUNTED: Final = {
    "started": "active",
    "completed": "completed",
    "failed": "failed",
    "retried": "retry-scheduled",
    "dead_lettered": "dlq",
}
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def rollup(events: "DataFrame", window: str = "1 minute") -> "DataFrame":
    """Per queue, name and window: counts of events, jobs a second, sketches of run and wait times.

    For a stream, pass `events.withWatermark("ts", …)`. The wait is from a job's creation to its
    first start, so it is known if ids are ULIDs. For a delayed job it includes the delay; see
    `waits`.
    """
    is_first = (F.col("event") == "active") & (F.col("attempt") == 1)
    wait_ms = _since(F.col("job_created_at"))
    rows = events.where("event != 'drained'").select(
        "queue",
        F.coalesce("name", F.lit("")).alias("name"),
        "ts",
        "event",
        F.when(F.col("event").isin("completed", "failed"), F.col("duration_us")).alias("run_us"),
        F.when(is_first, wait_ms).alias("wait_ms"),
    )
    rolled = rows.groupBy("queue", "name", F.window("ts", window).alias("window")).agg(
        *(
            F.count(F.when(F.col("event") == event, 1)).alias(name)
            for name, event in COUNTED.items()
        ),
        *_sketches(),
    )
    return _finished(rolled, ("queue", "name"))


def merge(
    rolled: "DataFrame", window: str = "1 hour", *, by: tuple[str, ...] = ("queue", "name")
) -> "DataFrame":
    """Rollups of small windows as one of larger ones, without the events."""
    merged = rolled.groupBy(*by, F.window("start", window).alias("window")).agg(*sums())
    return _finished(merged, by)


def sums() -> list["Column"]:
    """Sums of the rows of a rollup, for `agg`."""
    return [
        *(F.sum(name).alias(name) for name in COUNTED),
        F.sum("runs").alias("runs"),
        F.expr("kll_merge_agg_bigint(run_us_sketch)").alias("run_us_sketch"),
        F.sum("waits").alias("waits"),
        F.expr("kll_merge_agg_bigint(wait_ms_sketch)").alias("wait_ms_sketch"),
    ]


def with_percentiles(rolled: "DataFrame") -> "DataFrame":
    """A rollup with percentiles for its sketches: run_us_p50, …, wait_ms_p99; null without data."""
    for kind, size in (("run_us", "runs"), ("wait_ms", "waits")):
        for name, rank in PERCENTILES.items():
            value = F.expr(f"kll_sketch_get_quantile_bigint({kind}_sketch, {rank}D)")
            rolled = rolled.withColumn(f"{kind}_{name}", F.when(F.col(size) > 0, value))
    return rolled.drop("run_us_sketch", "wait_ms_sketch")


def waits(events: "DataFrame") -> "DataFrame":
    """Per run, how long it waited for a worker, exactly; needs a batch or an archive.

    The wait of a first run begins when its job was created, or promoted if it was delayed. The wait
    of a retry begins when its backoff was over. It is null if that event is missing.
    """
    active = events.where("event = 'active'").select(
        "queue", "job_id", "attempt", F.coalesce("name", F.lit("")).alias("name"), "ts",
        "job_created_at",
    )  # fmt: skip
    promoted = events.where("event = 'waiting'").selectExpr(
        "queue as q", "job_id as j", "ts as promoted"
    )
    joined = active.join(
        promoted,
        (F.col("queue") == F.col("q"))
        & (F.col("job_id") == F.col("j"))
        & (F.col("promoted") <= F.col("ts")),
        "left",
    )
    keys = ("queue", "job_id", "attempt", "name", "ts", "job_created_at")
    latest = joined.groupBy(*keys).agg(F.max("promoted").alias("promoted"))
    ready = F.when(F.col("attempt") == 1, F.coalesce("promoted", "job_created_at")).otherwise(
        F.col("promoted")
    )
    wait_ms = _since(ready).alias("wait_ms")
    return latest.select("queue", "job_id", "name", "attempt", "ts", wait_ms)


def funnel(events: "DataFrame") -> "DataFrame":
    """Jobs by their highest attempt and furthest event."""
    rank = F.expr(
        "case event when 'dlq' then 3 when 'completed' then 2 when 'failed' then 1 else 0 end"
    )
    last = (
        events.where("event != 'drained' and job_id != ''")
        .groupBy("queue", "job_id")
        .agg(F.max(F.coalesce("attempt", F.lit(1))).alias("attempts"), F.max(rank).alias("rank"))
    )
    outcome = F.element_at(
        F.array(*(F.lit(one) for one in ("open", "failed", "completed", "dead-lettered"))),
        F.col("rank") + 1,
    )
    return last.groupBy("queue", "attempts", outcome.alias("outcome")).agg(
        F.count("*").alias("jobs")
    )


def _sketches() -> list["Column"]:
    return [
        F.count("run_us").alias("runs"),
        F.expr("kll_sketch_agg_bigint(run_us)").alias("run_us_sketch"),
        F.count("wait_ms").alias("waits"),
        F.expr("kll_sketch_agg_bigint(wait_ms)").alias("wait_ms_sketch"),
    ]


def _finished(rolled: "DataFrame", by: tuple[str, ...]) -> "DataFrame":
    """A rollup with its rate, and its columns in order."""
    start, end = F.col("window.start"), F.col("window.end")
    return rolled.select(
        *by,
        start.alias("start"),
        end.alias("end"),
        *COUNTED,
        (F.col("completed") / ((_ms(end) - _ms(start)) / 1000)).alias("jobs_per_s"),
        "runs",
        "run_us_sketch",
        "waits",
        "wait_ms_sketch",
    )


def _since(moment: "Column") -> "Column":
    """Milliseconds from a time to an event; 0 if clocks differ, null if it is unknown."""
    passed_ms = _ms(F.col("ts")) - _ms(moment)
    return F.when(passed_ms < 0, F.lit(0)).otherwise(passed_ms)


def _ms(moment: "Column") -> "Column":
    return F.unix_millis(moment)
