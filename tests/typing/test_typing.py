"""The annotations, as users' type checkers see them."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(file: Path) -> set[int]:
    """The lines that mypy finds fault with."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=55,
    )
    assert done.returncode in (0, 1), done.stderr
    print(done.stdout)
    return {
        int(line)
        for name, line in re.findall(r"^(\S+?):(\d+): error:", done.stdout, re.MULTILINE)
        if ROOT / name == file
    }


def pyright(file: Path) -> set[int]:
    """The lines that basedpyright, which is pyright from a wheel, finds fault with."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not here: `pip install basedpyright`")
    settings = HERE / "pyrightconfig.json"
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(settings), str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=55,
    )
    print(done.stdout)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("check", [mypy, pyright])
def test_good_calls_are_accepted(check):
    assert check(HERE / "good.py") == set()


@pytest.mark.slow
@pytest.mark.parametrize("check", [mypy, pyright])
def test_bad_calls_are_found(check):
    wrong = {
        number
        for number, line in enumerate((HERE / "bad.py").read_text().splitlines(), 1)
        if line.endswith("# wrong")
    }
    assert check(HERE / "bad.py") == wrong
