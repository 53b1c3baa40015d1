"""The examples of docs/spark.md run as they stand, in order, sharing names."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.direct import Redis
from tests.spark.test_history import work
from tests.spark.test_pipelines import make_events, publish

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
#: The second column of the table of pipelines.
COMMANDS = re.findall(
    r"^\| [^|]*\| `([a-z][^`]+)` \|",
    PAGE.partition("\n## Pipelines\n")[2].partition("\n## ")[0],
    re.MULTILINE,
)


def fill(url: str) -> Redis:
    """The queues that the page speaks of, with jobs, events and dead jobs; the first of them."""
    for name in ("refunds", "orders"):
        redis = Redis(url, name)
        publish(redis, make_events(20))
        assert call("add", name, "ship", '{"order_id": 1}', url=url).code == 0
        job = redis.jobs()[0]
        for reason in ("Timeout after 5 s", "no customer"):
            words = ("d", job[b"d"], "n", "ship", "source_id", "1-0", "reason", reason)
            redis("XADD", redis.keys.dlq, "*", *words)
    return redis


def test_programs(spark: Any, locked_server: tuple[str, str], tmp_path: Path):
    """Only the server and the folders are other ones: the session has them from its start."""
    variable, _ = locked_server
    orders = fill(os.environ[variable])
    events = orders("XLEN", orders.keys.events)
    names: dict[str, Any] = {}
    for program in PROGRAMS:
        program = program.replace('"url", "redis://localhost:6379"', f'"urlEnv", "{variable}"')
        program = program.replace("QUEUE_SECRET_URL", variable)
        for folder in ("out", "taken", "checkpoints"):
            program = program.replace(f'"{folder}', f'"{tmp_path}/{folder}')
        exec(compile(program, "docs/spark.md", "exec"), names)
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
    assert spark.read.parquet(f"{tmp_path}/out").count() == events
    assert spark.read.parquet(f"{tmp_path}/taken").count() == 1
    assert names["done"].added == 20
    assert [row["reason"] for row in names["dead"].collect()] == ["no customer"]


def test_commands(spark: Any, private_server: Callable[..., Server], tmp_path: Path):
    """As far as they end by themselves; the places are other ones, and the signature a real one."""
    server = private_server("redis-8.6")
    work(server, "orders", [1])
    fill(url := server.url)
    spark.range(3).write.parquet(str(tmp_path / "rows"))
    found = call("spark", "triage", "--queue", "orders", "--json", url=url).json
    places = {
        "parquet:orders/": f"parquet:{tmp_path / 'rows'}",
        "lake": str(tmp_path / "lake"),
        "report.html": str(tmp_path / "report.html"),
        "parquet:dead/": f"parquet:{tmp_path / 'dead'}",
        "5e83bb865d1d": found[0]["signature"],
    }
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        words = [places.get(word, word) for word in shlex.split(command) if word != "--follow"]
        ran = call("spark", *words, url=url)
        assert ran.code == 0, (command, ran)
