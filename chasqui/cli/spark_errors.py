"""Spark's errors as one sentence each. Spark itself prints pages: plans and two stack traces."""

import logging
import re
import subprocess
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

from chasqui.errors import ChasquiError
from chasqui.model.words import meant

_TRACEBACK: Final = "Traceback (most recent call last):"
#: An error condition of Spark, such as [UNRESOLVED_COLUMN.WITH_SUGGESTION], before its text.
_CONDITION: Final = re.compile(r"\[[A-Z][A-Z0-9_.]+\] ")
#: Why a task failed for the last time, which failed the job.
_LAST_FAILURE: Final = re.compile(r"most recent failure: .*?\(TID \d+\) \([^)]*\): (.*)")
_JAVA_CLASS: Final = re.compile(r"^[\w.$]+\.[\w$]*(?:Exception|Error)\b:? ?")
#: What follows the sentence of an error: the SQL state, plans, stack frames.
_BEHIND: Final = re.compile(r"\s*SQLSTATE: |\n\s*at |\n'|\n\+-|\n\n|\nDriver stacktrace")
#: Loggers of PySpark for errors that it also raises.
_LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_SQL: Final = re.compile(r"^== SQL ==\n(.*?)\n-*\^", re.MULTILINE | re.DOTALL)

#: Spark's words, and ours.
_PLAIN: Final = (
    (re.compile(r"^Path does not exist: (?:file:)?(\S+?)\.?$"), r"there is nothing at \1"),
    (
        re.compile(r"^Path (?:file:)?(\S+) already exists\..*"),
        r"\1 is there already: name a place that is new",
    ),
    (re.compile(r"^Unable to infer schema for (\w+)\..*"), r"there are no \1 files at that place"),
    (
        re.compile(r"^(?:Mkdirs failed to create|mkdir of) (?:file:)?(\S+?)(?:/_\S*)?( .*|$)"),
        r"no folder can be made at \1",
    ),
)
_NO_COLUMN: Final = re.compile(
    r"name `(?P<name>[^`]+)` cannot be resolved\.(?: Did you mean .*?\[(?P<near>[^\]]*)\])?"
)


def hush() -> None:
    """Keep PySpark from logging the errors that it raises, py4j from logging an interrupt, and both
    from logging that the JVM has ended.
    """
    from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(_is_not_py4j)  # it logs under other names too
    for name in _LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    for server in (AccumulatorTCPServer, AccumulatorUnixServer):
        server.handle_error = _ignore  # our own calls raise it anyway
    warnings.filterwarnings("ignore", r"\s*Unable to cleanly shutdown Spark JVM", RuntimeWarning)


def _ignore(*_: object) -> None:
    pass


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


def in_words(error: BaseException) -> Exception | None:
    """The error to raise in place of one of Spark's: ValueError for a wrong request, else
    ChasquiError. None if it is not an error of Spark.
    """
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError):
        return ChasquiError(
            "Spark's driver ended while it was at work: run it again with "
            "--conf spark.log.level=WARN to see why"
        )
    if not isinstance(error, (PySparkException, Py4JJavaError)):
        return None
    return read(str(error))


def read(text: str) -> Exception:
    """The error for the text of one of Spark's."""
    if _TRACEBACK in text:
        return _of_python(text.rpartition(_TRACEBACK)[2])
    if found := _SQL.search(text):
        return ValueError(f"{_sentence(text).removesuffix('.')}: {found[1]}")
    sentence = _sentence(text)
    if found := _NO_COLUMN.search(sentence):
        near = re.findall(r"`([^`]+)`", found["near"] or "")
        return ValueError(f"there is no column {found['name']}{meant(near[:3])}")
    for pattern, words in _PLAIN:
        sentence = pattern.sub(words, sentence)
    return ChasquiError(sentence)


def _of_python(frames: str) -> Exception:
    """The error for the last line of a traceback: the class and its message."""
    lines = frames.splitlines()
    first = next((i for i, line in enumerate(lines) if line and not line[0].isspace()), None)
    if first is None:
        return ChasquiError("a Python worker of Spark failed, and its trace was cut off")
    kind, _, message = _cut("\n".join(lines[first:])).partition(": ")
    if not kind.startswith("chasqui."):  # without its name, `KeyError: 'x'` says nothing
        return ChasquiError(f"{kind}: {message}" if message else kind)
    return (ValueError if kind.endswith(".OptionError") else ChasquiError)(message or kind)


def _sentence(text: str) -> str:
    if found := _LAST_FAILURE.search(text):
        text = found[1]
    elif "\nCaused by: " in text:
        text = text.rpartition("\nCaused by: ")[2]
    elif text.startswith("An error occurred while calling "):
        text = text.partition("\n: ")[2]
    text = _cut(_CONDITION.split(text)[-1])
    return _JAVA_CLASS.sub("", text) or text


def _cut(text: str) -> str:
    return " ".join(_BEHIND.split(text.strip())[0].split())


# ── A session that does not start ──────────────────────────────────────────────────────────────


@contextmanager
def explained_start(*, is_quiet: bool) -> Iterator[None]:
    """Wraps the start of a session: its failure becomes one sentence.

    If quiet, the JVM writes to a file instead of our stderr: it prints several lines of greeting,
    and there it says why it does not start.
    """
    with tempfile.TemporaryFile() as log:
        try:
            with _one_jvm(log if is_quiet else None):
                yield
        except Exception as error:
            log.seek(0)
            explained = _why_no_start(error, log.read().decode(errors="replace"))
            if explained is None:
                raise
            if not is_quiet:
                traceback.print_exception(error)
            raise explained from None


@contextmanager
def _one_jvm(stderr: IO[bytes] | None) -> Iterator[None]:
    """Wraps the start of a JVM, and kills the JVM if the start is interrupted.

    PySpark would forget it, and the JVM would wait for ever, because the folder for its port is
    gone.
    """
    from pyspark import SparkContext, java_gateway

    jvms: list[Any] = []

    def launch(*arguments: Any, **options: Any) -> Any:
        jvms.append(subprocess.Popen(*arguments, **{**options, "stderr": stderr}))
        return jvms[-1]

    java_gateway.Popen = launch
    try:
        yield
    except BaseException:
        if SparkContext._gateway is None:
            for jvm in jvms:
                jvm.kill()
                jvm.wait()
        raise
    finally:
        java_gateway.Popen = subprocess.Popen


def _why_no_start(error: Exception, log: str) -> Exception | None:
    explained = in_words(error)
    if "JAVA_GATEWAY_EXITED" in str(error):
        # The launcher says why in the first line after the greeting, spark-submit by an exception.
        lines = [line for line in log.splitlines() if not line.startswith(("WARNING:", "Using "))]
        raised = [line for line in lines if line.startswith("Exception in thread")]
        why = " ".join((raised or lines)[:1]) or "its log says nothing"
        explained = ChasquiError(re.sub(r'^Exception in thread "main" [\w.$]+: ', "", why))
    return None if explained is None else type(explained)(f"Spark did not start: {explained}")
