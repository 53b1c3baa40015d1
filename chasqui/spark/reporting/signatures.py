"""Failures by signature: the parts that vary are masked, what is left is counted."""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: What is masked, the more specific first.
MASKS: Final = (
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<uuid>"),
    (r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b", "<ulid>"),
    (r"'[^']*'|\"[^\"]*\"", "<text>"),
    (r"\b[a-z][a-z0-9+.-]*://\S+", "<url>"),
    (r"(?:/[\w.@+-]+){2,}/?", "<path>"),
    (r"\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{12,}\b", "<hex>"),
    (r"\d+(?:[.,:]\d+)*", "<n>"),
)
#: How many characters of a text count. Events keep 1000 characters of an exception's text and dead
#: jobs 2000, so the signature must come from what both have.
_LOOKED_AT: Final = 800
_SHOWN: Final = 300
#: Sample jobs that are kept of each signature.
SAMPLES: Final = 5


def masked(reason: "Column") -> "Column":
    """A reason without its numbers, ids, quoted texts, URLs and paths."""
    reason = F.substring(reason, 1, _LOOKED_AT)
    for pattern, name in MASKS:
        reason = F.regexp_replace(reason, pattern, name)
    return F.substring(F.trim(reason), 1, _SHOWN)


def with_signature(failures: "DataFrame") -> "DataFrame":
    """Events or dead jobs with two more columns: `masked_reason`, the reason without its varying
    parts, and `signature`, twelve hex digits that stand for it.

    A failed run and the dead job that it left have the same signature. So you can replay what a
    report shows of events: `replay(with_signature(dlq).where("signature = …"))`.
    """
    why = masked(_why(failures))
    return failures.withColumns(
        {"signature": F.substring(F.sha1(why), 1, 12), "masked_reason": why}
    )


def triage(failures: "DataFrame") -> "DataFrame":
    """Failures by signature, the most frequent first, with their queues and names.

    Takes a dlq table, or events, of which failed runs count.
    """
    moment = "entry_ts"
    if "event" in failures.columns:
        failures, moment = failures.where("event = 'failed'"), "ts"
    job = F.coalesce(F.nullif("job_id", F.lit("")), "entry_id")  # a corrupt one has no job
    return (
        with_signature(failures)
        .groupBy("signature", "masked_reason")
        .agg(
            F.count("*").alias("failures"),
            F.min(moment).alias("first_seen"),
            F.max(moment).alias("last_seen"),
            F.sort_array(F.collect_set("queue")).alias("queues"),
            F.sort_array(F.collect_set(F.coalesce("name", F.lit("")))).alias("names"),
            F.slice(F.sort_array(F.collect_set(job)), 1, SAMPLES).alias("sample_ids"),
        )
        .orderBy(F.desc("failures"), "signature")
    )


def _why(failures: "DataFrame") -> "Column":
    """What went wrong, in words that both tables have: the type of the exception and its text. For
    a dead job without them, its worker's detail, or only the kind of reason."""
    if "event" not in failures.columns:
        parts = [F.col(name) for name in ("error", "detail", "reason") if name in failures.columns]
        return F.coalesce(*parts, F.lit(""))
    text = F.coalesce("reason", F.lit(""))
    if "extra" not in failures.columns:
        return text
    kind = F.col("extra")["type"]
    return (
        F.when(kind.isNull(), text)
        .when(text == "", kind)
        .otherwise(F.concat(kind, F.lit(": "), text))
    )
