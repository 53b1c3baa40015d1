"""What commands log, to stderr: a line for people or a JSON object for programs.

`chasqui worker` runs somebody else's program: where that sets logging up, it is left as it is.
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
from chasqui.consumer import processes
from chasqui.consumer.holdings import running_slot
from chasqui.model.job import Job

_OURS: Final = "chasqui"
#: What is not worth a line above the output of each command: advice about the server, which
#: `doctor` gives, and a lost server, of which the command itself tells.
_NOT_IN_BRIEF: Final = ("chasqui.transport.server", "chasqui.transport.recovery")
#: What a record has before anybody gave it fields of his own.
_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


class Format(enum.StrEnum):
    text = "text"
    json = "json"


class Level(enum.StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


LogFormat: TypeAlias = Annotated[Format, typer.Option(help="How the log reads.")]
JsonLog: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, the log included.")]
LogLevel: TypeAlias = Annotated[
    Level | None,
    typer.Option(help="What of chasqui's own is worth a line in the log. Default: info."),
]


def configure(
    log_format: Format = Format.text, log_level: Level | None = None, as_json: bool = False
) -> None:
    """Log to stderr from now on; of others' loggers only warnings. A second call replaces it.

    `as_json` is the short way to say Format.json.
    """
    is_json = as_json or log_format is Format.json
    _install(JsonFormatter() if is_json else TextFormatter())
    logging.getLogger().setLevel(logging.WARNING)
    _set_levels(_number(log_level))


def configure_briefly(log_level: int = logging.WARNING, *, as_json: bool = False) -> None:
    """The same for a command that ends by itself: `chasqui: ` and a sentence."""
    _install(JsonFormatter() if as_json else BriefFormatter())
    logging.getLogger().setLevel(logging.WARNING)
    _set_levels(log_level)
    for name in _NOT_IN_BRIEF:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def around_load(
    log_format: Format = Format.text, log_level: Level | None = None, as_json: bool = False
) -> Iterator[None]:
    """Around the import of a program, which may set logging up: then its handlers and levels are
    used, for our records too. Else log to stderr what it has no handler for, from INFO on.
    """
    configure(log_format, log_level, as_json)
    # Processes of its handlers import it once more.
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


def _install(formatter: logging.Formatter) -> None:
    _uninstall()
    handler = _Handler()
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)


def _uninstall() -> "_Handler | None":
    """Our handler, no longer in use."""
    root, found = logging.getLogger(), None
    for one in root.handlers[:]:
        if isinstance(one, _Handler):
            root.removeHandler(found := one)
    return found


def _number(log_level: Level | None) -> int:
    return logging.getLevelNamesMapping()[(log_level or Level.info).upper()]


def _set_levels(log_level: int) -> None:
    logging.getLogger(_OURS).setLevel(log_level)
    for name in _NOT_IN_BRIEF:
        logging.getLogger(name).setLevel(logging.NOTSET)


def _enable() -> None:
    """`dictConfig` disables all loggers that it does not name and that were made before it. Ours
    were only because this command runs the program, and not the other way round."""
    for name, logger in logging.root.manager.loggerDict.items():
        if _is_ours(name) and isinstance(logger, logging.Logger):
            logger.disabled = False


class BriefFormatter(logging.Formatter):
    """`chasqui: ` and the message, which may hold a job's name: on one line, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [self._head(record)]
        if record.exc_info:
            # Behind the margin, so that no text of an error looks like a record.
            trace = self.formatException(record.exc_info)
            lines += [f"  {escaped(line)}" for line in trace.split("\n")]
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)

    def _head(self, record: logging.LogRecord) -> str:
        return f"chasqui: {escaped(record.getMessage())}"


class TextFormatter(BriefFormatter):
    """Time, level, logger, the job that logs it, and the message: ours on one line, a program's as
    it wants it."""

    def _head(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        head = f"{when} [{record.process}] {record.levelname:<7} {record.name}"
        if _is_ours(record.name):
            return f"{head}: {escaped(record.getMessage())}"
        job_id = getattr(record, "job_id", None)
        return f"{head}{f' [{escaped(str(job_id))}]' if job_id else ''}: {record.getMessage()}"


class JsonFormatter(logging.Formatter):
    """One object: time, level, logger, message, the fields of the record, and its traceback."""

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
    """What ends a command, as a line of a log of JSON."""
    facts = {"name": _OURS, "levelname": "ERROR", "msg": message, **fields}
    return JsonFormatter().format(logging.makeLogRecord(facts))


class _Handler(logging.StreamHandler[TextIO]):
    """To what is stderr at the moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _is_ours(name: str) -> bool:
    return name == _OURS or name.startswith(f"{_OURS}.")


def _has_no_other(record: logging.LogRecord) -> bool:
    """Whether the program has no handler of its own for this record: else it would show twice."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger.parent is not None:
        if any(not isinstance(one, logging.NullHandler) for one in logger.handlers):
            return False
        logger = logger.parent
    return True


def _name_job(record: logging.LogRecord) -> bool:
    """Give a record that a handler's run logs the fields of its job."""
    slot, job = running_slot.get(None), processes.running_job.get()
    if hasattr(record, "job_id"):
        return True
    if slot is not None and (entry := slot.entry) is not None:
        record.job_id, record.job_name = entry.job_id, entry.name
        record.attempt = entry.attempt + 1
    elif isinstance(job, Job):
        record.job_id, record.job_name, record.attempt = job.id, job.name, job.attempt + 1
    return True
