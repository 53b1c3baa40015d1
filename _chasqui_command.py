"""The way into the `chasqui` command. Outside the package: a Ctrl+C while that is imported, which
takes a moment, ends the command without a traceback."""

import os


def main() -> None:
    """The console script."""
    try:
        from chasqui.__main__ import main
    except KeyboardInterrupt:
        os._exit(130)
    main()
