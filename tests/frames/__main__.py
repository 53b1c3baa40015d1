"""`python -m tests.frames record --out F` and `python -m tests.frames compare A B`."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.frames.recording import Recording, differences
from tests.servers import KINDS

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden.txt")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frames", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="play the scenes and write what was sent")
    where = recording.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="F")
    where.add_argument("--golden", action="store_true", help="write the golden file anew")
    recording.add_argument("--server", action="append", choices=list(KINDS))
    recording.add_argument("--scene", action="append", help="only this one; may be repeated")
    recording.add_argument(
        "--checkout", type=Path, default=ROOT, help="whose chasqui is recorded, by its .venv"
    )
    comparing = commands.add_parser("compare", help="show what differs between two recordings")
    comparing.add_argument("old", type=Path, metavar="A")
    comparing.add_argument("new", type=Path, metavar="B")
    comparing.add_argument(
        "--all", action="store_true", help="show one for each scene, not only the first"
    )
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return _compare(arguments.old, arguments.new, shows_all=arguments.all)
    made = Recording()
    for server in arguments.server or KINDS:
        print(f"{server} …", file=sys.stderr, flush=True)
        made.add(record(server, arguments.checkout.resolve(), arguments.scene or ()))
    out = GOLDEN if arguments.golden else arguments.out
    out.write_text(made.dump())
    return 0


def record(server: str, checkout: Path = ROOT, scenes: Sequence[str] = ()) -> Recording:
    """Play the scenes on a new server, with the client of a checkout; what was sent."""
    own = checkout / ".venv/bin/python"
    python = str(own) if own.exists() and checkout != ROOT else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recording"
        play = Path(__file__).with_name("play.py")
        command = [python, str(play), str(checkout), server, str(out), *scenes]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"the scenes did not play on {server}:\n{done.stdout}{done.stderr}")
        return Recording.load(out)


def _compare(old: Path, new: Path, *, shows_all: bool) -> int:
    first, second = Recording.load(old), Recording.load(new)
    shared = [server for server in first.servers if server in second.servers]
    print(f"on {', '.join(shared) or 'no server that both have'}:")
    found = list(differences(first.of(shared), second.of(shared)))
    for difference in found:
        print(difference)
        if not shows_all and not difference.startswith("script "):
            break
    if not found:
        print("equal")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
