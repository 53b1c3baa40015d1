"""`chasqui spark` when something is wrong: one sentence, never a stack trace; Ctrl+C is quiet."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chasqui.cli.spark_errors import read
from chasqui.cli.spark_files import is_missing
from chasqui.errors import ChasquiError
from chasqui.spark import sessions
from tests.cli.conftest import call, environment
from tests.servers import Server
from tests.spark.direct import Redis
from tests.spark.test_pipelines import make_events, publish

PLAN = "\n'Filter ('nam = x)\n+- RelationV2[queue#0] chasqui\n"
FRAMES = (
    "\n\tat org.apache.hadoop.fs.FileSystem.get(FileSystem.java:558)\n\tat py4j.Gateway.invoke(G)"
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 3, in schema\n    f(x)\n    ^^^\n'
)
STAGE = (
    "Job aborted due to stage failure: Task 0 in stage 5.0 failed 2 times, most recent failure: "
    "Lost task 0.1 in stage 5.0 (TID 5) (localhost executor driver): "
)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with "
            "name `nam` cannot be resolved. Did you mean one of the following? [`name`, `error`]. "
            f"SQLSTATE: 42703; line 1 pos 0;{PLAN}",
            ValueError,
            "there is no column nam: is it name or error?",
        ),
        (
            "\n[PARSE_SYNTAX_ERROR] Syntax error at or near '='. SQLSTATE: 42601 (line 1, pos 7)"
            "\n\n== SQL ==\nname === ' x\n-------^^^\n",
            ValueError,
            "Syntax error at or near '=': name === ' x",
        ),
        (
            "[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: "
            f"{TRACEBACK}chasqui.spark.options.OptionError: option table: must be one of a, b\n"
            " SQLSTATE: 38000",
            ValueError,
            "option table: must be one of a, b",
        ),
        (
            "[STREAM_FAILED] Query [id = 3, runId = 3e] terminated with exception: "
            f"[PYTHON_STREAMING] Failed: {TRACEBACK}chasqui.errors.UnreachableError: no connection "
            "to 127.0.0.1:1: Connection refused\n SQLSTATE: 38000",
            ChasquiError,
            "no connection to 127.0.0.1:1: Connection refused",
        ),
        (f"An exception was thrown:\n{TRACEBACK}KeyError: 'x'", ChasquiError, "KeyError: 'x'"),
        (f"An exception was thrown:\n{TRACEBACK}MemoryError", ChasquiError, "MemoryError"),
        (
            "[PATH_NOT_FOUND] Path does not exist: file:/tmp/none. SQLSTATE: 42K03",
            ChasquiError,
            "there is nothing at /tmp/none",
        ),
        (
            '[PATH_ALREADY_EXISTS] Path file:/tmp/out already exists. Set mode as "overwrite" to '
            "overwrite the existing path. SQLSTATE: 42K04",
            ChasquiError,
            "/tmp/out is there already: name a place that is new",
        ),
        (
            "An error occurred while calling o1.save.\n: org.apache.hadoop.fs."
            f'UnsupportedFileSystemException: No FileSystem for scheme "nosuch"{FRAMES}',
            ChasquiError,
            'No FileSystem for scheme "nosuch"',
        ),
        (
            f"An error occurred while calling o2.save.\n: org.apache.spark.SparkException: {STAGE}"
            "java.io.IOException: Mkdirs failed to create file:/proc/x/_temporary/0/_temporary/a "
            f"(exists=false, cwd=file:/tmp){FRAMES}\n\nDriver stacktrace:{FRAMES}\n"
            "Caused by: java.io.IOException: Mkdirs failed to create file:/proc/x",
            ChasquiError,
            "no folder can be made at /proc/x",
        ),
        (
            f"An error occurred while calling o3.save.\n: org.apache.spark.SparkException: {STAGE}"
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
            "worker lost\nDriver stacktrace:",
            ChasquiError,
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
            "worker lost",
        ),
    ],
)
def test_what_spark_says_in_pages_is_one_sentence(text: str, kind: type[Exception], sentence: str):
    told = read(text)
    assert (type(told), str(told)) == (kind, sentence)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session runs, and none is to be started."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark is started")

    monkeypatch.setattr(sessions, "running_session", lambda: None)
    monkeypatch.setattr(sessions, "session", start)


@pytest.mark.usefixtures("no_spark")
def test_what_is_wrong_on_this_machine_is_told_before_spark_starts(
    redis_86: Server, queue_name: str, tmp_path: Path
):
    def refused(*words: str, url: str = redis_86.url) -> tuple[int | None, str]:
        ran = call("spark", *words, url=url)
        assert ran.out == ""
        assert ran.err.count("\n") == 1, ran.err
        return ran.code, ran.err.removeprefix("chasqui: ").rstrip()

    q, missing = ("--queue", queue_name), tmp_path / "lak"
    (tmp_path / "lake" / "events").mkdir(parents=True)
    for source in (f"parquet:{missing}", f"delta:{missing}", f"csv:{os.path.relpath(missing)}"):
        told = refused("enqueue", "--from", source, *q)
        assert told == (1, f"there is nothing at {missing}")
    archive = 1, f"there is no archive at {missing}: is it {tmp_path / 'lake'}?"
    assert refused("compact", str(missing)) == archive
    assert refused("rollup", *q, "--archive", str(missing)) == archive
    assert refused("report", *q, "--html", "x.html", "--archive", str(missing)) == archive
    assert refused("replay", *q, "--limit", "5", "--yes") == (
        2,
        "say which dead jobs with --where or --signature; --where true is all",
    )
    nobody = "redis://127.0.0.1:1"
    for words in (("enqueue", "--from", f"parquet:{tmp_path}"), ("triage",)):
        code, sentence = refused(*words, *q, url=nobody)
        assert code == 1
        assert sentence.startswith("no connection to 127.0.0.1:1: ")
        assert ";" not in sentence, "nothing was begun, so there is nothing to go on with"


def test_only_a_plain_path_of_this_machine_is_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    missing = str(tmp_path / "none")
    assert is_missing(missing, {})
    assert not is_missing(str(tmp_path), {})
    for path in ("s3a://bucket/none", f"file:{missing}", f"{missing}/*.parquet", f"{missing}[12]"):
        assert not is_missing(path, {})
    assert not is_missing(missing, {"spark.hadoop.fs.defaultFS": "hdfs://name:8020"})
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    assert not is_missing(missing, {})


def test_mistakes_are_one_sentence(spark: Any, redis_86: Server, queue_name: str, tmp_path: Path):
    url, q = redis_86.url, ("--queue", queue_name)
    publish(Redis(url, queue_name), make_events(10))
    lake, typo = tmp_path / "lake", queue_name[:-1]
    assert call("spark", "archive", *q, "--to", str(lake), url=url).code == 0
    (tmp_path / "file").write_text("")

    def refused(code: int, *words: str) -> str:
        ran = call("spark", *words, url=url)
        assert ran.code == code, (words, ran)
        assert ran.out == ""
        assert ran.err.startswith("chasqui: ")
        assert ran.err.count("\n") == 1, ran.err
        return ran.err.removeprefix("chasqui: ").rstrip()

    out = ("--to", f"parquet:{tmp_path / 'out'}")
    is_it = f"there is no queue {typo}: is it {queue_name}"
    readers = [("triage",), ("replay", "--where", "true"), ("export", *out), ("rollup",)]
    readers += [("report", "--html", "x.html"), ("archive", "--to", str(tmp_path / "new"))]
    for command in readers:
        assert refused(1, *command, "--queue", f"{queue_name},{typo}").startswith(is_it)
    assert not (tmp_path / "new").exists()
    assert refused(2, "triage", "--queue", ",") == "--queue must name at least one"

    assert refused(2, "replay", *q, "--where", "nam = 'x'") == (
        "there is no column nam: is it name or attempt or detail?"
    )
    assert refused(2, "export", *q, *out, "--where", "1 +") == (
        "Syntax error at or near end of input: 1 +"
    )
    assert refused(2, "export", *q, *out, "--table", "job") == (
        "--table: there is no table job: is it jobs?"
    )
    into_file = ("--to", f"json:{tmp_path / 'file'}")
    assert "is there already" in refused(1, "export", *q, *into_file, "--table", "events")

    archive = ("--archive", str(tmp_path / "lak"))
    meant = f"there is no archive at {tmp_path / 'lak'}: is it {lake}?"
    assert refused(1, "rollup", *q, *archive) == meant
    assert refused(1, "report", *q, "--html", "x.html", *archive) == meant
    assert refused(1, "compact", str(tmp_path / "lak")) == meant
    assert refused(1, "rollup", "--queue", typo, "--archive", str(lake)) == (
        f"the archive has nothing of queue {typo}: is it {queue_name}?"
    )
    nobody = ("--redis-url", "redis://127.0.0.1:1")
    assert refused(1, "triage", *q, *nobody).startswith("no connection to 127.0.0.1:1")


def test_a_csv_export_says_its_columns(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path
):
    publish(Redis(redis_86.url, queue_name), make_events(3))
    words = ("export", "--queue", queue_name, "--table", "events", "--json")
    rows = call("spark", *words, "--to", f"csv:{tmp_path / 'csv'}", url=redis_86.url).json["rows"]
    again = spark.read.csv(str(tmp_path / "csv"), header=True)
    assert again.count() == rows
    assert again.columns[:3] == ["queue", "entry_id", "entry_ts"]


# ── In processes of their own ───────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def in_foreground(*words: str, url: str) -> Iterator["subprocess.Popen[str]"]:
    """A command in a process group of its own, as a shell starts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "chasqui", "spark", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(CHASQUI_URL=url),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def jvms_of(process: "subprocess.Popen[str]") -> list[str]:
    """The Java processes of its group."""
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,comm="], capture_output=True, text=True, timeout=30
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [name for group, state, name in rows
            if int(group) == process.pid and name == "java" and state[0] != "Z"]  # fmt: skip


