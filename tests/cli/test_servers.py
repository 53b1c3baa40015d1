"""`demo`, `server`, `doctor`."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import redis

from tests.cli.conftest import Chasqui, environment, run, run_in_terminal
from tests.servers import Server


def test_demo_tells_what_it_did() -> None:
    ran = run("demo", "--jobs", "2000")
    assert ran.code == 0
    assert "Every one of the 2,500 jobs came back exactly once" in ran.out
    assert re.search(r"^add_bulk.* 2,000 ", ran.out, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.slow
def test_demo_fits_a_terminal() -> None:
    shown = run_in_terminal("demo", "--jobs", "1000", url="redis://127.0.0.1:1")
    assert shown.code == 0
    assert "came back exactly once" in shown.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_runs_until_it_is_told_to_end(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "chasqui", "server"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with redis.Redis.from_url(url) as client:
            assert client.ping()
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (0, "")


def test_server_that_ends_by_itself_is_an_error() -> None:
    command = [sys.executable, "-m", "chasqui", "server"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        with redis.Redis.from_url(process.stdout.readline().strip()) as client:
            client.shutdown(nosave=True)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert told.startswith("chasqui: the server ended; its log is ")


def test_doctor_warns_of_what_could_lose_jobs(chasqui: Chasqui) -> None:
    ran = chasqui("doctor", "--json")
    assert ran.code == 1
    found = {row["what"]: row for row in ran.json}
    assert found["version"]["found"].startswith("valkey 9.")
    assert found["persistence"]["verdict"] == "RISK"
    assert found["eviction"]["verdict"] == "ok"
    assert found["latency"]["found"].startswith("median ")


def test_doctor_is_content_with_a_safe_server(private_server: Callable[..., Server]) -> None:
    safe = private_server("valkey-9", appendonly="yes", appendfsync="always")
    ran = run("doctor", url=safe.url)
    assert (ran.code, ran.err) == (0, "")
    assert all(row[0] == "ok" for row in ran.rows)


def test_doctor_sees_eviction(private_server: Callable[..., Server]) -> None:
    risky = private_server("valkey-9", appendonly="yes", maxmemory_policy="allkeys-lru")
    ran = run("doctor", "--json", url=risky.url)
    assert ran.code == 1
    assert [row["what"] for row in ran.json if row["verdict"] == "RISK"] == ["eviction"]


def test_doctor_says_which_version_to_upgrade_to(redis_62: Server) -> None:
    found = {row["what"]: row for row in run("doctor", "--json", url=redis_62.url).json}
    version = tuple(map(int, found["version"]["found"].removeprefix("redis ").split(".")))
    assert ("upgrade to 6.2.20" in found["version"]["advice"]) == (version < (6, 2, 20))
