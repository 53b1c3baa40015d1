"""`chasqui worker`: mistakes in one sentence, processes that are replaced, nobody left behind."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.conftest import ROOT, WAIT_S, Fleet, WorkerProcess, eventually
from tests.servers import Server

MANY = "tests.crash.workers:make_of_many"


@pytest.fixture
def fleet(make_fleet: Callable[[str], Fleet], valkey_9: Server) -> Fleet:
    """One kind of server will do: what is tested here are the processes."""
    return make_fleet(valkey_9.url)


def children_of(pid: int) -> set[int]:
    """The workers among the children; spawning has a helper process of its own."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(row[0]) for row in rows if int(row[1]) == pid and "spawn_main" in row[-1]}


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def start(fleet: Fleet, *arguments: str, **options: object) -> WorkerProcess:
    """Two processes under a supervisor, both reading."""
    before = len(fleet.consumers())
    worker = fleet.start("supervisor", "--processes", "2", *arguments, target=MANY, **options)
    eventually(lambda: len(fleet.consumers()) == before + 2, "both read the queue")
    assert len(children_of(worker.pid)) == 2
    return worker


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nowhere:worker", "there is no module 'nowhere'"),
        ("tests.nowhere:worker", "there is no module 'tests.nowhere'"),
        ("tests.crash.workers:nothing", "'tests.crash.workers' has no 'nothing'"),
        ("tests.crash.workers:SETTINGS", "is a str, not a Worker"),
        ("tests.crash.workers:Runs", "is a type, not a Worker"),
        ("tests.crash.workers", "write it as module:attribute"),
        ("os:getpid", "is an int, not a Worker"),
    ],
)
def test_a_mistake_is_one_sentence(target: str, told: str) -> None:
    ran = run(target)
    assert ran.returncode == 2
    assert told in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_several_processes_say_it_once() -> None:
    ran = run("nowhere:worker", "--processes", "2")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.endswith(f": there is no module 'nowhere' in {ROOT} or on the path")


@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]], ids=["alone", "supervised"])
def test_what_the_module_raises_is_shown_where_it_is(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "shop.py").write_text("import no_such_thing\n")
    if arguments:
        process = subprocess.Popen(
            [sys.executable, "-m", "chasqui", "worker", "shop:worker", *arguments],
            cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert process.stderr is not None
        shown = ""
        while "another one starts" not in shown:
            shown += process.stderr.readline()
        process.terminate()
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    else:
        ran = run("shop:worker", cwd=tmp_path)
        assert ran.returncode == 1
        shown = ran.stderr
    assert 'shop.py", line 1' in shown
    assert "No module named 'no_such_thing'" in shown
    assert "running/process.py" not in shown


def test_what_the_module_raises_is_json_in_a_log_of_json(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import no_such_thing\n")
    ran = run("shop:worker", "--json", cwd=tmp_path)
    assert ran.returncode == 1
    (line,) = map(json.loads, ran.stderr.splitlines())
    assert "No module named 'no_such_thing'" in line["traceback"]


def test_no_server_is_one_sentence() -> None:
    told = "tests.crash.workers:make"
    settings = '{"queue": "q", "folder": "/tmp", "who": "w", "fails": false, '
    settings += '"dies_before_flush": 0, "options": {}}'
    variables = {"CRASH_TEST_WORKER": settings, "CHASQUI_URL": "redis://127.0.0.1:1"}
    ran = run(told, variables=variables)
    assert ran.returncode == 1
    assert "127.0.0.1:1" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_dead_are_replaced_and_their_jobs_done(fleet: Fleet) -> None:
    supervisor = start(fleet)
    victim = children_of(supervisor.pid).pop()
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: len(children_of(supervisor.pid) - {victim}) == 2, "another one is started")
    assert f"process {victim} ended with signal 9" in supervisor.log
    fleet.add("quick", 100)
    fleet.ended(100)
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert fleet.census().is_empty


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of others are Linux's")
def test_where_no_process_can_be_started_the_others_live_on(fleet: Fleet) -> None:
    supervisor = start(fleet)
    victim, other = children_of(supervisor.pid)
    files = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (3, files[1]))
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: "no process can be started" in supervisor.log, "it is told")
    fleet.add("quick", 100)
    fleet.ended(100)
    assert is_alive(other)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, files)
    eventually(lambda: len(children_of(supervisor.pid) - {victim}) == 2, "another one is started")
    supervisor.terminate()
    assert supervisor.wait() == 0


