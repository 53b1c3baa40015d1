"""The `chasqui` command, also as `python -m chasqui`: errors become one sentence and an exit code.

0 done, 1 it could not be done (the server, or nothing was found), 2 what was asked makes no sense,
130 interrupted.
"""

import itertools
import os
import sys
from collections.abc import Sequence


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while it was loading, which takes a moment
        return 130


def _run(arguments: Sequence[str]) -> int:
    import typer

    from chasqui.cli import app, logs
    from chasqui.errors import ChasquiError, NotSupportedError

    # The base of what typer raises for a wrong command line; it has moved between its versions.
    usage_error: type[Exception] = typer.BadParameter.__mro__[2]
    is_json = _wants_json(arguments)
    logs.configure_briefly(as_json=is_json)
    try:
        code = app(list(arguments), prog_name="chasqui", standalone_mode=False)
        sys.stdout.flush()
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no public name either
            print(error, file=sys.stderr)
            return 2
        return _fail(2, getattr(error, "format_message", error.__str__)(), is_json)
    except (ValueError, NotSupportedError) as error:
        return _fail(2, str(error), is_json)
    except (ChasquiError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has seen enough; the interpreter must not try to flush it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(1, str(error), is_json)
    except typer.Abort:
        return _fail(130, "interrupted", is_json)
    return code if isinstance(code, int) else 0


def _wants_json(arguments: Sequence[str]) -> bool:
    """Read here: a command line that makes no sense was not taken apart."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    chosen = ("--log-format", "json")
    return (
        "--json" in options or "=".join(chosen) in options or chosen in itertools.pairwise(options)
    )


def _fail(code: int, message: str, is_json: bool) -> int:
    from chasqui.cli.logs import error_as_json

    message = " ".join(message.split())
    line = error_as_json(message, exit_code=code) if is_json else f"chasqui: {message}"
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
