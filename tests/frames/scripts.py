"""The names of scripts, found by the SHA1 of their texts.

Scripts are the Lua files of the package, wherever they lie. Some are sent behind a file of shared
functions; such a file uses no KEYS.
"""

import hashlib
from pathlib import Path


class Scripts:
    """All scripts that a checkout may send."""

    def __init__(self, package: Path) -> None:
        texts = {path.stem: path.read_bytes() for path in sorted(package.rglob("*.lua"))}
        shared = [text for text in texts.values() if b"KEYS[" not in text and b"#KEYS" not in text]
        self.sources = {
            hashlib.sha1(before + text, usedforsecurity=False).hexdigest(): (name, before + text)
            for before in (b"", *shared)
            for name, text in texts.items()
            if text is not before
        }
        #: The SHA1 of each script that was seen, by its name.
        self.seen: dict[str, str] = {}

    def name(self, sha: str) -> str:
        """What to call a script in a recording."""
        name = self.sources[sha][0] if sha in self.sources else f"unknown-{sha[:8]}"
        self.seen[name] = sha
        return name

    def shas(self, name: str) -> list[str]:
        """The SHA1 of all texts that a script of this name may have."""
        return [sha for sha, (known, _) in self.sources.items() if known == name]
