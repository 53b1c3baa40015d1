"""Groups of workers on a server, and programs that `chasqui worker` runs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import Server

ROOT = Path(__file__).parents[2]
#: How long a fact may take on a busy machine before the test says that it never came.
WAIT_S = 40.0


class Program:
    """`chasqui worker` on a module of the test's own folder, with what it has printed."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url
        self._processes: list[subprocess.Popen[bytes]] = []

    def write(self, source: str, name: str = "shop.py") -> None:
        (self.folder / name).write_text(source)

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / f"log-{len(self._processes)}", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "chasqui", "worker", *arguments],
                cwd=self.folder,
                env=os.environ | {"CHASQUI_URL": self._url, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, *arguments: str) -> int:
        """Start it and wait for its end; its exit code."""
        return self.start(*arguments).wait(WAIT_S)

    @property
    def log(self) -> str:
        """What the last one has printed."""
        return (self.folder / f"log-{len(self._processes) - 1}").read_text()

    def lines(self, name: str) -> list[str]:
        """The lines of a file that the program writes."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def until(self, fact: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < deadline_s, f"it never came true: {what}\n{self.log}"
            time.sleep(0.01)

    def close(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is None:
                process.kill()
                process.wait()
            print((self.folder / f"log-{number}").read_text())


@pytest.fixture
def program(valkey_9: Server, tmp_path: Path) -> Iterator[Program]:
    """One kind of server will do: what is tested here are processes."""
    program = Program(tmp_path, valkey_9.url)
    yield program
    program.close()
