"""Every fault of the catalogue has a test, and a control that shows that the test can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
#: To collect the whole suite takes ten seconds on a machine that has nothing else to do.
pytestmark = pytest.mark.timeout(300)
SUITE = """
import pytest

@pytest.mark.fault(1)
@pytest.mark.fault(2)
@pytest.mark.parametrize("kind", ["valkey-9", "redis-8.6"])
def test_good(kind): pass

@pytest.mark.fault(2)
@pytest.mark.parametrize("kind", ["redis-8.6"])
def test_bad(kind): assert False

@pytest.mark.fault(3)
def test_that_cannot_run(): pytest.skip("no")

@pytest.mark.fault(8)
@pytest.mark.parametrize("kind", ["valkey-9", "redis-8.6"])
@pytest.mark.parametrize("can", [True, False])
def test_in_part(kind, can):
    if not can and kind == "redis-8.6":
        pytest.skip("no")

@pytest.mark.fault(4, control=True)
def test_control(): pass

@pytest.mark.fault(5)
@pytest.mark.fault(6, control=True)
def test_without_server(): assert False

@pytest.mark.fault(9)
def test_whose_control_cannot_run(): pass

@pytest.mark.fault(9, control=True)
def test_control_that_cannot_run(): pytest.skip("no")

@pytest.mark.fault(7)
@pytest.mark.long
def test_long(): assert False
"""


@pytest.fixture(scope="module")
def suite() -> dict[str, dict[str, list[str]]]:
    """The tests and controls of each fault, from the whole suite."""
    listed = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    found: dict[str, dict[str, list[str]]] = json.loads(listed.stdout)
    return found


def test_the_numbers_leave_no_gap() -> None:
    assert list(CATALOGUE) == list(range(1, 56))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["tests", "controls"])
def test_every_fault_has(suite: dict[str, dict[str, list[str]]], role: str) -> None:
    missing = [CATALOGUE[int(number)] for number, found in suite.items() if not found[role]]
    assert missing == []


def run(folder: Path, text: str) -> Path:
    """Run a suite some tests of which fail; where its results are, if there are any."""
    suite, results = folder / "test_suite.py", folder / "results.json"
    suite.write_text(text)
    options = ["-p", "tests.faults.plugin", "-n", "2", "--fault-results", str(results)]
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "none.ini"), *options]
    (folder / "none.ini").write_text("[pytest]\n")
    ran = subprocess.run([*command, str(suite)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    return results


def test_a_run_in_which_a_process_died_has_no_results(tmp_path: Path) -> None:
    dies = "\n@pytest.mark.fault(1)\ndef test_that_dies():\n    import os\n    os._exit(3)\n"
    assert not run(tmp_path, SUITE + dies).exists()


def test_results_are_the_worst_of_each_fault_on_each_server(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, SUITE).read_text())
    found.pop("commit")
    assert found == {
        "any server": {"3": "skipped", "5": "failed", "6": "failed", "9": "passed in part"},
        "redis-8.6": {"1": "passed", "2": "failed", "8": "passed in part"},
        "valkey-9": {"1": "passed", "2": "passed", "8": "passed"},
    }
