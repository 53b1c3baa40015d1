"""Integrations cost nothing, and say what they need, where their program is not installed."""

import importlib.util
import subprocess
import sys

import pytest


def test_airflow_is_asked_for_in_one_line() -> None:
    if importlib.util.find_spec("airflow") is not None:
        pytest.skip("Airflow is installed here")
    with pytest.raises(ImportError, match=r"needs Airflow 3.1 or newer: pip install 'chasqui\["):
        importlib.import_module("chasqui.integrations.airflow")


def test_chasqui_imports_no_integration() -> None:
    source = "import sys, chasqui; print([m for m in sys.modules if 'integrations' in m])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