def test_an_interrupt_while_spark_starts_is_quiet_and_leaves_no_jvm(
    redis_86: Server, queue_name: str
):
    publish(Redis(redis_86.url, queue_name), make_events(1))
    with in_foreground("triage", "--queue", queue_name, url=redis_86.url) as process:
        until(lambda: jvms_of(process) or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130
        until(lambda: not jvms_of(process))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_archive_stops_and_says_how_far_it_came(
    redis_86: Server, queue_name: str, tmp_path: Path, number: int
):
    redis = Redis(redis_86.url, queue_name)
    commits = tmp_path / "_checkpoint" / "commits"
    words = ("--to", str(tmp_path), "--follow", "--every", "1s")
    events = make_events(10)
    publish(redis, events)
    with in_foreground("archive", "-q", queue_name, *words, url=redis_86.url) as process:
        until((commits / "0").exists)
        publish(redis, make_events(1))
        until((commits / "1").exists)  # so the first batch has been counted
        os.killpg(process.pid, number)  # as a terminal does, and `timeout`
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    *lines, last = err.splitlines()
    assert all(line.startswith(("starting", "events: ")) for line in lines), err
    assert last == (
        "chasqui: interrupted: run the same command again, and it goes on where it stopped"
    )
    assert out.startswith("events: ")
    assert " archived, 0 lost" in out
    assert int(out.split()[1]) >= len(events)
