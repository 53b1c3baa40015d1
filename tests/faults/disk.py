"""A server on a disk that can be stalled and whose power can be cut: what was synced stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

SOURCE = Path(__file__).with_name("disk.c")


def build_shim(folder: Path, source: Path = SOURCE) -> Path:
    """A library to be loaded before libc, by default the one that watches over the disk; skips
    where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux, to come between a server and its system")
    shim = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return shim


class DiskServer(Server):
    """A server with an AOF, on a disk that does what a test wants."""

    def __init__(self, kind: str, shim: Path, **settings: str) -> None:
        self._shim = shim
        super().__init__(kind, appendonly="yes", **settings)

    def _command(self, port: int) -> list[str]:
        variables = [f"LD_PRELOAD={self._shim}", f"DISK_FOLDER={self.directory}"]
        return ["env", *variables, *super()._command(port)]

    @property
    def syncs_begun(self) -> int:
        """How many syncs the server has asked for."""
        return len(self._lines("begun"))

    @property
    def has_settled(self) -> bool:
        """Whether all that was written has been synced."""
        safe = self._safe_bytes()
        return all(file.stat().st_size <= safe.get(file.stat().st_ino, 0) for file in self._files())

    def stall(self) -> None:
        """From now on no sync comes to its end."""
        (self.directory / "stall").touch()

    def resume(self) -> None:
        (self.directory / "stall").unlink(missing_ok=True)

    def fill(self) -> None:
        """From now on there is no room for what is written."""
        (self.directory / "full").touch()

    def make_room(self) -> None:
        (self.directory / "full").unlink(missing_ok=True)

    def cut_power(self) -> int:
        """End the server, and all that no sync has made safe with it; how many bytes that was."""
        self.kill()
        safe, lost = self._safe_bytes(), 0
        for file in self._files():
            status = file.stat()
            keep = min(safe.get(status.st_ino, 0), status.st_size)
            lost += status.st_size - keep
            os.truncate(file, keep)
        return lost

    def start(self) -> None:
        self.resume()
        super().start()

    def _files(self) -> list[Path]:
        return [file for file in self.directory.rglob("appendonly*") if file.is_file()]

    def _safe_bytes(self) -> dict[int, int]:
        """The length up to which each file is safe, by inode."""
        return {int(inode): int(length) for inode, length in map(str.split, self._lines("synced"))}

    def _lines(self, name: str) -> list[str]:
        file = self.directory / name
        return file.read_text().splitlines() if file.exists() else []
