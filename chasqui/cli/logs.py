"""What commands log, to stderr: a sentence for people or a JSON object for programs, a line each.

A log that repeats itself hides what matters: of the same complaint a few lines pass in a while, the
rest is counted.
"""

import enum
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TextIO, TypeAlias

import typer

from chasqui.cli.output import escaped, to_json

#: So many lines of a kind pass within so many seconds.
BURST: Final = 5
EVERY_S: Final = 10.0

_ABOUT_SERVERS = logging.getLogger("chasqui.server")
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
LogLevel: TypeAlias = Annotated[Level, typer.Option(help="What is worth a line in the log.")]


def configure(
    log_format: Format = Format.text, log_level: Level = Level.warning, as_json: bool = False
) -> None:
    """Log to stderr from now on; of others' loggers only warnings. A second call replaces it.

    `as_json` is the short way to say Format.json.
    """
    handler = _Handler()
    is_json = as_json or log_format is Format.json
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("chasqui").setLevel(log_level.upper())
    _ABOUT_SERVERS.setLevel(logging.NOTSET)


def configure_briefly() -> None:
    """The same for a command that ends by itself: what it does not log is advice about the server,
    for it would stand above the output of each command. `doctor` gives it."""
    configure()
    _ABOUT_SERVERS.setLevel(logging.ERROR)


class TextFormatter(logging.Formatter):
    """`chasqui: ` and the message, which may hold a job's name: on one line, whatever is in it."""

    def __init__(self) -> None:
        super().__init__("chasqui: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record)) + _more(record)


class JsonFormatter(logging.Formatter):
    """One object: time, level, logger, message, the fields of the record, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_json(line)


class RepeatFilter(logging.Filter):
    """Lets BURST records of a kind pass in EVERY_S; the next one tells how many were held back.

    Of a kind are those of one logger with one text before its arguments, about one queue.
    """

    def __init__(self, burst: int = BURST, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._burst = burst
        self._every_s = every_s
        #: Per kind: since when it is counted, how many passed, how many did not.
        self._seen: dict[tuple[Any, ...], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, record.levelno, record.msg, getattr(record, "queue", None))
        now_s = time.monotonic()
        since_s, passed, held_back = self._seen.get(kind, (now_s, 0, 0))
        if now_s - since_s >= self._every_s:
            since_s, passed = now_s, 0
        if passed >= self._burst:
            self._seen[kind] = since_s, passed, held_back + 1
            return False
        if held_back:
            record.held_back = held_back
        if len(self._seen) > 1000:  # texts that somebody made by hand: each is a kind of its own
            self._seen.clear()
        self._seen[kind] = since_s, passed + 1, 0
        return True


class _Handler(logging.StreamHandler[TextIO]):
    """To what is stderr at the moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _more(record: logging.LogRecord) -> str:
    held_back = getattr(record, "held_back", 0)
    return f" (and {held_back} like it before)" if held_back else ""
