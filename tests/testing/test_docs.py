"""The samples of docs/testing-your-jobs.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing-your-jobs.md"
#: By the name of its file, which is its first line.
SAMPLES = dict(
    re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)


@pytest.mark.slow
def test_the_samples_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "CHASQUI_TEST_URL", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    for name, text in SAMPLES.items():
        (pytester.path / name).write_text(text)
    assert sorted(SAMPLES) == ["shop.py", "test_shop.py", "test_shop_unittest.py"]
    options = ("-W", "error", "-o", "asyncio_default_fixture_loop_scope=function")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=6)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "unittest", "test_shop_unittest"],
        cwd=pytester.path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr
