"""Airflow, in an environment of its own: `make airflow-venv`, then `make test-airflow`."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-airflow" / "bin" / "python"
PASSWORD = "canary/with:signs@in%it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.airflow)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def locked_server() -> Iterator[Server]:
    """A server with a password that a URL has to quote."""
    with Server("redis-8.6", requirepass=PASSWORD) as server:
        yield server


@pytest.fixture(scope="session")
def airflow(
    redis_86: Server, locked_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Runs a DAG of dags/ with a run configuration: `airflow("name", conf)` gives the states of
    its tasks, what they returned, and what was logged."""
    if not PYTHON.exists():
        pytest.skip("Airflow is not here: `make airflow-venv` gets it")
    home = tmp_path_factory.mktemp("airflow")
    port = locked_server.url.rpartition(":")[2].partition("/")[0]
    locked = {
        "conn_type": "redis", "host": "127.0.0.1", "port": int(port), "password": PASSWORD,
        "extra": {"db": 0},
    }  # fmt: skip
    env = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(HERE / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_CONN_LOCKED": json.dumps(locked),
        "JOBS_REDIS_URL": redis_86.url,
        "PYTHONPATH": str(ROOT),
    }
    log = (home / "log.txt").open("w+")
    subprocess.run(
        [PYTHON, "-m", "airflow", "db", "migrate"], env=env, check=True, stdout=log, stderr=log
    )
    process = subprocess.Popen(
        [PYTHON, HERE / "program.py"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def run(dag: str, conf: dict[str, Any]) -> Any:
        process.stdin.write(json.dumps([dag, conf]) + "\n")
        process.stdin.flush()
        logged = []
        for line in process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:]) | {"log": "".join(logged)}
            logged.append(line)
        pytest.fail("Airflow ended: " + (home / "log.txt").read_text()[-3000:])

    yield run
    process.stdin.close()
    process.wait(30)
    process.stdout.close()
    log.close()
