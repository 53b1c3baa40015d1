"""`chasqui spark`: its commands as their users have them, on the run's session."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_py

from chasqui.cli import spark_run
from chasqui.errors import ChasquiError
from chasqui.sync import Queue
from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.direct import Redis, struct, writer
from tests.spark.test_pipelines import make_events, publish

COMMANDS = [
    "demo", "doctor", "enqueue", "archive", "compact", "rollup", "report", "triage", "replay",
    "export", "txn-list", "txn-resume", "txn-discard",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_the_screen(command: str):
    words = command.split("-")
    ran = call("spark", *words, "--help")
    assert ran.code == 0
    assert f"Example: chasqui spark {' '.join(words)}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_help_lists_every_command():
    shown = call("spark", "--help").out.partition("Commands:\n")[2]
    listed = re.findall(r"^  (\w+) ", shown, re.MULTILINE)
    assert listed == [*(one for one in COMMANDS if "-" not in one), "txn"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("enqueue", "--from", "xml:x", "--queue", "q"), "--from takes a format and a path"),
        (("export", "--queue", "q", "--to", "x"), "--to takes a format and a path"),
        (("report", "--queue", "q"), "say where the page goes with --html FILE"),
        (("rollup", "--queue", "q", "--redis-url", "embedded://"), "not embedded://"),
        (("rollup", "--queue", "q", "--conf", "x"), "--conf takes name=value"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], sentence: str):
    ran = call("spark", *words)
    assert ran.code != 0
    assert sentence in ran.err
    assert "Traceback" not in ran.err


def test_doctor_says_what_is_there(redis_86: Server):
    ran = call("spark", "doctor", "--json", url=redis_86.url)
    assert ran.code == 0
    assert {row["verdict"] for row in ran.json} == {"ok"}
    assert [row["what"] for row in ran.json] == ["java", "packages", "workers' Python", "server"]


def test_unfinished_writes_are_listed_resumed_and_discarded(redis_86: Server, queue_name: str):
    schema = struct(n="bigint")
    given = {"queue": queue_name, "maxBacklog": 10, "onBacklog": "fail"}
    from tests.spark.direct import batches

    for app in ("one", "two"):
        it = writer(redis_86.url, schema, txnAppId=app, **given)
        with pytest.raises(RuntimeError):
            it.commit([it.write(batches({"n": list(range(30))}, schema))])
    txn = ("spark", "txn")
    listed = call(*txn, "list", "--queue", queue_name, "--json", url=redis_86.url).json
    assert [(row["txn"], row["state"], row["left"]) for row in listed] == [
        ("one", "publishing", 20),
        ("two", "publishing", 30),
    ]
    ran = call(*txn, "resume", "--queue", queue_name, "one", url=redis_86.url)
    assert ran.out == "published 20 jobs; 10 of 30 were published before\n"
    ran = call(*txn, "discard", "--queue", queue_name, "two", url=redis_86.url)
    assert ran.out == "would drop 30 jobs; add --yes to do it\n"
    ran = call(*txn, "discard", "--queue", queue_name, "two", "--json", url=redis_86.url)
    assert ran.json == {"dropped": 0, "selected": 30}
    ran = call(*txn, "resume", "--queue", queue_name, "one", "--json", url=redis_86.url)
    assert ran.json == {"published": 0, "found": 30}
    ran = call(*txn, "discard", "--queue", queue_name, "two", "--yes", url=redis_86.url)
    assert ran.out == "dropped 30 jobs\n"
    assert call(*txn, "discard", "--queue", queue_name, "two", url=redis_86.url).code == 1


def test_moments_of_a_table_are_utc_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from pyspark.sql.types import TimestampType

    from chasqui.cli.spark_run import show_table

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        seen = TimestampType().fromInternal(1_700_000_000_123_000)
        run: Any = SimpleNamespace(tasks=str)
        table: Any = SimpleNamespace(columns=["seen", "n"], collect=lambda: [(seen, 1)])
        for as_json in (False, True):
            show_table(run, table, as_json, "nothing")
    finally:
        monkeypatch.undo()
        time.tzset()
    told = capsys.readouterr().out.splitlines()
    moment = "2023-11-14T22:13:20.123Z"
    assert told == ["seen\tn", f"{moment}\t1", f'[{{"seen": "{moment}", "n": 1}}]']


def test_an_interrupt_stays_one_though_spark_fails_by_it(monkeypatch: pytest.MonkeyPatch):
    """PySpark talks to its JVM as it cleans up; if that fails, it is the error that is raised."""
    from py4j.protocol import Py4JError

    from chasqui.cli.spark_run import SparkRun
    from chasqui.spark import sessions

    stopped: list[bool] = []
    session = SimpleNamespace(stop=lambda: stopped.append(True))
    monkeypatch.setattr(sessions, "running_session", lambda: None)
    monkeypatch.setattr(sessions, "session", lambda *_, **__: session)

    def work(*, is_interrupted: bool) -> None:
        with SparkRun(None, None, "redis://127.0.0.1:1"):
            try:
                if is_interrupted:
                    signal.raise_signal(signal.SIGINT)
            finally:
                raise Py4JError("An error occurred while calling o25.sc")

    with pytest.raises(KeyboardInterrupt):
        work(is_interrupted=True)
    with pytest.raises(ChasquiError, match="Spark's driver ended"):
        work(is_interrupted=False)
    assert stopped == [True, True]


@pytest.mark.slow
def test_demo_on_a_given_server_leaves_nothing_there(
    spark: Any, private_server: Callable[..., Server], tmp_path: Path
):
    url, page = private_server("redis-8.6").url, tmp_path / "page.html"
    words = ("--rows", "10000", "--html", str(page), "--redis-url", url, "--json")
    ran = call("spark", "demo", *words)
    assert ran.code == 0, ran.err
    assert ran.json["rows"] == 10_000
    assert ran.json["dead"] == ran.json["replayed"] == 1
    assert ran.json["report"] == str(page)
    assert page.stat().st_size > 0
    with redis_py.Redis.from_url(url) as client:
        assert client.dbsize() == 0


def test_the_tour_by_hand(spark: Any, redis_86: Server, queue_name: str, tmp_path: Path):
    """Enqueue, archive, compact, roll up, report, triage, replay, export: each by its command."""
    url, redis = redis_86.url, Redis(redis_86.url, queue_name)
    q = ("--queue", queue_name)
    spark.range(50).selectExpr("id as n", "'mail' as name").write.parquet(str(tmp_path / "rows"))
    for added in (50, 0):  # under a name, so that the second run adds nothing
        words = ("enqueue", "--from", f"parquet:{tmp_path / 'rows'}", *q, "--txn", "t", "--json")
        told = call("spark", *words, url=url).json
        assert (told["rows"], told["added"], told["already"]) == (50, added, added == 0)
    assert redis("XLEN", redis.keys.stream) == 50

    events = make_events(100)
    publish(redis, events)
    lake = str(tmp_path / "lake")
    ran = call("spark", "archive", *q, "--to", lake, "--json", url=url)
    assert (ran.code, ran.json) == (0, {"events": len(events), "lost": 0})
    assert call("spark", "compact", lake).out == "days compacted: 0\n"
    rows = call("spark", "rollup", *q, "--window", "1h", "--json", url=url).json
    archived = call("spark", "rollup", *q, "--window", "1h", "--archive", lake, "--json").json
    assert sum(row["completed"] for row in rows) == sum(e["e"] == "completed" for e in events)
    assert [row["completed"] for row in rows] == [row["completed"] for row in archived]

    page = tmp_path / "report.html"
    ran = call("spark", "report", *q, "--html", str(page), "--json", url=url)
    assert json.loads(ran.out)["events"] == len(events)
    assert page.read_text().startswith("<!doctype html>")
    redis.add_events(9)
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 4)
    ran = call("spark", "archive", *q, "--to", lake, "--keep-going", url=url)
    assert (ran.code, ran.out) == (1, "events: 4 archived, 5 lost\n")

    job = redis.jobs()[0]
    for reason in ("Timeout 1", "Timeout 2", "other"):
        words = ("d", job[b"d"], "n", "mail", "source_id", "1-0", "reason", reason)
        redis("XADD", redis.keys.dlq, "*", *words)
    found = call("spark", "triage", *q, "--json", url=url).json
    assert [(row["masked_reason"], row["failures"]) for row in found] == [
        ("Timeout <n>", 2),
        ("other", 1),
    ]
    assert all(row[one].endswith("Z") for row in found for one in ("first_seen", "last_seen"))
    chosen = ("replay", *q, "--where", "reason LIKE 'Timeout%'")
    assert call("spark", *chosen, url=url).out == "would replay 2 jobs; add --yes to do it\n"
    assert redis("XLEN", redis.keys.dlq) == 3
    assert call("spark", *chosen, "--yes", url=url).out == "replayed 2 jobs\n"
    signature = ("replay", *q, "--signature", found[1]["signature"], "--yes", "--json")
    assert call("spark", *signature, url=url).json == {"replayed": 1, "selected": 1}

    for kind in ("parquet", "csv"):
        words = ("export", *q, "--to", f"{kind}:{tmp_path / kind}", "--json")
        assert call("spark", *words, url=url).json == {"rows": 53}
    with Queue(queue_name, redis_url=url) as queue:
        assert queue.counts().dlq == 0


def test_a_long_command_says_which_step_it_is_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spark_run, "_SAY_EVERY_S", 0.01)
    asked = threading.Semaphore(0)

    def nothing_known() -> str:
        asked.release()
        return ""

    with spark_run.Progress("reading events", nothing_known) as progress:
        for step in ("computing percentiles", "grouping failures"):
            for _ in range(2):  # asked once more, so that the first line is out
                assert asked.acquire(timeout=10)
            progress.say(step)
    told = capsys.readouterr().err
    assert re.match(r"reading events … \(\d+ s\)\n", told)
    assert re.search(r"\ncomputing percentiles … \(\d+ s\)\n", told)
