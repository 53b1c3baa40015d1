"""Failures by signature: what differs from one to the next is masked, what is left is counted."""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: What is masked, in this order: the more particular first.
MASKS: Final = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<uuid>"),
    (r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b", "<ulid>"),
    (r"'[^']*'|\"[^\"]*\"", "<text>"),
    (r"\b[a-z][a-z0-9+.-]*://\S+", "<url>"),
    (r"(?:/[\w.@+-]+){2,}/?", "<path>"),
    (r"\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{12,}\b", "<hex>"),
    (r"\d+(?:[.,:]\d+)*", "<n>"),
)
#: Sample ids that are kept of each signature.
SAMPLES: Final = 5


def masked(reason: "Column") -> "Column":
    """A reason without its numbers, ids, quoted texts, URLs and paths."""
    for pattern, name in MASKS:
        reason = F.regexp_replace(reason, pattern, name)
    return F.substring(F.trim(reason), 1, 300)


def signature(reason: "Column") -> "Column":
    """Twelve hex digits that name a masked reason."""
    return F.substring(F.sha1(masked(reason)), 1, 12)


def triage(failures: "DataFrame") -> "DataFrame":
    """Failures grouped by masked reason, the most frequent first.

    Takes a dlq table, or events: of these the failed and the dead-lettered ones count.
    """
    columns = failures.columns
    if "event" in columns:
        failures = failures.where("event in ('failed', 'dlq')").withColumn("_why", F.col("reason"))
        moment, entry = F.col("ts"), F.col("job_id")
    else:
        parts = [F.col(name) for name in ("error", "detail", "reason") if name in columns]
        failures = failures.withColumn("_why", F.coalesce(*parts))
        moment, entry = F.col("entry_ts"), F.col("entry_id")
    why = F.coalesce("_why", F.lit(""))
    return (
        failures.groupBy(
            "queue", signature(why).alias("signature"), masked(why).alias("masked_reason")
        )
        .agg(
            F.count("*").alias("failures"),
            F.min(moment).alias("first_seen"),
            F.max(moment).alias("last_seen"),
            F.sort_array(F.collect_set(F.coalesce("name", F.lit("")))).alias("names"),
            F.slice(F.sort_array(F.collect_set(entry)), 1, SAMPLES).alias("sample_ids"),
        )
        .orderBy(F.desc("failures"), "signature")
    )
