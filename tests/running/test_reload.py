"""`chasqui worker --reload`: a change starts it anew, and no job is lost."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chasqui import sync
from tests.running.conftest import ROOT, WAIT_S, Program
from tests.servers import Server

#: A handler that notes the version of its code; the job "long" waits for a file.
PROGRAM = """
import asyncio, os
from contextlib import asynccontextmanager
from chasqui import Worker, WorkerGroup

VERSION = 1

@asynccontextmanager
async def lifespan():
    yield

async def handler(job):
    with open("began", "a") as file:
        print(job.data, file=file)
    if job.name == "long":
        while not os.path.exists("gate"):
            await asyncio.sleep(0.01)
    with open("ran", "a") as file:
        print(VERSION, job.data, file=file)

def make():
    return WorkerGroup([Worker(QUEUE, handler)], name="shop", lifespan=lifespan)
"""


class Shop:
    """A program that is edited while it runs."""

    def __init__(self, program: Program, queue: sync.Queue, name: str) -> None:
        self.program = program
        self.queue = queue
        self.source = PROGRAM.replace("QUEUE", repr(name))

    def edit(self, version: int, *replaced: tuple[str, str]) -> None:
        source = self.source.replace("VERSION = 1", f"VERSION = {version}")
        for old, new in replaced:
            source = source.replace(old, new)
        self.program.write(source)

    def runs(self, version: int, data: int) -> None:
        """A job is added, and this version of the code runs it."""
        self.queue.add("job", data)
        self.ran(version, data)

    def ran(self, version: int, data: int) -> None:
        self.program.until(
            lambda: f"{version} {data}" in self.program.lines("ran"),
            f"version {version} runs job {data}",
        )

    def says(self, text: str, times: int = 1) -> None:
        self.program.until(lambda: self.program.log.count(text) >= times, f"it says {text!r}")


@pytest.fixture
def shop(program: Program, valkey_9: Server, queue_name: str):  # type: ignore[no-untyped-def]
    with sync.Queue(queue_name, redis_url=valkey_9.url) as queue:
        yield Shop(program, queue, queue_name)


@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]], ids=["one", "two"])
def test_a_change_is_picked_up_and_ctrl_c_ends_it(shop: Shop, arguments: list[str]) -> None:
    shop.edit(1)
    process = shop.program.start("shop:make", "--reload", *arguments)
    shop.runs(1, 1)
    if arguments:
        shop.says("worker started", 2)
    shop.edit(2)
    shop.says("file changed: shop.py; starting anew")
    shop.says("worker ended", len(arguments) or 1)
    shop.runs(2, 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert sorted(shop.program.lines("ran")) == ["1 1", "2 2"]


def test_several_changes_at_once_are_one_restart(shop: Shop) -> None:
    shop.edit(1)
    shop.program.start("shop:make", "--reload")
    shop.runs(1, 1)
    for n in range(5):
        shop.program.write("", f"part_{n}.py")
    shop.edit(2)
    shop.says("files changed")
    shop.runs(2, 2)
    assert shop.program.log.count("starting anew") == 1


def test_a_long_job_is_given_back_and_runs_again(shop: Shop) -> None:
    shop.edit(1)
    process = shop.program.start("shop:make", "--reload")
    shop.queue.add("long", 7)
    shop.program.until(lambda: shop.program.lines("began") == ["7"], "it runs")
    shop.edit(2)
    shop.program.until(lambda: shop.program.lines("began") == ["7", "7"], "it runs again")
    (shop.program.folder / "gate").touch()
    shop.ran(2, 7)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert shop.program.lines("ran") == ["2 7"]
    counts = shop.queue.counts()
    assert (counts.waiting, counts.pending, counts.delayed, counts.dlq) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("import asyncio, os", "import asyncio, os, no_such_thing", "No module named 'no_such_"),
        ("VERSION = ", "VERSION = = ", "SyntaxError: invalid syntax"),
        ("    yield\n", "    raise OSError('no database')\n    yield\n", "OSError: no database"),
        ("def make()", "def made()", "has no 'make'"),
    ],
    ids=["import", "syntax", "lifespan", "name"],
)
def test_a_broken_program_is_shown_and_waits_for_the_next_change(
    shop: Shop, old: str, new: str, told: str
) -> None:
    shop.edit(1)
    process = shop.program.start("shop:make", "--reload")
    shop.runs(1, 1)
    shop.edit(2, (old, new))
    shop.says(told)
    shop.says("waiting for a change")
    assert process.poll() is None
    assert shop.program.log.count(told) == 1
    shop.edit(3)
    shop.runs(3, 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert "another one starts" not in shop.program.log


def test_one_that_is_broken_from_the_beginning_waits_too(shop: Shop) -> None:
    shop.edit(1, ("import asyncio, os", "import asyncio, os, no_such_thing"))
    process = shop.program.start("shop:make", "--reload", "--processes", "2")
    shop.says("waiting for a change")
    shop.edit(2)
    shop.runs(2, 2)
    shop.edit(2, ("import asyncio, os", "import asyncio, os, no_such_thing"))
    shop.says("waiting for a change", 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


def test_an_import_that_never_ends_makes_way(shop: Shop) -> None:
    hangs = ("VERSION = ", "open('hung', 'a').write('x\\n')\nwhile True: pass\nVERSION = ")
    shop.edit(1, hangs)
    process = shop.program.start("shop:make", "--reload")
    shop.program.until(lambda: shop.program.lines("hung") == ["x"], "it hangs")
    shop.edit(2)
    shop.runs(2, 2)
    shop.edit(3, hangs)
    shop.program.until(lambda: shop.program.lines("hung") == ["x", "x"], "it hangs again")
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


def test_a_target_that_was_never_there_is_a_mistake(shop: Shop) -> None:
    shop.edit(1)
    assert shop.program.run("shop:mke", "--reload") == 2
    assert "has no 'mke'" in shop.program.log


def test_it_does_not_go_with_burst(shop: Shop) -> None:
    assert shop.program.run("shop:make", "--reload", "--burst") == 2
    assert "leave one of them out" in shop.program.log


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['watchfiles'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'watchfiles' else find(name, *rest)\n"
        "from chasqui.__main__ import run; sys.exit(run(['worker', 'shop:app', '--reload']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "pip install 'chasqui[reload]'" in ran.stderr
