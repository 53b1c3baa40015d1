"""The console script. It is outside the package, so that Ctrl+C while the package is being imported
ends the command without a traceback."""

import os


def main() -> None:
    """The console script."""
    try:
        from chasqui.__main__ import main
    except KeyboardInterrupt:
        os._exit(130)
    main()
