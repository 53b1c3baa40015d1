"""Compiles chasqui/_core/*.pyx against hiredis; all metadata is in pyproject.toml.

Environment:
  CHASQUI_HIREDIS=system   link the hiredis that pkg-config finds, fetch nothing
  CHASQUI_SANITIZE=1       compile with the address and undefined-behaviour sanitizers
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

#: The PyPI package whose sdist carries the C library. Its sources are never committed.
HIREDIS = "3.5.0"
HIREDIS_SHA256 = "c227592cc56b7df247abe4755c26723965be68972be2149fa441ac33d82131ba"
#: The part of it we compile in: the reply reader and what it stands on.
HIREDIS_SOURCES = ("alloc.c", "read.c", "sds.c")
#: The license of ffc.h, which read.c compiles in and which has it at its top only.
FFC_COPYING = "COPYING.ffc"
SYSTEM_HIREDIS_FLOOR = "1.1"

#: Relative, as setuptools wants sources; carried by our sdist, ignored by git.
VENDOR = Path("vendor/hiredis")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": False,
}

# Hidden: hiredis-py in the same process has these names too, each must keep its own.
COMPILE = ["-O3", "-fvisibility=hidden"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def hiredis() -> dict[str, list[str]]:
    """Where hiredis comes from, as Extension arguments plus the license to ship."""
    if os.environ.get("CHASQUI_HIREDIS") == "system":
        return {
            "extra_compile_args": pkg_config("--cflags"),
            "extra_link_args": pkg_config("--libs"),
            "sources": [],
            "license_files": [],
        }
    vendor_hiredis()
    return {
        "extra_compile_args": [f"-I{VENDOR}", f"-I{VENDOR.parent}"],
        "extra_link_args": [],
        "sources": [str(VENDOR / name) for name in HIREDIS_SOURCES],
        "license_files": [str(VENDOR / "COPYING"), str(VENDOR / FFC_COPYING)],
    }


def pkg_config(option: str) -> list[str]:
    command = [os.environ.get("PKG_CONFIG", "pkg-config")]
    command += [option, f"hiredis >= {SYSTEM_HIREDIS_FLOOR}"]
    try:
        return shlex.split(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True))
    except (OSError, subprocess.CalledProcessError):
        sys.exit(
            f"CHASQUI_HIREDIS=system needs pkg-config and the hiredis development files, "
            f"{SYSTEM_HIREDIS_FLOOR} or newer: install them, or unset CHASQUI_HIREDIS."
        )


def vendor_hiredis() -> None:
    """Fill VENDOR with the pinned sources, unless they are there."""
    if is_vendored():
        return
    sdist = hiredis_sdist()
    VENDOR.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=VENDOR.parent) as scratch, tarfile.open(sdist) as tar:
        made = Path(scratch, "made")
        made.mkdir()
        for member in tar:
            path = Path(member.name)
            wanted = path.suffix == ".h" or path.name in (*HIREDIS_SOURCES, "COPYING")
            if path.parent == Path(f"hiredis-{HIREDIS}", VENDOR) and wanted:
                (made / path.name).write_bytes(tar.extractfile(member).read())
        (made / FFC_COPYING).write_text(head_comment(made / "ffc.h"), "utf-8")
        (made / "SHA256").write_text(HIREDIS_SHA256)
        if not is_vendored():
            with suppress(FileNotFoundError):
                VENDOR.rename(Path(scratch, "outdated"))
        with suppress(OSError):  # a build beside us was first
            made.rename(VENDOR)


def is_vendored() -> bool:
    pin = VENDOR / "SHA256"
    return pin.exists() and pin.read_text() == HIREDIS_SHA256 and (VENDOR / FFC_COPYING).exists()


def head_comment(path: Path) -> str:
    """The comment that a C file begins with, as text."""
    lines = takewhile(lambda line: line.startswith("//"), path.read_text("utf-8").splitlines())
    return "".join(f"{line[2:].removeprefix(' ')}\n" for line in lines)


def hiredis_sdist() -> Path:
    """The checked sdist, from the user's cache or else from the package index."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "chasqui")
    name = f"hiredis-{HIREDIS}.tar.gz"
    cached = cache / name
    if cached.exists() and sha256(cached) == HIREDIS_SHA256:
        return cached
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", scratch]
        command += ["--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "hiredis", f"hiredis=={HIREDIS}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        fetched = Path(scratch, name)
        if done.returncode or not fetched.exists():
            why = ([line for line in done.stdout.splitlines() if "ERROR" in line] or [""])[-1]
            sys.exit(
                f"The sources of hiredis {HIREDIS} could not be fetched from the package index: "
                f"connect to it, put {name} into {cache}, or install hiredis's development "
                f"files and set CHASQUI_HIREDIS=system. {why}".rstrip()
            )
        if sha256(fetched) != HIREDIS_SHA256:
            sys.exit(
                f"The package index served a {name} that is not the pinned one "
                f"(sha256 {sha256(fetched)}, not {HIREDIS_SHA256}): use another index."
            )
        fetched.replace(cached)
    return cached


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        compiler = self.compiler.compiler[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"chasqui needs a C compiler and {compiler!r} is not one on this machine: "
                "install gcc or clang, or set CC to yours."
            )
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            sys.exit(
                "chasqui needs the headers of this Python: install its development package, "
                "such as python3-dev."
            )
        # Here and not in setup(): an sdist carries .pyx files, not the C made from them. And
        # before the threads of super(), which Cython's compiler is not made for.
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError

        try:
            made = cythonize(
                self.extensions, force=self.force, quiet=True, compiler_directives=DIRECTIVES
            )
        except CompileError as error:  # Cython has said where and why
            sys.exit(f"Cython could not compile {error}.")
        for extension, with_c in zip(self.extensions, made, strict=True):
            extension.sources = with_c.sources
        super().build_extensions()


def extension(pyx: Path, found: dict[str, list[str]]) -> Extension:
    sanitized = os.environ.get("CHASQUI_SANITIZE") == "1"
    is_reader = pyx.stem == "reply"
    return Extension(
        ".".join(pyx.with_suffix("").parts),
        sources=[str(pyx), *(found["sources"] if is_reader else [])],
        depends=["setup.py"],
        extra_compile_args=COMPILE
        + found["extra_compile_args"]
        + (["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZE] if sanitized else []),
        extra_link_args=(found["extra_link_args"] if is_reader else [])
        + (SANITIZE if sanitized else []),
    )


found = hiredis()
setup(
    ext_modules=[extension(pyx, found) for pyx in sorted(Path("chasqui/_core").glob("*.pyx"))],
    license_files=["LICENSE", *found["license_files"]],
    cmdclass={"build_ext": BuildExt},
)
