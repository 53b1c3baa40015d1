"""What is shipped, where it is built, and that it builds from what is shipped."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
INTERPRETERS = ("cp311", "cp312", "cp313", "cp314", "cp314t")


def test_version_has_one_home() -> None:
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    version = importlib.metadata.version("chasqui")
    quoted = re.compile(rf"[\"']{re.escape(version)}[\"']")
    homes = [path for path in (ROOT / "chasqui").rglob("*.py*") if quoted.search(text_of(path))]
    assert homes == [ROOT / "chasqui/_version.py"]


@pytest.mark.parametrize(
    ("platform", "archs", "tags"),
    [
        ("linux", "x86_64,aarch64", ("manylinux", "musllinux")),
        ("macos", "x86_64,arm64", ("macosx",)),
        ("windows", "AMD64", ()),
    ],
)
def test_wheels_are_built_for(platform: str, archs: str, tags: tuple[str, ...]) -> None:
    listed = run(
        "-m", "cibuildwheel", "--print-build-identifiers", "--allow-empty",
        "--platform", platform, "--archs", archs,
    )  # fmt: skip
    assert sorted(listed.split()) == sorted(
        f"{interpreter}-{tag}_{arch}"
        for interpreter in INTERPRETERS
        for tag in tags
        for arch in archs.split(",")
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_commit(path: Path) -> None:
    used = [step["uses"] for job in jobs(path).values() for step in job["steps"] if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def test_all_green_waits_for_every_job() -> None:
    ci = jobs(ROOT / ".github/workflows/ci.yml")
    assert set(ci.pop("all-green")["needs"]) == set(ci)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_make_target_that_a_workflow_calls_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(made_by(path)) <= targets


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_builds_offline_from_the_sdist(tmp_path: Path) -> None:
    run("-m", "build", "--no-isolation", "--sdist", "--outdir", str(tmp_path), str(ROOT))
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        carried = {name.partition("/")[2] for name in tar.getnames()}
    licenses = {"vendor/hiredis/COPYING", "vendor/hiredis/COPYING.ffc"}
    assert {*licenses, "vendor/hiredis/read.c", "vendor/hiredis/read.h"} <= carried
    assert {path for path in carried if path.startswith("chasqui/_core/")} == {
        "chasqui/_core/" + path.name
        for path in (ROOT / "chasqui/_core").iterdir()
        if path.suffix in {".py", ".pyx", ".pxd", ".pyi"}
    }

    run(
        "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet",
        "--wheel-dir", str(tmp_path), str(sdist),
        PIP_NO_INDEX="1", PIP_FIND_LINKS="", XDG_CACHE_HOME=str(tmp_path / "empty"),
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = archive.namelist()
        texts = {name.partition("licenses/")[2]: archive.read(name) for name in shipped}
    assert "chasqui/py.typed" in shipped
    assert {"LICENSE", *licenses} <= set(texts)
    assert b"Copyright (c) 2021 The fast_float authors" in texts["vendor/hiredis/COPYING.ffc"]
    assert [name for name in shipped if name.endswith((".pyx", ".c", ".h"))] == []
    for pyx in (ROOT / "chasqui/_core").glob("*.pyx"):
        assert f"chasqui/_core/{pyx.stem}.pyi" in shipped
        assert [name for name in shipped if name.startswith(f"chasqui/_core/{pyx.stem}.cpython-")]


def test_compiled_core_keeps_the_symbols_of_hiredis_to_itself() -> None:
    # In a process of its own, where hiredis-py comes first and would win if it could.
    read = run(
        "-c",
        "import ctypes, hiredis.hiredis, chasqui._core.reply as reply\n"
        "print(hasattr(ctypes.CDLL(reply.__file__), 'redisReaderFeed'))",
    )
    assert read.strip() == "False"


def run(*arguments: str, **environment: str) -> str:
    """What this Python prints when run with these arguments at the root."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def text_of(path: Path) -> str:
    return path.read_text() if path.suffix in {".py", ".pyi", ".pyx"} else ""


def jobs(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())["jobs"]
    assert isinstance(found, dict)
    return found


def made_by(path: Path) -> Iterator[str]:
    for job in jobs(path).values():
        for step in job["steps"]:
            yield from re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)
