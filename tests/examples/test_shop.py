"""examples/shop as a user runs it: the commands of its README, an order, and its end."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chasqui import sync

ROOT = Path(__file__).parent.parent.parent
SHOP = ROOT / "examples" / "shop"
#: The commands that the README gives, by their programs, without the server that it suggests.
COMMANDS = {
    line.split()[0]: line.split()
    for line in re.findall(r"^ {4}CHASQUI_URL=\S+ (.+)$", (SHOP / "README.md").read_text(), re.M)
}
WAIT_S = 40


@pytest.fixture
def url() -> Iterator[str]:
    """An embedded server that the shop's processes share."""
    folder = tempfile.mkdtemp(prefix="shop-")  # short: a socket's path has a limit
    yield f"embedded://{folder}"
    shutil.rmtree(folder, ignore_errors=True)


class Program:
    """A command of the README, as a process; its log goes to a file."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=SHOP,
                env={**os.environ, "CHASQUI_URL": url, "PYTHONDONTWRITEBYTECODE": "1"},
                stderr=subprocess.STDOUT,
                stdout=file,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def shows(self, pattern: str) -> str:
        """Wait until the log has the pattern; its first group."""
        until_s = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until_s, self.log
            time.sleep(0.02)
        return found[found.lastindex or 0]

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    with ExitStack() as stack:

        def give(name: str, *more: str) -> Program:
            program = Program([*COMMANDS[name], *more], url, tmp_path / f"{name}.log")
            stack.callback(program.kill)
            return program

        yield give


def ask(address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=30) as got:
        return json.load(got)


def settled(address: str) -> Any:
    """The order once it has a state other than pending, and its invoice if it is paid."""
    until_s = time.monotonic() + WAIT_S
    while True:
        order = ask(address)
        if order["state"] == "failed" or order.get("invoice"):
            return order
        assert time.monotonic() < until_s, order


@pytest.mark.slow
def test_an_order_passes_through_the_shop(start: Callable[..., Program], url: str) -> None:
    assert set(COMMANDS) == {"chasqui", "uvicorn"}
    worker, api = start("chasqui"), start("uvicorn", "--port", "0")
    orders = api.shows(r"running on (http://\S+)") + "/orders"
    lines = [{"item": "tea", "price": "4.50", "count": 2}]
    placed = ask(orders, {"customer": "ann@example.com", "lines": lines})
    order_id = placed["id"]
    assert settled(f"{orders}/{order_id}") == {
        "state": "paid",
        "payment": {"number": f"payment-{order_id}", "amount": "9.00"},
        "invoice": f"2 x tea: 9.00\npaid: 9.00 (payment-{order_id})",
    }
    again = {"customer": "ann@example.com", "lines": lines, "id": order_id}
    assert ask(orders, again) == placed, "an order that is sent twice is placed once"
    refused = ask(orders, {"customer": "broke@example.com", "lines": lines})
    assert settled(f"{orders}/{refused['id']}") == {
        "state": "failed",
        "reason": "UnrecoverableError: the bank refused to charge broke@example.com",
    }
    with sync.Queue("shop", redis_url=url) as queue:
        assert [one.key for one in queue.get_repeatable_jobs()] == ["task:report"]
    api.end()  # by the signal itself: uvicorn raises it again at its end
    assert "Application shutdown complete" in api.log
    assert worker.end() == 0, worker.log
    assert worker.log.count("charged 9.00") == 1


@pytest.mark.slow
def test_the_shops_own_tests_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=SHOP,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^8 passed", done.stdout, re.M), done.stdout


@pytest.mark.slow
def test_the_shop_passes_mypy() -> None:
    shop = map(str, (*SHOP.glob("shop/*.py"), *SHOP.glob("tests/*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *shop],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(SHOP)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
