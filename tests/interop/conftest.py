"""The other implementation, in an environment of its own: `make interop-venv`."""

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.servers import Server

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-interop" / "bin" / "python"


@pytest.fixture(scope="session")
def interop_python() -> Path:
    """The Python that has chasquimq."""
    if not PYTHON.exists():
        reason = "chasquimq is not here: `make interop-venv` gets it"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return PYTHON


@pytest.fixture
def peer(interop_python: Path, redis_86: Server, queue_name: str) -> Iterator[Callable[[str], Any]]:
    """Evaluates a line of Python beside chasquimq's `queue` and `producer`: `peer("…")`."""
    process = subprocess.Popen(
        [interop_python, ROOT / "tests" / "interop" / "peer.py", redis_86.url, queue_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(source: str) -> Any:
        process.stdin.write(json.dumps(source) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"chasquimq ended at {source}"
        answer = json.loads(line)
        assert "error" not in answer, f"{source}: {answer['error']}"
        return answer["value"]

    yield ask
    process.stdin.close()
    process.stdout.close()
    process.wait(20)


@pytest.fixture
async def queue(redis_86: Server, queue_name: str) -> AsyncIterator[Queue]:
    """Our queue, on the server that chasquimq needs."""
    async with Queue(queue_name, redis_url=redis_86.url) as made:
        yield made


@pytest.fixture
def redis(redis_86: Server) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis_86.url) as client:
        yield client


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(queue_name)