@pytest.mark.slow
def test_processes_that_die_at_once_are_started_ever_more_slowly(fleet: Fleet) -> None:
    supervisor = start(fleet, concurrency=1, claim_min_idle_ms=60_000)
    fleet.add("crash", 40)
    eventually(lambda: "starts in 1.0 s" in supervisor.log, "one died twice")
    eventually(lambda: "starts in 2.0 s" in supervisor.log, "one died three times")
    supervisor.terminate()
    supervisor.wait()


def test_the_drain_reaches_every_process(fleet: Fleet) -> None:
    supervisor = start(fleet)
    fleet.add("work", 400)
    children = children_of(supervisor.pid)
    fleet.ended(1)
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert not any(map(is_alive, children))
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0
    assert fleet.ledger.count("start") == fleet.ledger.count("end")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_whole_group_drains_once(fleet: Fleet, number: signal.Signals) -> None:
    """So do a terminal and a service manager."""
    supervisor = start(fleet)
    fleet.add("work", 200)
    fleet.ended(1)
    os.killpg(supervisor.pid, number)
    assert supervisor.wait() == 0
    assert fleet.ledger.count("start") == fleet.ledger.count("end")


def test_the_second_signal_ends_every_process(fleet: Fleet) -> None:
    fleet.add("hold", 10)
    supervisor = start(fleet, claim_min_idle_ms=60_000)
    eventually(lambda: fleet.ledger.count("start") == 10, "they run")
    children = children_of(supervisor.pid)
    supervisor.terminate()
    eventually(lambda: "draining" in supervisor.log, "it drains")
    supervisor.terminate()
    assert supervisor.wait() == 143
    assert not any(map(is_alive, children))
    assert sorted(fleet.census().stream) == fleet.added


def test_no_process_outlives_a_killed_supervisor(fleet: Fleet) -> None:
    supervisor = start(fleet)
    fleet.add("work", 400)
    children = children_of(supervisor.pid)
    fleet.ended(1)
    supervisor.kill()
    eventually(lambda: not any(map(is_alive, children)), "they end by themselves")
    assert fleet.ledger.count("start") == fleet.ledger.count("end"), "after a drain"
    assert fleet.audit().faults == {}


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(["--max-jobs", "50"], id="jobs"),
        pytest.param(["--max-rss", "1"], id="rss", marks=pytest.mark.slow),
    ],
)
def test_processes_are_recycled(fleet: Fleet, limit: list[str]) -> None:
    supervisor = fleet.start("supervisor", "--processes", "1", *limit, target=MANY)
    for _ in range(3):
        fleet.add("quick", 60)
        fleet.ended(len(fleet.added))
        eventually(lambda: children_of(supervisor.pid) - seen(fleet), "it is replaced")
    supervisor.terminate()
    assert supervisor.wait() == 0
    audit = fleet.audit()
    assert audit.faults == {}
    assert audit.extra_runs == 0
    assert len(seen(fleet)) >= 3
    assert "ended with" not in supervisor.log


def test_a_name_for_all_processes_is_refused(fleet: Fleet) -> None:
    supervisor = fleet.start("same", "--processes", "2")
    assert supervisor.wait() == 2
    assert "gives every process the consumer_id 'same'" in supervisor.log
    assert "Traceback" not in supervisor.log


def seen(fleet: Fleet) -> set[int]:
    """The processes that have run a job."""
    return {int(fact.who) for fact in fleet.ledger.read("end")}


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def run(
    *arguments: str, cwd: Path = ROOT, variables: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "chasqui", "worker", *arguments],
        cwd=cwd,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
