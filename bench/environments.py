"""Makes what each library runs in: a venv per set of requirements that agree, and node_modules."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.libraries import Environment, Library

ROOT = Path(__file__).parent.parent
#: Holds what installed last, so that it is not installed again.
STAMP = ".requirements.json"


class InstallError(Exception):
    """The environment could not be made here; the text says why."""


def command(library: Library) -> list[str]:
    """How to start the library's adapter; `ensure` comes first."""
    environment = library.environment
    if environment.is_node:
        return ["node", str(ROOT / "bench" / "peers" / f"{library.name}.cjs")]
    return [str(python_of(environment)), "-m", f"bench.peers.{library.name}"]


def python_of(environment: Environment) -> Path:
    """The interpreter of an environment."""
    if not environment.requirements:
        return Path(sys.executable)
    return folder_of(environment) / "bin" / "python"


def folder_of(environment: Environment) -> Path:
    return ROOT / f".venv-bench-{environment.name}"


def is_ready(environment: Environment) -> bool:
    """Whether it was made before, of the same requirements."""
    if not environment.requirements:
        return True
    try:
        told = json.loads((folder_of(environment) / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(told == list(environment.requirements))


def ensure(environment: Environment, report: Callable[[str], None]) -> None:
    """Make the environment unless it is there; InstallError if that fails."""
    if is_ready(environment):
        return
    folder = folder_of(environment)
    report(f"installing {', '.join(environment.requirements)}")
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    if environment.is_node:
        if shutil.which("npm") is None or shutil.which("node") is None:
            raise InstallError("node and npm are not on this machine")
        _run(["npm", "install", "--silent", "--prefix", str(folder), *environment.requirements])
    else:
        python = str(python_of(environment))
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check"]
        _run([*pip, "install", *environment.requirements])
    (folder / STAMP).write_text(json.dumps(list(environment.requirements)))


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InstallError(lines[-1] if lines else f"{argv[0]} failed")
