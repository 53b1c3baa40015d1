"""The `chasqui` command, also as `python -m chasqui`: errors become one sentence and an exit code.

0 done, 1 it could not be done (the server, or nothing was found), 2 what was asked makes no sense,
130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

import typer

from chasqui.cli import app, logs
from chasqui.errors import ChasquiError, NotSupportedError

#: The base of what typer raises for a wrong command line; it has moved between its versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    logs.configure_briefly()
    try:
        code = app(list(arguments), prog_name="chasqui", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        return _fail(2, getattr(error, "format_message", error.__str__)())
    except (ValueError, NotSupportedError) as error:
        return _fail(2, str(error))
    except (ChasquiError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has seen enough; the interpreter must not try to flush it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(1, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail(130, "interrupted")
    return code if isinstance(code, int) else 0


def _fail(code: int, message: str) -> int:
    print(f"chasqui: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
