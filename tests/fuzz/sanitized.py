"""A build of the core with the sanitizers, beside the one in place, and a process to run it in."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "build/sanitized/lib"

#: Names of the runtime to load first: gcc's, then clang's.
RUNTIMES = ("libasan.so", f"libclang_rt.asan-{os.uname().machine}.so")


class MissingSanitizerError(Exception):
    """This machine's compiler has no address sanitizer."""


def build() -> None:
    """Compile what changed since the last time; the first time takes half a minute."""
    command = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "build"]
    command += ["--build-base", str(LIB.parent), "--build-lib", str(LIB)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "CHASQUI_SANITIZE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}The core could not be compiled with the sanitizers.")


def runtime() -> Path:
    """The sanitizer's shared library, which must be in the process before anything else."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    for name in RUNTIMES:
        command = [compiler, f"-print-file-name={name}"]
        try:
            found = Path(subprocess.check_output(command, text=True).strip())
        except (OSError, subprocess.CalledProcessError):
            break
        if found.is_absolute() and found.exists():  # a name that is not found comes back bare
            return found.resolve()
    raise MissingSanitizerError(
        f"the compiler {compiler!r} has no address sanitizer: install gcc with libasan "
        "(Debian: libasan8, Fedora: libasan), or name another compiler in CC"
    )


def environment() -> dict[str, str]:
    """What a process needs to import the sanitized core instead of the one in place."""
    return {
        **os.environ,
        "LD_PRELOAD": str(runtime()),
        # Python frees little at its end, so leaks are looked for by watching memory instead.
        # A small quarantine keeps that watch honest; no input is worth 64 MB at once.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"
        ":max_allocation_size_mb=64:quarantine_size_mb=8:malloc_context_size=8",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",  # else objects share blocks that the sanitizer sees as one
        "PYTHONPATH": os.pathsep.join((str(LIB), str(ROOT))),
        "PYTHONFAULTHANDLER": "1",
    }
