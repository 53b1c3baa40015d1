"""Logs of commands, on stderr: a line for people or a JSON object for programs.

`chasqui worker` runs your program. If your program sets logging up, this leaves it as it is.
"""

import enum
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Final, TextIO, TypeAlias

import typer

from chasqui.cli.output import escaped, to_json
from chasqui.consuming import processes
from chasqui.consuming.current import job_fields

_OURS: Final = "chasqui"
#: Loggers that short commands silence: `doctor` gives the advice about the server, and a command
#: reports a lost server itself.
_NOT_IN_BRIEF: Final = ("chasqui.transport.server", "chasqui.transport.recovery")
#: The attributes that every record has; all others are fields that a caller added.
_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


class Format(enum.StrEnum):
    text = "text"
    json = "json"


class Level(enum.StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


LogFormat: TypeAlias = Annotated[Format, typer.Option(help="The form of the log.")]
JsonLog: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, the log included.")]
LogLevel: TypeAlias = Annotated[
    Level | None,
    typer.Option(help="The lowest level of chasqui's own records to log. Default: info."),
]


def configure(
    log_format: Format = Format.text, log_level: Level | None = None, as_json: bool = False
) -> None:
    """Log to stderr from now on; of other loggers only warnings. A second call replaces the first.

    `as_json` is short for Format.json.
    """
    is_json = as_json or log_format is Format.json
    level = logging.getLevelNamesMapping()[(log_level or Level.info).upper()]
    _install(JsonFormatter() if is_json else TextFormatter(), level)


def configure_briefly(log_level: int = logging.WARNING, *, as_json: bool = False) -> None:
    """The same for a short command: `chasqui: ` and a sentence."""
    _install(JsonFormatter() if as_json else BriefFormatter(), log_level)
    for name in _NOT_IN_BRIEF:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def around_load(
    log_format: Format = Format.text, log_level: Level | None = None, as_json: bool = False
) -> Iterator[None]:
    """Around the import of a program. If it sets logging up, its handlers and levels are used, for
    our records too. If not, records from INFO on that it has no handler for go to stderr.
    """
    configure(log_format, log_level, as_json)
    # The processes that run its handlers import it again.
    processes.around_import = partial(around_load, log_format, log_level, as_json)
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    handler = _uninstall()
    root.setLevel(level := logging.WARNING)
    our_level = ours.level
    try:
        yield
    finally:
        _enable()
        if not root.handlers:
            assert handler is not None
            handler.addFilter(_has_no_other)
            handler.addFilter(_name_job)
            root.addHandler(handler)
            if root.level == level:
                root.setLevel(logging.INFO)
        elif log_level is None and ours.level == our_level:
            ours.setLevel(logging.NOTSET)


def _install(formatter: logging.Formatter, our_level: int) -> None:
    _uninstall()
    handler = _Handler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_OURS).setLevel(our_level)
    for name in _NOT_IN_BRIEF:
        logging.getLogger(name).setLevel(logging.NOTSET)


def _uninstall() -> "_Handler | None":
    """Remove our handler from the root logger, and return it."""
    root, found = logging.getLogger(), None
    for one in root.handlers[:]:
        if isinstance(one, _Handler):
            root.removeHandler(found := one)
    return found


def _enable() -> None:
    """Enable our loggers again. `dictConfig` disables loggers that existed before it and that it
    does not name; ours existed only because this command imports the program."""
    for name, logger in logging.root.manager.loggerDict.items():
        if _is_ours(name) and isinstance(logger, logging.Logger):
            logger.disabled = False


class BriefFormatter(logging.Formatter):
    """`chasqui: ` and the message, on one line even if a job's name in it has line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [self._head(record)]
        if record.exc_info:
            # Indented, so that no text of an error looks like a record.
            trace = self.formatException(record.exc_info)
            lines += [f"  {escaped(line)}" for line in trace.split("\n")]
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)

    def _head(self, record: logging.LogRecord) -> str:
        return f"chasqui: {escaped(record.getMessage())}"


class TextFormatter(BriefFormatter):
    """Time, process, level, logger, the job that logs, and the message. Our messages are put on one
    line; those of the program are left as they are."""

    def _head(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        head = f"{when} [{record.process}] {record.levelname:<7} {record.name}"
        if _is_ours(record.name):
            return f"{head}: {escaped(record.getMessage())}"
        job_id = getattr(record, "job_id", None)
        return f"{head}{f' [{escaped(str(job_id))}]' if job_id else ''}: {record.getMessage()}"


class JsonFormatter(logging.Formatter):
    """A JSON object: time, level, process, logger, message, the record's fields, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_json(line)


def error_as_json(message: str, **fields: Any) -> str:
    """The error that ends a command, in the form of a JSON log line."""
    facts = {"name": _OURS, "levelname": "ERROR", "msg": message, **fields}
    return JsonFormatter().format(logging.makeLogRecord(facts))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at the moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _is_ours(name: str) -> bool:
    return name == _OURS or name.startswith(f"{_OURS}.")


def _has_no_other(record: logging.LogRecord) -> bool:
    """Whether the program has no handler for this record; if it has one, ours would repeat it."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger.parent is not None:
        if any(not isinstance(one, logging.NullHandler) for one in logger.handlers):
            return False
        logger = logger.parent
    return True


def _name_job(record: logging.LogRecord) -> bool:
    """Add the job's fields to a record that a handler logs during its run."""
    if not hasattr(record, "job_id"):
        vars(record).update(job_fields() | vars(record))
    return True
