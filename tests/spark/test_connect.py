"""Spark Connect: a server in a process of its own, and a client that has no JVM."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tests.servers import Server
from tests.spark.conftest import unavailable
from tests.spark.test_pipelines import make_events

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Spark Connect server."""
    from chasqui.errors import NotSupportedError
    from chasqui.spark.sessions import find_java

    if importlib.util.find_spec("grpc") is None:
        unavailable("no client of Spark Connect here: pip install 'chasqui[spark-connect]'")
    try:
        java = find_java()
    except NotSupportedError as error:
        unavailable(str(error))
    port, log = _free_port(), tmp_path_factory.mktemp("connect") / "log"
    settings = {
        "spark.connect.grpc.binding.port": port,
        "spark.sql.shuffle.partitions": 2,
        "spark.ui.enabled": "false",
    }
    command = [Path(pyspark.__file__).parent / "bin" / "spark-submit", "--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    told = {
        "JAVA_HOME": str(java.home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with (
        log.open("w") as out,
        subprocess.Popen(
            [*command, "spark-internal"], env=os.environ | told, stdout=out, stderr=out
        ) as process,
    ):
        try:
            deadline_s = time.monotonic() + 120
            while not _answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.1)
            yield f"sc://127.0.0.1:{port}"
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(300)
def test_every_verb_on_a_connect_server(
    connect: str, redis_86: Server, queue_name: str, tmp_path: Path
):
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_tour",
         connect, redis_86.url, queue_name, str(tmp_path)],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    events = make_events(20)
    assert told["session"] == "pyspark.sql.connect.session"
    assert [told[one] for one in ("exactly_once", "at_least_once", "dedup")] == [10, 10, 10]
    tables = {"jobs": 40, "events": len(events), "dlq": 0, "delayed": 0, "queues": 1}
    assert told["tables"] == tables
    assert told["results"] == 10
    assert told["pushdown"] == told["tail"] == len(events)
    assert told["rollup"] == sum(one["e"] == "completed" for one in events)
    assert told["report"] == len(events)
    assert told["consume"] == [36, 0]
    assert told["triage"] == ["bad order <n>"]
    assert told["replay"] == [4, 4]
    assert [one.split(" does not run on Spark Connect")[0] for one in told["refused"]] == [
        "archive", "compact", "read_losses",
    ]  # fmt: skip
    assert told["commands"] == [0, 0]
    assert told["mistake"].startswith("chasqui: there is no column nam: is it name")
    assert told["made"] is False
