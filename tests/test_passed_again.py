"""`make test` runs failed tests again, alone, and names those that pass then."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What `make test` needs is there: it runs these tests.
DONE = [f"--old-file={one}" for one in ("build", "servers", "interop-venv", "spark-venv")]
TESTS = """
from pathlib import Path
import pytest

def test_sound(): pass

def test_races():
    mark = Path(__file__).with_suffix(".seen")
    if not mark.exists():
        mark.touch()
        raise AssertionError("once")

@pytest.mark.skipif({is_broken} is False, reason="not now")
def test_broken(): assert False

@pytest.mark.spark
def test_spark(): pass
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_test_that_passed_only_when_run_again_is_named(tmp_path: Path, is_broken: bool) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(is_broken=is_broken))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    spark\n    airflow\n")
    names, arguments = tmp_path / "again.txt", f"-p tests.passed_again {tmp_path}"
    run = subprocess.run(
        [
            "make",
            "--no-print-directory",
            *DONE,
            "test",
            f"AGAIN={names}",
            f"PYTEST_ARGS={arguments}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode != 0) == is_broken, run.stdout + run.stderr
    assert [line.rpartition("::")[2] for line in names.read_text().splitlines()] == ["test_races"]
    assert run.stdout.rstrip().endswith("::test_races"), "at the end, by name"
