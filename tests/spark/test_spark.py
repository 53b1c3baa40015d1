"""The format on a real Spark: batch, streams, restarts, replays, tasks that fail."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

from chasqui._core.envelope import decode_envelope
from chasqui.model.payload import decode
from chasqui.sync import Queue
from tests.servers import Server
from tests.spark.direct import Redis
from tests.spark.sizes import FULL, sized


def numbers(redis: Redis) -> list[int]:
    return sorted(decode(decode_envelope(job[b"d"]).payload)["n"] for job in redis.jobs())


def fill(url: str, queue: str, count: int) -> None:
    with Queue(queue, redis_url=url) as producer:
        for start in range(0, count, 5000):
            size = min(5000, count - start)
            producer.add_bulk([{"name": "mail", "data": {"n": start + i}} for i in range(size)])


def reader(spark: Any, server: Server, **options: Any) -> Any:
    return spark.read.format("chasqui").options(url=server.url, **options)


def forget_commit(checkpoint: Path) -> int:
    """Remove the newest entry of the commit log: Spark will replay that batch."""
    newest = max(
        int(path.name) for path in (checkpoint / "commits").iterdir() if path.name[0] != "."
    )
    (checkpoint / "commits" / str(newest)).unlink()
    (checkpoint / "commits" / f".{newest}.crc").unlink()
    return newest


def test_what_is_written_is_read(spark: Any, each_server: Server, queue_name: str):
    df = spark.range(5000).selectExpr(
        "id as n", "concat('to-', id) as to", "'mail' as name", "array(id, id + 1) as list"
    )
    writer = df.write.format("chasqui").options(url=each_server.url, queue=queue_name)
    writer.mode("append").save()
    jobs = reader(spark, each_server, payloadSchema="n bigint, to string, list array<bigint>").load(
        queue_name
    )
    assert jobs.where("_corrupt is not null").count() == 0
    row = jobs.where("payload.n = 4321").first()
    assert (row["name"], row["payload"]["to"], row["payload"]["list"]) == (
        "mail",
        "to-4321",
        [4321, 4322],
    )
    assert jobs.select("payload.n").distinct().count() == 5000


EVERY_TYPE = """
    id % 2 = 0 as flag, cast(id as tinyint) as tiny, cast(id as smallint) as short,
    cast(id as int) as whole, id as long, cast(id / 3 as float) as small,
    if(id = 1, double('NaN'), -double('inf')) as real, concat('ü', id) as text,
    cast(concat('b', id) as binary) as data, date_add(date'0001-01-01', cast(id as int)) as day,
    timestamp'1969-12-31 23:59:59.999999 UTC' as at, timestamp_ntz'9999-12-31 23:59:59.5' as local,
    cast(id / 7 as decimal(10, 2)) as price, cast('1e-38' as decimal(38, 38)) as exact,
    array(id, null) as list, map(cast(id as int), 'x') as numbered,
    map(date'2026-11-18', array(decimal(1.5)), date'1582-10-15', null) as dated,
    named_struct('in', named_struct('at', timestamp'2026-11-18 03:16:03+02:00', 'n', id)) as deep,
    array(named_struct('sku', 'a', 'at', timestamp_ntz'2026-11-18 03:16:03')) as items,
    if(id = 2, null, named_struct('a', 1)) as maybe
