"""`demo`, `server`, `doctor`."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from chasqui import Queue, Worker
from chasqui.cli.rights import ROLES, needed
from chasqui.cli.run import deleted_after
from tests.cli.conftest import Chasqui, call, environment, run, run_in_terminal
from tests.servers import Server


@pytest.mark.slow
def test_demo_tells_what_it_did() -> None:
    ran = run("demo", "--jobs", "1000")
    assert ran.code == 0
    assert "Every one of the 2,051 jobs was completed exactly once" in ran.out
    assert re.search(r"^enqueue_many.* 1,000 ", ran.out, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= 80


def test_what_went_wrong_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The first error is raised; that the queue could not be deleted after it is only logged."""
    with pytest.raises(ZeroDivisionError), deleted_after("demo-1", "redis://127.0.0.1:1"):
        raise ZeroDivisionError
    assert "queue demo-1 could not be deleted: no connection to 127.0.0.1:1" in caplog.text


@pytest.mark.slow
def test_demo_fits_a_terminal() -> None:
    shown = run_in_terminal("demo", "--jobs", "1000", url="redis://127.0.0.1:1")
    assert shown.code == 0
    assert "was completed exactly once" in shown.out
    assert "…" not in shown.out
    assert re.search(r"^run by a worker .* 2051/2051 +[\d,]+ jobs/s", shown.out, re.MULTILINE)
    told = r"^  waited p50 [\d.]+ s, p99 [\d.]+ s; 11 retried, 1 dead"
    assert re.search(told, shown.out, re.MULTILINE)


@pytest.mark.slow
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


@pytest.mark.slow
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
    ran = call("doctor", url=safe.url)
    assert (ran.code, ran.err) == (0, "")
    assert all(row[0] == "ok" for row in ran.rows)


def test_doctor_tells_the_window_of_idempotent_adds(redis_86: Server, valkey_9: Server) -> None:
    found = {one["what"]: one for one in call("doctor", "--json", url=redis_86.url).json}
    assert found["IDMP window"]["found"] == "100 ids a producer, 100 s"
    assert found["IDMP window"]["verdict"] == "ok"
    assert "IDMP window" not in call("doctor", url=valkey_9.url).out


@pytest.mark.fault(22)
def test_doctor_sees_eviction(private_server: Callable[..., Server]) -> None:
    risky = private_server("valkey-9", appendonly="yes", maxmemory_policy="allkeys-lru")
    ran = call("doctor", "--json", url=risky.url)
    assert ran.code == 1
    assert [row["what"] for row in ran.json if row["verdict"] == "RISK"] == ["eviction"]


def test_doctor_says_which_version_to_upgrade_to(redis_62: Server) -> None:
    found = {row["what"]: row for row in call("doctor", "--json", url=redis_62.url).json}
    version = tuple(map(int, found["version"]["found"].removeprefix("redis ").split(".")))
    assert ("upgrade to 6.2.20" in found["version"]["advice"]) == (version < (6, 2, 20))


def test_doctor_sees_a_server_that_is_short_of_memory(
    private_server: Callable[..., Server],
) -> None:
    full = private_server("valkey-9", appendonly="yes", maxmemory="1mb")
    risks = [row for row in call("doctor", "--json", url=full.url).json if row["verdict"] == "RISK"]
    assert [row["what"] for row in risks] == ["memory"]


@pytest.mark.parametrize("kind", ["valkey-9", "redis-8.6"])
@pytest.mark.parametrize("role", sorted(ROLES))
def test_doctor_knows_what_a_user_may_do(
    shared_server: Callable[[str], Server], kind: str, role: str, queue_name: str
) -> None:
    server = shared_server(kind)
    allowed = [name for name in needed(role) if kind.startswith("redis") or name != "xackdel"]
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(
            "ACL", "SETUSER", queue_name, "on", ">secret", f"~{{chasqui:{queue_name}}}:*",
            *(f"+{name}" for name in allowed), "+acl|whoami", "+acl|dryrun", "+ping",
        )  # fmt: skip
    url = server.url.replace("://", f"://{queue_name}:secret@")
    (row,) = [row for row in call("doctor", "--queue", queue_name, "--json", url=url).json
              if row["what"] == "user"]  # fmt: skip
    assert row["found"].startswith(f"{queue_name}: ")
    assert role in row["found"].partition(": ")[2]
    assert f"{role} lacks" not in row["advice"]
    (row,) = [row for row in call("doctor", "--json", url=url).json if row["what"] == "user"]
    assert (row["verdict"], row["found"]) == ("RISK", f"{queue_name}: no role")


@pytest.mark.parametrize("role", sorted(ROLES))
def test_doctor_knows_the_users_that_are_recommended(
    redis_86: Server, role: str, queue_name: str
) -> None:
    recipes = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    (recipe,) = re.findall(rf"^user {role} (on .*)$", recipes, re.MULTILINE)
    words = recipe.replace("{chasqui:Q}", f"{{chasqui:{queue_name}}}").split()
    user = f"{role}-{queue_name}"
    with redis.Redis.from_url(redis_86.url) as client:
        client.execute_command("ACL", "SETUSER", user, *words, "+acl|whoami", "+acl|dryrun")
    url = redis_86.url.replace("://", f"://{user}:change-me@")
    ran = call("doctor", "--queue", queue_name, "--json", url=url)
    found = {row["what"]: row for row in ran.json}
    assert role in found["user"]["found"].partition(": ")[2], found["user"]["advice"]
    if role == "worker":  # it looks what the server does when it is full
        assert "eviction" in found
    else:
        assert found["settings"]["found"] == "INFO is refused"
    risks = {row["what"] for row in ran.json if row["verdict"] == "RISK"}
    assert risks == ({"persistence"} if role == "worker" else set())


def test_doctor_says_where_rights_cannot_be_told(redis_62: Server) -> None:
    (row,) = [
        row for row in call("doctor", "--json", url=redis_62.url).json if row["what"] == "user"
    ]
    assert (row["verdict"], row["found"]) == ("ok", "default")
    assert "Redis 7" in row["advice"]


async def test_a_worker_needs_no_more_than_its_part(redis_86: Server, queue_name: str) -> None:
    allowed = {name for role in ("producer", "worker", "inspector") for name in needed(role)}
    with redis.Redis.from_url(redis_86.url) as client:
        client.execute_command(
            "ACL", "SETUSER", queue_name, "on", ">secret", f"~{{chasqui:{queue_name}}}:*",
            *(f"+{name}" for name in allowed), "+ping", "+client|setinfo", "+client|setname",
            "+command|info",
        )  # fmt: skip
        url = redis_86.url.replace("://", f"://{queue_name}:secret@")
        worker = Worker(queue_name, lambda job: job.data, redis_url=url, store_results=True)
        async with Queue(queue_name, redis_url=url) as queue, asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run())
            jobs = [await queue.add("mail", 1, delay_ms=delay) for delay in (0, 20)]
            assert [await job.result() for job in jobs] == [1, 1]
            await worker.close()
        refused = [entry for entry in client.acl_log() if entry["username"] == queue_name]
    assert refused == []
