"""The same source on both packages: whatever it can see is the same."""

import subprocess
import sys
from pathlib import Path

from tests.interop.conftest import ROOT
from tests.servers import Server

PROGRAM = ROOT / "tests" / "interop" / "program.py"


def run(python: Path | str, package: str, server: Server, queue: str) -> list[str]:
    done = subprocess.run(
        [python, PROGRAM, package, server.url, queue],
        capture_output=True,
        text=True,
        timeout=50,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_program_written_for_chasquimq(interop_python: Path, redis_86: Server, queue_name: str):
    theirs = run(interop_python, "chasquimq", redis_86, f"{queue_name}-theirs")
    ours = run(sys.executable, "chasqui", redis_86, f"{queue_name}-ours")
    assert len(theirs) > 60
    assert ours == theirs
