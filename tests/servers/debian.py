"""Builds Redis 8.6 from the source package that Debian's experimental suite carries.

The mirror is the one that this machine's own apt is set up with. apt checks the suite's signature
and the hashes of what it downloads; its state is kept apart from the machine's, so that nobody
need be root.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tests.servers.binaries import MissingServerError

_TOOLS = ("redis-server", "redis-cli", "redis-benchmark")
_KEYRINGS = tuple(
    Path(f"/usr/share/keyrings/debian-archive-keyring.{end}") for end in ("pgp", "gpg")
)
_REPORT_EVERY_S = 15.0
_HINT = "put a redis-server 8.6 on PATH instead"


def build_redis(into: Path, report: Callable[[str], None]) -> None:
    """Put redis-server, redis-cli and redis-benchmark, built from source, into a folder."""
    for needed in ("apt-get", "make", "cc"):
        if shutil.which(needed) is None:
            raise MissingServerError(f"building Redis 8.6 needs {needed}: install it, or {_HINT}")
    work = into.with_name("work")
    source = work / "source"
    source.mkdir(parents=True)
    tarball = _download(work, report)
    _run(["tar", "--extract", "--strip-components=1", f"--file={tarball}"], source)
    _make(source / "src", report)
    for name in _TOOLS:
        shutil.copy2(source / "src" / name, into / name)


def _download(work: Path, report: Callable[[str], None]) -> Path:
    """The upstream tarball, from the first of the machine's mirrors that has the suite."""
    listed = _run(["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)"], work)
    reason = "apt has no mirror set up"
    for mirror in dict.fromkeys(listed.split()):
        report("downloading the Redis source package through apt")
        try:
            return _download_from(mirror, work)
        except MissingServerError as error:
            reason = str(error)
    raise MissingServerError(f"no Redis 8.6 source package: {reason}; {_HINT}")


def _download_from(mirror: str, work: Path) -> Path:
    # Experimental is signed with Debian's archive keys. Where their file is missing, apt's own
    # trusted keys decide.
    signed_by = next((f"[signed-by={ring}] " for ring in _KEYRINGS if ring.exists()), "")
    state = Path(tempfile.mkdtemp(prefix="apt-", dir=work))
    (state / "lists" / "partial").mkdir(parents=True)
    (state / "cache" / "archives" / "partial").mkdir(parents=True)
    (state / "sources.list").write_text(f"deb-src {signed_by}{mirror} experimental main\n")
    options = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        # As root apt would drop to a user who cannot enter our private folder.
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
    }
    apt = ["apt-get", "--quiet"]
    for name, value in options.items():
        apt += ["-o", f"{name}={value}"]
    _run([*apt, "update"], state)
    _run([*apt, "source", "--download-only", "redis"], state)
    tarballs = list(state.glob("redis_8.6.*.orig.tar.*"))
    if not tarballs:
        raise MissingServerError("Debian's experimental suite no longer has 8.6")
    return tarballs[0]


def _make(source: Path, report: Callable[[str], None]) -> None:
    report("building Redis 8.6: about two minutes on two cores")
    started_s = reported_s = time.monotonic()
    # Under `make servers` the flags and job server of that make are not for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        ["make", f"-j{os.cpu_count() or 1}", "BUILD_TLS=no", *_TOOLS],
        cwd=source,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as make:
        assert make.stdout is not None
        for line in make.stdout:
            tail.append(line)
            if time.monotonic() - reported_s >= _REPORT_EVERY_S:
                reported_s = time.monotonic()
                report(f"building for {reported_s - started_s:.0f} s")
    if make.returncode:
        output = "".join(tail)
        raise MissingServerError(f"Redis 8.6 does not build here; {_HINT}. make said:\n{output}")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise MissingServerError(f"`{command[0]}` failed: {reason}")
    return done.stdout
