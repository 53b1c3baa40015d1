"""Each adapter does the work it is measured by, every job once; for peers that are installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from bench import stage
from bench.environments import ROOT, command, is_ready
from bench.libraries import CHASQUIMQ, LIBRARIES, Library
from bench.scenarios import SCENARIOS
from bench.stage import Data, Stage
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

N = 200
INTEROP = ROOT / ".venv-interop" / "bin" / "python"
RUN = {scenario.name: scenario.run for scenario in SCENARIOS}
QUEUES = [name for name in LIBRARIES if name not in ("limit", "floor", "redis_benchmark")]


def command_of(library: Library) -> list[str]:
    """The adapter's command; chasquimq also runs where the tests of the wire format have it."""
    if library.environment is CHASQUIMQ and not is_ready(CHASQUIMQ):
        return [str(INTEROP), "-m", f"bench.peers.{library.name}"]
    return command(library)


@pytest.fixture(params=QUEUES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = LIBRARIES[request.param]
    has_interop = found.environment is CHASQUIMQ and INTEROP.exists()
    if not is_ready(found.environment) and not has_interop:
        pytest.skip(f"{found.title} is not installed: `make bench` does it")
    monkeypatch.setattr(stage, "command", command_of)
    return found


@pytest.fixture
def empty(private_server) -> Iterator[Stage]:
    """A server of the test's own: its adapters all use one queue name."""
    server: Server = private_server()
    with closing(Stage(server, quiet_limit_s=0)) as stage:
        yield stage


def run(empty: Stage, library: Library, scenario: str, n: int = N) -> Data:
    told = RUN[scenario](empty, library, n)
    if "unsupported" in told:
        pytest.skip(told["unsupported"])
    assert "error" not in told, told
    return told


def test_every_job_runs_once(empty: Stage, library: Library):
    told = run(empty, library, "drain")
    assert (told["n"], told["ran"], told["more_than_once"]) == (N, N, 0)


def test_every_job_that_failed_runs_again(empty: Stage, library: Library):
    """That some run once too often is a finding of the benchmark, not a fault of its adapter."""
    assert run(empty, library, "retry")["ran"] == N


def test_every_delayed_job_runs(empty: Stage, library: Library):
    assert run(empty, library, "delayed", 100)["n"] == 100


@pytest.mark.parametrize("scenario", ["single", "gather", "bulk50", "bulk50_ready"])
def test_what_was_added_can_be_run(empty: Stage, library: Library, scenario: str):
    """As many jobs are in the queue as the scenario says, beyond those it warmed up with."""
    told = run(empty, library, scenario)
    extra = {"single": 20, "gather": 100, "bulk50": 50, "bulk50_ready": 50}[scenario]
    counted = empty.call(library, "count", n=told["n"] + extra)
    assert counted["count"] == told["n"] + extra


def test_the_limit_sends_and_reads_every_job(empty: Stage):
    limit = LIBRARIES["limit"]
    assert RUN["bulk1000"](empty, limit, 2000)["n"] == 2000
    empty.clear()
    assert RUN["drain"](empty, limit, 2000)["n"] == 2000


def test_any_library_at_best_adds_every_job(empty: Stage):
    floor = LIBRARIES["floor"]
    assert RUN["bulk1000"](empty, floor, 2000)["n"] == 2000
    counted = empty.call(LIBRARIES["chasqui"], "count", n=2000)
    assert counted["count"] == 2000


def test_adapters_need_nothing_of_ours():
    """They run in environments that have no chasqui, nor what the report needs."""
    program = "import sys; import bench.peers.harness; print(*sys.modules)"
    # Without site-packages only the standard library is there.
    argv = [sys.executable, "-S", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "chasqui" not in done.stdout.split()
