"""The README's programs run as they stand, and its links lead somewhere."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
#: The first one is a module, which a worker and a program import; the others are programs.
SHOP, *PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
)


def test_readme_has_programs() -> None:
    assert len(PROGRAMS) >= 2
    assert "gather" in SHOP


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_first_sample_runs_unchanged(
    tmp_path: Path, private_server: Callable[..., Server]
) -> None:
    """As a user would: saved, served by `chasqui worker`, called by a program."""
    (tmp_path / "shop.py").write_text(SHOP)
    url = private_server("redis-8.6").url
    environment = {**os.environ, "CHASQUI_URL": url, "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "chasqui", "worker", "shop:app"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    pages = ThreadingHTTPServer(("127.0.0.1", 0), TenBytes)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{pages.server_port}/{i}" for i in range(3)]
    call = f"import asyncio, shop; asyncio.run(shop.main({urls!r}))"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", call],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
        )
    finally:
        worker.terminate()
        log = worker.communicate(timeout=20)[1]
        pages.shutdown()
        pages.server_close()
    assert (done.returncode, done.stderr) == (0, ""), log
    assert re.fullmatch(r"\d{4}-\d\d-\d\d: 30 bytes\n", done.stdout)
    assert worker.returncode == 0, log


class TenBytes(BaseHTTPRequestHandler):
    """Answers every request with ten bytes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_right"), [("str", True), ("int", False)])
def test_a_type_checker_knows_what_the_first_sample_returns(
    tmp_path: Path, kind: str, is_right: bool
) -> None:
    line = "    print(await job.result())"
    assert line in SHOP
    typed = SHOP.replace(line, f"    found: {kind} = await job.result()\n    print(found)")
    (tmp_path / "shop.py").write_text(typed)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "shop.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert (done.returncode == 0) is is_right, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            assert heading in headings(target), link


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
