"""Finds the binary of a kind on this machine: on PATH, else in the user's cache."""

import os
import shutil
from pathlib import Path

from tests.servers.kinds import KINDS, Kind, version_of


class MissingServerError(Exception):
    """This machine has no binary of the kind; the text says how to get it."""


def find(kind: Kind | str) -> Path:
    """The server binary of this kind, its version checked; MissingServerError if there is none."""
    kind = _kind(kind)
    on_path = shutil.which(kind.binary)
    for candidate in (Path(on_path) if on_path else None, cached(kind)):
        if candidate is None or not candidate.exists():
            continue
        version = version_of(candidate)
        if version is not None and kind.accepts(version):
            return candidate
    raise MissingServerError(f"no {kind.name} server on this machine: `make servers` gets it")


def tool(kind: Kind | str, name: str) -> Path:
    """A tool that came with the server of this kind, such as redis-cli or redis-benchmark."""
    beside = find(kind).with_name(name)
    if not beside.exists():
        raise MissingServerError(
            f"no {name} beside the {_kind(kind).name} server at {beside.parent}"
        )
    return beside


def cache_directory() -> Path:
    """Where binaries are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chasqui" / "servers"


def cached(kind: Kind) -> Path:
    """Where the cache has, or would have, the server binary of this kind."""
    return cache_directory() / kind.name / kind.binary


def _kind(kind: Kind | str) -> Kind:
    return kind if isinstance(kind, Kind) else KINDS[kind]
