"""The `chasqui` command, also as `python -m chasqui`: an error becomes a sentence and an exit code.

Codes: 0 done; 1 not done, because of the server or because nothing was found; 2 the command line
makes no sense; 130 interrupted.
"""

import itertools
import os
import sys
from collections.abc import Sequence


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while modules were imported, which takes a moment
        return 130


def _run(arguments: Sequence[str]) -> int:
    import typer

    from chasqui.cli import app, logs
    from chasqui.errors import ChasquiError, NotSupportedError

    # The base class of typer's errors about a command line. Its module differs between versions.
    usage_error: type[Exception] = typer.BadParameter.__mro__[2]
    is_json = _wants_json(arguments)
    logs.configure_briefly(as_json=is_json)
    try:
        code = app(list(arguments), prog_name="chasqui", standalone_mode=False)
        sys.stdout.flush()
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it has no public name either
            print(error, file=sys.stderr)
            return 2
        return _fail(2, getattr(error, "format_message", error.__str__)(), is_json)
    except (ValueError, NotSupportedError) as error:
        return _fail(2, str(error), is_json)
    except (ChasquiError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader closed the pipe. The interpreter must not try to flush stdout into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _fail(1, str(error), is_json)
    except typer.Abort:
        return _fail(130, "interrupted", is_json)
    return code if isinstance(code, int) else 0


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether errors are wanted as JSON. Checked here, as a wrong command line is never parsed."""
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
