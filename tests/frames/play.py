"""Plays the scenes on one server and writes the recording: what a child process of `record` does.

It runs as a file, with the Python of the checkout whose client is recorded. That checkout need not
have this package: chasqui is imported from there, everything else from here.
"""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

#: So far behind the server is the client's clock: its times and the server's can be told apart.
_BEHIND_S = 5
#: No time on a whole second is mistaken for one that was counted from the client's clock.
_ODD_MS = 137


def freeze() -> int:
    """Let the wall clock of this process stand still; at which time, in unix ms."""
    t0_ms = (int(time.time()) - _BEHIND_S) * 1000 + _ODD_MS
    time.time_ns = lambda: t0_ms * 1_000_000
    time.time = lambda: t0_ms / 1000
    return t0_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("server")
    parser.add_argument("out", type=Path)
    parser.add_argument("scenes", nargs="*")
    arguments = parser.parse_args()
    t0_ms = freeze()
    logging.getLogger("chasqui").setLevel(logging.CRITICAL)  # jobs are meant to fail
    sys.path[0] = str(arguments.checkout)
    import chasqui

    package = Path(chasqui.__file__).parent
    if package.parent != arguments.checkout:
        sys.exit(f"chasqui comes from {package.parent}, not from {arguments.checkout}")
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.frames.stage import perform

    recording = asyncio.run(perform(arguments.server, package, t0_ms, arguments.scenes))
    arguments.out.write_text(recording.dump())


if __name__ == "__main__":
    main()
