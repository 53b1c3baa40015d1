"""The log of `chasqui worker`: the program's records, as the program wants them, and our own."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Chasqui, call, end, running
from tests.servers import KINDS, Server

#: A worker that logs twenty errors for each job, and fails with some. SETUP comes first.
PROGRAM = """
import logging, os, signal
SETUP
from chasqui import UnrecoverableError, Worker

log = logging.getLogger("shop")

async def pay(job):
    log.debug("not worth a line")
    for n in range(20):
        log.error("order %s lost money", n)
    log.info("first\\nsecond")
    if isinstance(job.data, dict):
        os.kill(job.data["hangs"], signal.SIGSTOP)
    if job.data == "refused":
        raise UnrecoverableError("no such customer")
    if job.data == "down":
        raise ValueError("the bank is closed\\x1b[2J")

worker = Worker(QUEUE, {"pay": pay}, max_attempts=2, concurrency=7)
"""

BASIC = 'logging.basicConfig(level=logging.INFO, format="mine %(levelname)s %(name)s %(message)s")'
#: Of one logger only; the root is left without handlers.
DICT = """
import logging.config
logging.config.dictConfig({
    "version": 1,
    "formatters": {"mine": {"format": "mine %(levelname)s %(name)s %(message)s"}},
    "handlers": {"shown": {"class": "logging.StreamHandler", "formatter": "mine"}},
    "loggers": {"shop": {"handlers": ["shown"], "level": "INFO"}},
})
"""
ENDED = "worker ended after"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_name: str) -> Callable[..., str]:
    """Writes the program to the current folder; the name that `chasqui worker` runs it by."""
    monkeypatch.chdir(tmp_path)

    def give(setup: str = "") -> str:
        source = PROGRAM.replace("SETUP", setup).replace("QUEUE", repr(queue_name))
        (tmp_path / "program.py").write_text(source)
        return "program:worker"

    return give


def read_until(process: "subprocess.Popen[str]", wanted: str, times: int = 1) -> list[str]:
    """The lines of its log, up to the nth that has the wanted text."""
    assert process.stderr is not None
    lines: list[str] = []
    while sum(wanted in line for line in lines) < times:
        lines.append(process.stderr.readline())
        assert lines[-1], f"{wanted!r} never came: {''.join(lines)}"
    return [line.rstrip("\n") for line in lines]


def orders(lines: list[str]) -> list[str]:
    return [line for line in lines if "lost money" in line]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["--processes", "2"]], ids=["alone", "supervised"])
def test_every_line_of_the_program_is_shown(
    write: Callable[..., str],
    chasqui: Chasqui,
    valkey_9: Server,
    queue_name: str,
    processes: list[str],
) -> None:
    added = [chasqui("add", queue_name, "pay", "1", "--json").json["id"] for _ in range(2)]
    with running("worker", write(), *processes, url=valkey_9.url) as process:
        lines = read_until(process, "second", 2)
        end(process)
    shown = orders(lines)
    assert len(shown) == 40
    for job_id in added:
        mine = re.compile(
            rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} \[\d+\] ERROR   shop \[{job_id}\]: "
        )
        assert [mine.sub("", line) for line in shown if mine.match(line)] == [
            f"order {n} lost money" for n in range(20)
        ]
    assert "second" in lines, "its own lines are not escaped"
    assert not any("not worth" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", processes=1"], ids=["threads", "processes"])
def test_lines_of_plain_functions_are_shown_too(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str, options: str
) -> None:
    program = write()
    source = Path("program.py").read_text().replace("async def", "def")
    Path("program.py").write_text(source.replace(", concurrency=7", options))
    job_id = chasqui("add", queue_name, "pay", "1", "--json").json["id"]
    with running("worker", program, url=valkey_9.url) as process:
        lines = read_until(process, "second")
        end(process)
    assert [line.partition(f" ERROR   shop [{job_id}]: ")[2] for line in orders(lines)] == [
        f"order {n} lost money" for n in range(20)
    ]


@pytest.mark.slow
def test_every_line_of_the_program_is_json(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    job_id = chasqui("add", queue_name, "pay", '"refused"', "--json").json["id"]
    with running("worker", write(), "--json", url=valkey_9.url) as process:
        lines = [json.loads(line) for line in read_until(process, "dead-letter queue")]
        end(process)
    assert [line["message"] for line in lines if line["level"] == "error"][:20] == [
        f"order {n} lost money" for n in range(20)
    ]
    about = {"job_id": job_id, "job_name": "pay", "attempt": 1}
    assert all(about.items() <= line.items() for line in lines if line["logger"] == "shop")
    burial = lines[-1]
    assert burial["logger"] == "chasqui.consuming.dispatcher"
    assert burial.items() >= {**about, "queue": queue_name, "level": "error"}.items()
    assert burial["traceback"].endswith("UnrecoverableError: no such customer")


@pytest.mark.slow
def test_what_the_program_sets_up_is_left_alone(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    chasqui("add", queue_name, "pay", '"refused"')
    with running("worker", write(BASIC), url=valkey_9.url) as process:
        lines = read_until(process, "customer", 3)
        end(process)
    assert orders(lines) == [f"mine ERROR shop order {n} lost money" for n in range(20)]
    started = f"mine INFO chasqui.consuming.engine queue {queue_name}: worker started"
    assert any(line.startswith(started) for line in lines)
    assert "Traceback (most recent call last):" in lines


@pytest.mark.slow
def test_a_level_that_the_program_sets_counts_for_us_unless_another_is_given(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    quiet = BASIC.replace("INFO", "WARNING")
    chasqui("add", queue_name, "pay", '"refused"')
    with running("worker", write(quiet), url=valkey_9.url) as process:
        lines = read_until(process, "dead-letter queue")
        end(process)
    assert orders(lines) == lines[:-1]
    with running("worker", write(quiet), "--log-level", "info", url=valkey_9.url) as process:
        assert "INFO" in read_until(process, "worker started")[-1]
        end(process)


@pytest.mark.slow
def test_a_logger_that_the_program_sees_to_is_shown_once_and_ours_too(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    """`dictConfig` disables loggers that existed before it; ours must stay enabled."""
    chasqui("add", queue_name, "pay", '"refused"')
    with running("worker", write(DICT), url=valkey_9.url) as process:
        lines = read_until(process, "dead-letter queue")
        end(process)
    assert orders(lines) == [f"mine ERROR shop order {n} lost money" for n in range(20)]
    assert any("INFO    chasqui.consuming.engine: " in line for line in lines)


@pytest.mark.slow
def test_a_failure_is_shown_with_its_traceback(
    write: Callable[..., str], chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    chasqui("add", queue_name, "pay", '"down"', "--backoff", "1ms")
    with running("worker", write(), url=valkey_9.url) as process:
        lines = read_until(process, "dead-letter queue")
        lines += read_until(process, "  ValueError: ")
        end(process)
    ours = [i for i, line in enumerate(lines) if "chasqui.consuming.dispatcher: queue" in line]
    assert [lines[i].split()[3] for i in ours] == ["WARNING", "ERROR"]
    for i in ours:
        assert lines[i].endswith("ValueError: the bank is closed\\x1b[2J")
        assert lines[i + 1] == "  Traceback (most recent call last):"
        assert re.fullmatch(r'    File ".*program.py", line \d+, in pay', lines[i + 2])
        assert "  ValueError: the bank is closed\\x1b[2J" in lines[i + 3 : i + 6]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_life_of_a_worker_in_a_few_lines(
    kind: str,
    write: Callable[..., str],
    private_server: Callable[..., Server],
    queue_name: str,
) -> None:
    """The log has the start, a lost server and its return, once each, and the end."""
    server = private_server(kind, requirepass="canary")
    url = server.url.replace("://", "://:canary@")
    where = f"127.0.0.1:{server.port}"
    with running("worker", write(), "--json", url=url) as process:
        lines = read_until(process, "is now its promoter")
        server.kill()
        lines += read_until(process, "lost the server")
        server.start()
        lines += read_until(process, "is back after")
        ended = end(process)
    assert ended.code == 0
    told: list[dict[str, Any]] = [
        line for line in map(json.loads, [*lines, *ended.err.splitlines()])
        if line["logger"] != "chasqui.transport.server"  # what is wrong with an old one
    ]  # fmt: skip
    texts = [line["message"] for line in told]
    assert re.fullmatch(
        rf"queue {queue_name}: worker started on (Redis|Valkey) [\d.]+ at {where}/0; "
        r"handlers: pay; concurrency 7; chasqui [\w.]+",
        next(text for text in texts if "worker started" in text),
    )
    about_the_server = [line for line in told if line["logger"] == "chasqui.transport.recovery"]
    assert [line["level"] for line in about_the_server] == ["warning", "warning"]
    lost, back = (line["message"] for line in about_the_server)
    assert lost == f"lost the server at {where}: Connection refused"
    assert re.fullmatch(rf"the server at {where} is back after [\d.]+ s", back)
    draining = f"queue {queue_name}: draining; 0 running jobs may take 30 s more"
    assert sum(text.startswith(draining) for text in texts) == 1
    assert texts[-1] == f"queue {queue_name}: {ENDED} 0 runs"
    assert not any("{" in text for text in texts), "no key is named"
    assert "canary" not in "".join([*lines, ended.err])


@pytest.mark.slow
def test_a_drain_that_the_server_does_not_hear_of_has_failed(
    write: Callable[..., str], private_server: Callable[..., Server], queue_name: str
) -> None:
    """The log says it once, and once which jobs may run again."""
    server = private_server("redis-8.6")
    program = write()
    source = Path("program.py").read_text()
    Path("program.py").write_text(source.replace("concurrency=7", "shutdown_deadline_s=1"))
    with running("worker", program, url=server.url) as process:
        read_until(process, "is now its promoter")
        call("add", queue_name, "pay", json.dumps({"hangs": server.pid}), url=server.url)
        read_until(process, "second")
        try:
            ended = end(process)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert ended.code == 1
    warnings = [
        line for line in ended.err.splitlines() if "WARNING chasqui.consuming.drain: " in line
    ]
    assert [line.partition(": queue ")[2] for line in warnings] == [
        f"{queue_name}: the drain is incomplete: the server did not answer; jobs that could not be "
        "handed back run when their leases are over",
        f"{queue_name}: 1 finished job could not be acknowledged in time, and may run again",
    ]


@pytest.mark.slow
def test_a_server_that_hangs_is_lost_too(
    write: Callable[..., str], private_server: Callable[..., Server]
) -> None:
    """The links notice it one after the other; the log says it once."""
    server = private_server("valkey-9")
    with running("worker", write(), url=server.url) as process:
        read_until(process, "is now its promoter")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            lines = read_until(process, "lost the server")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        lines += read_until(process, "is back after")
        ended = end(process)
    told = [line for line in [*lines, *ended.err.splitlines()] if "WARNING" in line]
    assert len(told) == 2
    assert re.search(r": (it has not answered in time|Connection timed out)$", told[0])
