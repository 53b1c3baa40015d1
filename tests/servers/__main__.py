"""`python -m tests.servers get [kind ...]` fetches or builds what is missing; `list` shows all."""

import argparse
import sys

from tests.servers.binaries import MissingServerError, find
from tests.servers.fetch import get
from tests.servers.kinds import KINDS, Kind, version_of
from tests.servers.remote import remote_servers


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers", description="Servers for tests."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show which servers this machine has")
    getting = commands.add_parser("get", help="fetch or build the servers that are missing")
    getting.add_argument("kinds", nargs="*", type=_kind, metavar="kind", help=", ".join(KINDS))
    arguments = parser.parse_args()
    if arguments.command == "list":
        return _list()
    return _get(arguments.kinds or list(KINDS.values()))


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KINDS)}")
    return KINDS[name]


def _list() -> int:
    for kind in KINDS.values():
        try:
            _show(kind)
        except MissingServerError:
            print(f"{kind.name:<10} missing   `make servers` gets it from {kind.origin}")
    for server in remote_servers():
        print(f"{server.name:<10} by URL    {server.url}")
    return 0


def _get(kinds: list[Kind]) -> int:
    failures = 0
    for kind in kinds:

        def report(line: str, name: str = kind.name) -> None:
            print(f"{name:<10} {line}", file=sys.stderr, flush=True)

        try:
            get(kind, report)
            _show(kind)
        except MissingServerError as error:
            report(f"failed: {error}")
            failures += 1
    return 1 if failures else 0


def _show(kind: Kind) -> None:
    binary = find(kind)
    print(f"{kind.name:<10} {version_of(binary):<9} {binary}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
