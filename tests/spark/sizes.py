"""Tests that show exactness run with few rows every day, and with many on demand."""

from typing import Any

import pytest

#: What `pytest -m "spark and long"` writes.
FULL = 120_000


def sized(few: int) -> Any:
    """Give a test its `size`."""
    full = pytest.param(FULL, marks=[pytest.mark.long, pytest.mark.timeout(900)])
    return pytest.mark.parametrize("size", [few, full])