"""


def test_every_type_comes_back_as_it_was(spark: Any, redis_86: Server, queue_name: str):
    df = spark.sql(f"SELECT {EVERY_TYPE} FROM range(3)")
    df.write.format("chasqui").options(url=redis_86.url, queue=queue_name).mode("append").save()
    jobs = reader(
        spark, redis_86, payloadSchema=df._jdf.schema().toDDL(), parseMode="FAILFAST"
    ).load(queue_name)
    back = jobs.select("payload.*")
    assert back.dtypes == df.dtypes
    assert repr(back.orderBy("long").collect()) == repr(df.orderBy("long").collect())


@pytest.mark.parametrize(
    ("column", "ddl", "what"),
    [
        ("parse_json('{}')", "v variant", "variant"),
        ("interval '1' day", "v interval day", "interval day"),
        ("array(interval '1' month)", "v array<interval month>", "interval month"),
    ],
)
def test_a_type_that_no_payload_can_hold_is_refused(
    spark: Any, redis_86: Server, queue_name: str, column: str, ddl: str, what: str
):
    writer = spark.range(3).selectExpr(f"{column} as v").write.format("chasqui")
    with pytest.raises(Exception, match=f"column v.*: a payload cannot hold {what}"):
        writer.options(url=redis_86.url, queue=queue_name).mode("append").save()
    assert Redis(redis_86.url, queue_name).spark_keys() == []
    with pytest.raises(Exception, match=f"column payload.v.*: a payload cannot hold {what}"):
        reader(spark, redis_86, payloadSchema=ddl).load(queue_name).count()


def test_every_table_can_be_asked_for(spark: Any, redis_86: Server, queue_name: str):
    redis = Redis(redis_86.url, queue_name)
    fill(redis_86.url, queue_name, 100)
    redis.add_events(50)
    redis("SET", redis.keys.result("r"), b"\x07", "EX", 100)
    with Queue(queue_name, redis_url=redis_86.url) as producer:
        producer.add("later", {"n": 1}, delay_ms=100_000)
    counts = {
        "jobs": 100,
        "events": 50,
        "dlq": 0,
        "delayed": 1,
        "results": 1,
        "queues": 1,
    }
    for table, count in counts.items():
        given = {"jobIds": "r,none"} if table == "results" else {}
        df = reader(spark, redis_86, table=table, **given).load(queue_name)
        assert df.count() == count, table
    subset = reader(spark, redis_86, table="events").schema("event string, ts timestamp")
    assert subset.load(queue_name).columns == ["event", "ts"]


def test_filters_are_pushed_down_and_say_the_same(spark: Any, redis_86: Server, queue_name: str):
    redis = Redis(redis_86.url, queue_name)
    for ms in range(1000, 6000, 100):
        redis("XADD", redis.keys.events, f"{ms}-0", "e", "active", "id", str(ms), "ts", str(ms))
    where = (
        "entry_ts >= timestamp'1970-01-01 00:00:02' and entry_ts < timestamp'1970-01-01 00:00:03'"
    )
    found = []
    for pushdown in ("true", "false"):
        df = reader(spark, redis_86, table="events", pushdown=pushdown).load(queue_name)
        found.append([row["job_id"] for row in df.where(where).orderBy("entry_id").collect()])
    assert found[0] == found[1] == [str(ms) for ms in range(2000, 3000, 100)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tabel": "jobs"}, "there is no option 'tabel'; did you mean table?"),
        ({"table": "job"}, "option table: must be one of jobs, events, dlq"),
        ({"fetchCount": "0"}, "option fetchCount: must be a whole number"),
        ({}, "is not on 127.0.0.1:"),
    ],
)
def test_what_is_wrong_is_said_on_the_driver(
    spark: Any, redis_86: Server, queue_name: str, options: dict[str, str], sentence: str
):
    with pytest.raises(Exception, match=re.escape(sentence)):
        reader(spark, redis_86, **options).load(queue_name).count()


def test_a_queue_is_never_overwritten(spark: Any, redis_86: Server, queue_name: str):
    writer = spark.range(3).write.format("chasqui").options(url=redis_86.url, queue=queue_name)
    with pytest.raises(Exception, match="a queue is only added to"):
        writer.mode("overwrite").save()


def test_a_batch_write_is_exact_though_tasks_fail(spark: Any, redis_86: Server, queue_name: str):
    """Each task dies once, behind 40,000 rows that it has staged."""
    from pyspark import TaskContext
    from pyspark.sql.functions import udf

    @udf("long")
    def fail_once(n):  # hints would make it a pandas function
        context = TaskContext.get()
        if context.attemptNumber() == 0 and n % 60_000 == 50_000:
            raise RuntimeError("this task dies")
        return n

    df = spark.range(0, FULL, 1, 2).select(fail_once("id").alias("n"))
    df.write.format("chasqui").options(url=redis_86.url, queue=queue_name).mode("append").save()
    redis = Redis(redis_86.url, queue_name)
    assert redis("XLEN", redis.keys.stream) == FULL
    assert numbers(redis) == list(range(FULL))


@sized(3000)
def test_a_streaming_write_is_exact_though_batches_are_replayed(
    spark: Any, each_server: Server, queue_name: str, tmp_path: Path, size: int
):
    out = f"{queue_name}-out"
    source, target = Redis(each_server.url, queue_name), Redis(each_server.url, out)
    source.add_events(size)
    checkpoint = tmp_path / "checkpoint"

    def run() -> Any:
        events = (
            spark.readStream.format("chasqui")
            .options(
                url=each_server.url,
                table="events",
                startingOffsets="earliest",
                maxOffsetsPerTrigger=size * 5 // 12,
            )
            .load(queue_name)
        )
        query = (
            events.selectExpr("duration_us as n", "job_id as source")
            .writeStream.format("chasqui")
            .options(url=each_server.url, queue=out, checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    query = run()
    sizes = [p.numInputRows for p in query.recentProgress]
    assert sizes == [size * 5 // 12, size * 5 // 12, size // 6]
    assert numbers(target) == list(range(size))
    assert forget_commit(checkpoint) == 2
    run()
    assert numbers(target) == list(range(size)), "a replayed batch is written once"
    source.add_events(700, start=size)
    run()
    assert numbers(target) == list(range(size + 700))
    assert len(target.spark_keys()) == 1
    latest = json.loads((checkpoint / "offsets" / "3").read_text().splitlines()[-1])
    assert latest[queue_name]["n"] == size + 700


def test_consumed_jobs_are_processed_once_and_acked(
    spark: Any, each_server: Server, queue_name: str, tmp_path: Path
):
    fill(each_server.url, queue_name, 7000)
    redis = Redis(each_server.url, queue_name)
    checkpoint, out = tmp_path / "checkpoint", str(tmp_path / "out")

    def run() -> None:
        jobs = (
            spark.readStream.format("chasqui")
            .options(
                url=each_server.url,
                mode="consume",
                consumer="etl",
                consumerLease="2s",
                maxOffsetsPerTrigger="3000",
                payloadSchema="n bigint",
            )
            .load(queue_name)
        )
        query = (
            jobs.select("payload.n", "entry_id")
            .writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert redis("XPENDING", redis.keys.stream, "default")[0] == 0
    assert redis("XLEN", redis.keys.stream) == 0, "also the last batch of the run is acked"
    fill(each_server.url, queue_name, 100)
    run()
    rows = spark.read.parquet(out)
    assert rows.count() == rows.select("entry_id").distinct().count() == 7100


def test_a_secret_stays_in_the_environment(
    spark: Any,
    locked_server: tuple[str, str],
    queue_name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    variable, canary = locked_server
    java = spark._jvm.java.lang.ProcessHandle.current().pid()
    assert canary not in Path(f"/proc/{java}/cmdline").read_text(), "everybody can list processes"
    checkpoint = tmp_path / "checkpoint"
    given = {"urlEnv": variable, "queue": queue_name}
    wrong = spark.read.format("chasqui").options(url=f"redis://:{canary}@127.0.0.1")
    spark.range(10).write.format("chasqui").options(**given).mode("append").save()
    jobs = spark.read.format("chasqui").options(**given).load()
    assert jobs.count() == 10
    plan = jobs._jdf.queryExecution().toString()
    spark.sparkContext.setLogLevel("INFO")
    try:
        stream = (
            spark.readStream.format("chasqui")
            .options(**given, mode="consume", consumer="c", consumerLease="2s")
            .load()
        )
        query = (
            stream.writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        with pytest.raises(Exception, match="urlEnv") as raised:
            wrong.load(queue_name)
    finally:
        spark.sparkContext.setLogLevel("OFF")
    progress = "".join(one.json for one in query.recentProgress)
    told = capfd.readouterr()
    for text in (plan, progress, str(raised.value), told.out, told.err):
        assert canary not in text
    for path in checkpoint.rglob("*"):
        assert not path.is_file() or canary.encode() not in path.read_bytes()
    pages = dict(pages_of(spark.sparkContext.uiWebUrl))
    assert any("BatchScan chasqui" in text for text in pages.values()), "they tell of the reads"
    assert any(variable in text for text in pages.values()), "and of the environment"
    assert not [url for url, text in pages.items() if canary in text]


def pages_of(root: str) -> Iterator[tuple[str, str]]:
    """Every page of Spark's UI, and what its API says."""
    (application,) = json.loads(get(f"{root}/api/v1/applications"))
    api = f"{root}/api/v1/applications/{application['id']}"
    left = [f"{api}/{one}" for one in ("environment", "jobs", "stages", "allexecutors", "logs")]
    left += [f"{api}/sql?details=true&planDescription=true&length=1000", f"{root}/"]
    seen = set(left)
    while left:
        url = left.pop()
        try:
            text = get(url)
        except HTTPError:
            continue
        yield url, text
        for link in re.findall(r'href="([^"#]+)"', text):
            target = urljoin(url, link.replace("&amp;", "&"))
            if target.startswith(root) and "/static/" not in target and "kill" not in target:
                # One order of a table is enough.
                target = re.sub(r"&[\w.]*(sort|desc|pageSize|page)=[^&]*", "", target)
                if target not in seen:
                    seen.add(target)
                    left.append(target)


def get(url: str) -> str:
    with urlopen(url, timeout=30) as reply:
        return str(reply.read().decode(errors="replace"))
