"""`promoter`, `scheduler`, `worker --health-port`, logs: commands that run until a signal."""

import json
import logging
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis

from chasqui.cli import logs
from chasqui.model.keys import Keys
from tests.cli.conftest import Chasqui, end, run, running
from tests.servers import Server


def wait_for_entry(url: str, queue_name: str) -> None:
    """Return when something is in the stream."""
    with redis.Redis.from_url(url) as client:
        assert client.xread({Keys(queue_name).stream: "0"}, block=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_promoter_promotes_many_queues_until_it_is_told_to_end(
    chasqui: Chasqui, valkey_9: Server, queue_name: str, number: int
) -> None:
    queues = [queue_name, f"{queue_name}-2"]
    for queue in queues:
        chasqui("add", queue, "mail", "1", "--delay", "10ms")
    arguments = ["--log-format", "json", "--poll-interval-ms", "10"]
    with running("promoter", *queues, *arguments, url=valkey_9.url) as process:
        for queue in queues:
            wait_for_entry(valkey_9.url, queue)
        ended = end(process, number)
    assert (ended.code, ended.out) == (0, "")
    line, *leads = map(json.loads, ended.err.splitlines())
    assert (line["level"], line["message"], line["queues"]) == ("info", "promoter of 2 queues", 2)
    assert {line["message"] for line in leads} == {
        f"queue {name}: this process is now its promoter" for name in queues
    }
    with redis.Redis.from_url(valkey_9.url) as client:
        assert client.get(Keys(queue_name).promoter_lock) is None


@pytest.mark.slow
def test_scheduler_fires_until_it_is_told_to_end(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    chasqui("repeatable", "add", queue_name, "digest", "--every", "20ms")
    with running("scheduler", queue_name, "--log-level", "error", url=valkey_9.url) as process:
        wait_for_entry(valkey_9.url, queue_name)
        ended = end(process)
    assert (ended.code, ended.err) == (0, "")


#: A worker whose handler says that it runs, and then waits for a file.
SLOW = """
import time
from pathlib import Path
from chasqui import Worker

def handler(job):
    Path("begun").touch()
    while not Path("go-on").exists():
        time.sleep(0.01)

worker = Worker({!r}, handler)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_name: str) -> str:
    """A worker of `queue_name` in a module, in the current folder."""
    source = "from chasqui import Worker\nworker = Worker({!r}, print)\n"
    (tmp_path / "program.py").write_text(source.format(queue_name))
    monkeypatch.chdir(tmp_path)
    return "program:worker"


def ask(port: int, path: str = "/healthz") -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error) if error.code == 503 else {}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_health_is_told_over_http(
    program: str, valkey_9: Server, queue_name: str, processes: list[str]
) -> None:
    arguments = [program, "--health-port", "0", "--log-format", "json", *processes]
    with running("worker", *arguments, url=valkey_9.url) as process:
        assert process.stderr is not None
        port = json.loads(process.stderr.readline())["port"]
        status, facts = ask(port)
        while status == 503:
            assert facts["status"] in ("starting", "disconnected")
            status, facts = ask(port)
        assert (status, facts["status"]) == (200, "ok")
        assert facts["running"] == (2 if processes else 0)
        assert ask(port, "/")[0] == 404
        ended = end(process)
    assert ended.code == 0
    assert all(json.loads(line)["level"] == "info" for line in ended.err.splitlines())


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_a_health_port_that_is_taken_is_named(
    program: str, valkey_9: Server, processes: list[str]
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("worker", program, "--health-port", port, *processes, url=valkey_9.url)
    assert (ran.code, ran.err) == (
        1,
        f"chasqui: cannot answer on health port {port}: Address already in use\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_health_of_a_worker_that_drains(
    program: str, chasqui: Chasqui, valkey_9: Server, queue_name: str, processes: list[str]
) -> None:
    Path("program.py").write_text(SLOW.format(queue_name))
    arguments = [program, "--health-port", "0", "--log-format", "json", *processes]
    with running("worker", *arguments, url=valkey_9.url) as process:
        assert process.stderr is not None
        port = json.loads(process.stderr.readline())["port"]
        while ask(port)[0] != 200:
            pass
        chasqui("add", queue_name, "mail", "1")
        while not Path("begun").exists():
            pass
        process.send_signal(signal.SIGTERM)
        status, facts = ask(port)
        while status == 200:
            status, facts = ask(port)
        Path("go-on").touch()
        assert (status, facts["status"]) == (503, "draining")
        assert process.wait(30) == 0


@pytest.mark.slow
def test_health_of_a_worker_without_its_server(
    program: str, private_server: Any, queue_name: str
) -> None:
    server = private_server("valkey-9")
    with running(
        "worker", program, "--health-port", "0", "--log-format", "json", url=server.url
    ) as it:
        assert it.stderr is not None
        port = json.loads(it.stderr.readline())["port"]
        while ask(port)[0] != 200:
            pass
        server.close()
        status, facts = ask(port)
        while status == 200:
            status, facts = ask(port)
        assert (status, facts["status"]) == (503, "disconnected")
        it.send_signal(signal.SIGKILL)


# ── Logs ────────────────────────────────────────────────────────────────────────────────────────


def record(text: str, *arguments: Any, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("chasqui.x", logging.WARNING, "", 0, text, arguments, None)
    vars(made).update(fields)
    return made


def test_json_log_has_the_fields_of_a_record() -> None:
    line = json.loads(logs.JsonFormatter().format(record("%d lost", 2, queue="q", entries=2)))
    assert line.pop("time").endswith("Z")
    assert line.pop("pid") == os.getpid()
    assert line == {
        "level": "warning",
        "logger": "chasqui.x",
        "message": "2 lost",
        "queue": "q",
        "entries": 2,
    }


def test_json_log_has_the_traceback_and_takes_any_value() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        made = record("failed", value=b"\xff")
        made.exc_info = (type(error), error, error.__traceback__)
    line = json.loads(logs.JsonFormatter().format(made))
    assert line["traceback"].endswith("ValueError: boom")
    assert line["value"] == "\\xff"


def test_record_is_one_line_whatever_is_in_it() -> None:
    made = record(
        "job (%s) died", "x\nchasqui: all is well\x1b[2J", share=float("nan"), name_="\x9b"
    )
    shown = "job (x\\nchasqui: all is well\\x1b[2J) died"
    assert logs.BriefFormatter().format(made) == f"chasqui: {shown}"
    assert logs.TextFormatter().format(made).endswith(f" WARNING chasqui.x: {shown}")
    line = logs.JsonFormatter().format(made)
    assert "\x9b" not in line
    facts = json.loads(line, parse_constant=pytest.fail)
    assert facts["message"] == made.getMessage()
    assert (facts["share"], facts["name_"]) == ("nan", "\x9b")
