"""A program of a Spark Connect client: every verb once. Prints what came of each, as JSON.

In a process of its own: one that has a session of the classic kind cannot have a remote one.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chasqui import spark as cs
from chasqui.errors import NotSupportedError
from tests.cli.conftest import call
from tests.spark.direct import Redis
from tests.spark.test_pipelines import make_events, publish


def main() -> None:
    remote, url, queue, folder = sys.argv[1:]
    spark, server, redis = cs.session(remote), {"url": url}, Redis(url, queue)
    publish(redis, make_events(20))
    told: dict[str, Any] = {"session": type(spark).__module__}

    rows = spark.sql("select id as order_id, cast(id as string) as job_id from range(10)")
    for delivery in ("exactly_once", "at_least_once", "dedup"):
        told[delivery] = cs.enqueue(rows, queue, delivery=delivery, **server).added
    rows.write.format("chasqui").options(queue=queue, **server).mode("append").save()
    told["tables"] = {
        table: cs.read(spark, table, queue, **server).count()
        for table in ("jobs", "events", "dlq", "delayed", "queues")
    }
    told["results"] = cs.with_results(rows, queue, **server).where("result is null").count()
    events = cs.read(spark, "events", queue, pushdown=True, **server)
    told["pushdown"] = events.where("entry_ts > '2020-01-01'").count()
    told["rollup"] = cs.with_percentiles(cs.rollup(events)).agg({"completed": "sum"}).first()[0]
    told["report"] = cs.gather(events, cs.read(spark, "dlq", queue, **server))["events"]

    tail = cs.follow(spark, "events", queue, startingOffsets="earliest", **server).writeStream
    finish(tail.format("parquet").option("path", f"{folder}/tail"), f"{folder}/ck-tail")
    told["tail"] = spark.read.parquet(f"{folder}/tail").count()
    schema = {"mode": "consume", "consumer": "etl", "payloadSchema": "order_id bigint"}
    jobs = cs.follow(spark, "jobs", queue, **schema, **server)
    finish(jobs.writeStream.foreachBatch(handler(url, f"{folder}/taken")), f"{folder}/ck-jobs")
    told["consume"] = [
        spark.read.parquet(f"{folder}/taken").count(),
        redis("XLEN", redis.keys.stream),
    ]
    dead = cs.read(spark, "dlq", queue, **server)
    told["triage"] = [row["masked_reason"] for row in cs.triage(dead).collect()]
    told["replay"] = [cs.replay(dead, **server), cs.replay(dead, dry_run=False, **server)]

    lake = f"{folder}/lake"
    told["refused"] = [
        refusal(lambda: cs.archive(spark, queue, lake, **server)),
        refusal(lambda: cs.compact(spark, lake)),
        refusal(lambda: cs.read_losses(spark, lake)),
    ]
    words = ("--queue", queue, "--master", remote)
    told["commands"] = [
        call("spark", *command, *words, url=url).code
        for command in (("triage",), ("export", "--to", f"parquet:{folder}/jobs"))
    ]
    told["mistake"] = call("spark", "replay", "--where", "nam = 1", *words, url=url).err
    told["made"] = Path(lake).exists()
    print(json.dumps(told))


def handler(url: str, to: str) -> Callable[[Any, int], None]:
    def handle(df: Any, batch: int) -> None:
        bad = df.where("payload.order_id = 3")
        cs.fail_jobs(bad, "bad order 3", is_final=True, url=url)
        df.where("payload.order_id != 3").select("job_id").write.mode("append").parquet(to)

    return handle


def finish(writer: Any, checkpoint: str) -> None:
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(60)


def refusal(deed: Callable[[], object]) -> str:
    try:
        deed()
    except NotSupportedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
