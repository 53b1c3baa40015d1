"""The core under valgrind's memcheck: no bad access, no lost block that our code allocated."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: How our code shows in a stack: by its file, or by Cython's and hiredis's names in it.
OURS = re.compile(r"chasqui/_core|7chasqui|redisReader|\bsds")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("valgrind") is None, reason="needs valgrind: `apt-get install valgrind`"
    ),
]


def test_memcheck_finds_nothing_of_ours(tmp_path: Path):
    assert reports(tmp_path / "log") == []


def test_memcheck_finds_a_leak_of_ours(tmp_path: Path):
    assert any("definitely lost" in report for report in reports(tmp_path / "log", "leak"))


def reports(log: Path, *arguments: str) -> list[str]:
    """What valgrind has to say about our code."""
    done = subprocess.run(
        [
            *("valgrind", "--leak-check=full", "--show-leak-kinds=definite,indirect"),
            *("--num-callers=30", f"--log-file={log}"),
            *(sys.executable, "-m", "tests.core.under_valgrind", *arguments),
        ],
        cwd=ROOT,
        # Python's own allocator hides blocks from valgrind.
        env={**os.environ, "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
    )
    assert "done" in done.stdout, done.stderr[-2000:]
    lines = [re.sub(r"^==\d+== ?", "", line) for line in log.read_text().splitlines()]
    blocks = "\n".join(lines).split("\n\n")
    return [block for block in blocks if " at 0x" in block and OURS.search(block)]
