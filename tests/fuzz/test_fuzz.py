import os
import subprocess
import sys

import pytest

from tests.fuzz import run, sanitized

#: Fixed, so that a failure is the change's and not the day's; `make fuzz` draws new ones.
SEED = 1
INPUTS = 25_000


@pytest.fixture(scope="module", autouse=True)
def _sanitized_core() -> None:
    try:
        sanitized.runtime()
    except sanitized.MissingSanitizerError as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    sanitized.build()


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first time compiles the core
def test_no_decoder_breaks_on_broken_input() -> None:
    outcome = run.run(list(run.NAMES), INPUTS, SEED, jobs=2)
    assert outcome.failure is None, f"{outcome.failure.path}\n{outcome.failure.report}"
    for name, state in outcome.states.items():
        assert state.inputs == INPUTS
        assert 0.05 < state.accepted / INPUTS < 0.95, f"{name}: the inputs test one side only"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sanitizer_is_at_work() -> None:
    code = "import ctypes; p = ctypes.create_string_buffer(8); ctypes.memset(p, 0, 4096)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=sanitized.environment(), capture_output=True
    )
    assert done.returncode < 0
    assert b"AddressSanitizer" in done.stderr
