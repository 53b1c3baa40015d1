"""What the commands of Spark share: a session, its checks, its progress and its output."""

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from chasqui.cli.known import must_exist
from chasqui.cli.output import show, show_all
from chasqui.cli.spark_errors import explained_start, hush, in_words
from chasqui.cli.spark_files import is_missing
from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.managing import retention
from chasqui.managing.retention import Log
from chasqui.model.config import DEFAULT_URL, Endpoint
from chasqui.model.keys import Keys
from chasqui.model.words import count, meant, near
from chasqui.spark.option_values import queue_names
from chasqui.spark.options import TABLES
from chasqui.spark.sessions import is_connect
from chasqui.transport.blocking import BlockingConnection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

#: The environment variable that carries the server's URL to Spark's processes. Executors get it as
#: a setting; Spark hides settings with SECRET in their name on its pages and in its logs.
URL_VARIABLE: Final = "CHASQUI_SPARK_SECRET_URL"
#: How often to print progress if the line cannot be rewritten.
_SAY_EVERY_S: Final = 10.0

Master: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Where Spark runs: local[4], spark://host:7077, yarn, sc://host"
    ),
]
Conf: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A setting of Spark; may be repeated."),
]


class SparkRun:
    """A session for one command, and the options that name the server.

    A URL with a password goes through the environment, because options end up in plans. A session
    that is running already is used, and left running. An error of Spark in the block becomes one
    sentence; set `spark.log.level` to see Spark's own log with its stack traces.
    """

    def __init__(
        self,
        master: str | None,
        conf: list[str] | None,
        redis_url: str | None,
        *,
        reads: str | None = None,
        source: str | None = None,
        archive: str | None = None,
        as_json: bool = False,
    ) -> None:
        """`reads` names queues that must exist; `source` and `archive` are the paths of a data set
        and of an archive. They are checked before Spark starts, as far as possible."""
        self.server: dict[str, Any] = server_options(redis_url)
        self._redis_url = redis_url
        self._reads = [] if reads is None else split(reads)
        self._source, self._archive = source, archive
        self._as_json = as_json
        self._master = master
        self._conf = dict(_setting(one) for one in conf or ())
        self._is_quiet = "spark.log.level" not in self._conf
        self._signal: int | None = None
        if is_connect(master):
            return
        self._conf.setdefault("spark.log.level", "OFF")
        if "urlEnv" in self.server:
            self._conf.setdefault(f"spark.executorEnv.{URL_VARIABLE}", os.environ[URL_VARIABLE])

    def __enter__(self) -> "SparkRun":
        from chasqui.spark.sessions import check_packages, find_java, running_session, session

        check_packages()
        self._is_own = running_session() is None
        if self._is_own and not is_connect(self._master):
            find_java()
        self._check_places()
        for queue in self._reads:
            must_exist(queue, self._redis_url, as_json=self._as_json)
        if self._is_own and sys.stderr.isatty():
            print("starting Spark, which takes some seconds …", file=sys.stderr)
        if self._is_quiet:
            hush()
        with explained_start(is_quiet=self._is_quiet and self._is_own):
            self.session: SparkSession = session(self._master, conf=self._conf)
        if self._is_own:
            # Spark's own handler talks to the JVM, perhaps in the middle of another call.
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _check_places(self) -> None:
        if is_connect(self._master):  # its files are on another machine
            return
        if self._source is not None and is_missing(self._source, self._conf):
            raise ChasquiError(f"there is nothing at {os.path.abspath(self._source)}")
        if self._archive is not None and is_missing(self._archive, self._conf):
            raise _no_archive(self._archive)

    def heed_sigterm(self) -> None:
        """Let SIGTERM raise KeyboardInterrupt in the block, as SIGINT does."""
        if self._is_own:
            signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, number: int, _frame: object) -> None:
        self._signal = number
        raise KeyboardInterrupt

    @property
    def interrupted_code(self) -> int:
        """The exit code of a command that was interrupted: 130, or 143 by SIGTERM."""
        return 128 + (self._signal or signal.SIGINT)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        shown: BaseException | None = None if error is None else in_words(error)
        if self._signal is not None and (shown is not None or isinstance(error, KeyboardInterrupt)):
            # While it cleans up, PySpark may raise something else in place of the interrupt.
            is_sigint = self._signal == signal.SIGINT
            shown = KeyboardInterrupt() if is_sigint else typer.Exit(self.interrupted_code)
        if self._is_own:
            try:
                self.session.stop()
            except Exception as failure:  # the driver may be gone, as `error` says
                fields = {"master": self._master}
                logger.debug("the session could not be stopped: %s", failure, extra=fields)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if shown is not None:
            if not self._is_quiet and self._signal is None:
                traceback.print_exception(error)
            raise shown from None

    def tasks(self) -> str:
        """How many tasks of Spark's current work are done."""
        tracker = self.session.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        total = sum(stage.numTasks for stage in stages if stage)
        done = sum(stage.numCompletedTasks for stage in stages if stage)
        return f"{done} of {count(total, 'task')}" if total else ""


class Progress:
    """Shows the progress of a step while its block runs: a line that is rewritten on a terminal, or
    a line every ten seconds."""

    def __init__(self, what: str, how_far: Callable[[], str] = str) -> None:
        self.say(what)
        self._how_far = how_far
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def say(self, what: str) -> None:
        """Name the step that begins now."""
        self._what = what

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        is_screen = sys.stderr.isatty()
        started_s = time.monotonic()
        while not self._over.wait(0.5 if is_screen else _SAY_EVERY_S):
            seconds = time.monotonic() - started_s
            try:
                how_far = self._how_far()
            except Exception as error:  # the step itself will raise it
                logger.debug("no progress is known: %s", error, extra={"step": self._what})
                how_far = ""
            line = " ".join(filter(None, (self._what, "…", how_far, f"({seconds:.0f} s)")))
            if is_screen:
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)


def spark_is_there() -> bool:
    """Whether the extra and a Java are installed."""
    from chasqui.spark.sessions import find_java

    if any(importlib.util.find_spec(name) is None for name in ("pyspark", "pandas", "pyarrow")):
        return False
    try:
        find_java()
    except NotSupportedError:
        return False
    return True


def report_of_run(url: str, queue: str, html: Path) -> str:
    """Roll up and draw the events that a queue holds; where the page is, in a sentence."""
    with SparkRun(f"local[{min(4, os.cpu_count() or 1)}]", None, url) as spark:
        from chasqui.spark import page, report_queue

        report = report_queue(spark.session, queue, **spark.server)
    html.write_text(page(report), encoding="utf-8")
    windows = len(report["timeline"])
    return (
        f"{count(report['events'], 'event')} in {count(windows, 'window')} of "
        f"{report['window_s']} s: {html.resolve()}"
    )


def server_options(redis_url: str | None) -> dict[str, str]:
    """The options that name the server of a command line."""
    url = redis_url or os.environ.get("CHASQUI_URL") or os.environ.get("REDIS_URL") or DEFAULT_URL
    endpoint = Endpoint.parse(url)
    if endpoint.kind == "embedded":
        raise ValueError("Spark's workers need a server that they can reach, not embedded://")
    if endpoint.username is None and endpoint.password is None:
        return {"url": url}
    os.environ[URL_VARIABLE] = url
    return {"urlEnv": URL_VARIABLE}


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--conf takes name=value, got {text!r}")
    return name, value


def split(queues: str) -> tuple[str, ...]:
    """The queues that an option names."""
    try:
        return queue_names(queues)
    except ValueError as error:
        raise ValueError(f"--queue {error}") from None


def check_table(table: str) -> None:
    """Refuse an unknown table."""
    if table not in TABLES:
        others = meant(near(table, TABLES)) or f": it is one of {', '.join(TABLES)}"
        raise ValueError(f"--table: there is no table {table}{others}")


@contextmanager
def events_of(
    spark: SparkRun, queue: str, since: datetime | None, archive_dir: str | None
) -> Iterator["DataFrame"]:
    """Events from the archive, or those that the queues have now; prints which are missing."""
    from pyspark.sql import functions as F

    from chasqui.spark.reporting.html import missing
    from chasqui.spark.reporting.report import events_now

    if archive_dir is not None:
        events = archived(spark, queue, archive_dir)
        yield events if since is None else events.where(F.col("ts") >= F.lit(since))
        return
    with ExitStack() as stack:
        with Progress("reading events", spark.tasks):
            now = events_now(spark.session, queue, since=since, **spark.server)
            events, lacks = stack.enter_context(now)
        for sentence in missing(lacks):
            print(sentence, file=sys.stderr)
        yield events


def archived(spark: SparkRun, queue: str, archive_dir: str) -> "DataFrame":
    """The archived events of these queues; raises if the archive does not have one of them."""
    from pyspark.sql import functions as F

    from chasqui.spark import read_archive

    wanted = split(queue)
    with archive_at(archive_dir):
        events = read_archive(spark.session, archive_dir)
    known = [row[0] for row in events.select("queue").distinct().collect()]
    for name in wanted:
        if name not in known:
            others = meant(near(name, known))
            raise ChasquiError(f"the archive has nothing of queue {name}{others}")
    return events.where(F.col("queue").isin(*wanted))


@contextmanager
def archive_at(place: str) -> Iterator[None]:
    """Wraps the first read of an archive: if there is none, the error names similar paths."""
    from pyspark.errors import AnalysisException

    try:
        yield
    except AnalysisException as error:
        if "[PATH_NOT_FOUND]" not in str(error):
            raise
        raise _no_archive(place) from None


def _no_archive(place: str) -> ChasquiError:
    path = Path(place)
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    others = near(path.name, [one.name for one in beside if (one / "events").is_dir()])
    here = [str(path.with_name(name)) for name in others]
    return ChasquiError(f"there is no archive at {place}{meant(here)}")


def show_table(spark: SparkRun, df: "DataFrame", as_json: bool, nothing: str) -> None:
    with Progress("computing", spark.tasks):
        rows = [tuple(map(_in_utc, row)) for row in df.collect()]
    show_all(df.columns, rows, as_json=as_json, nothing=nothing)


def _in_utc(value: Any) -> Any:
    """PySpark gives times without a zone, in that of this machine."""
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def say(facts: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        show(facts, as_json=True)
    else:
        print(sentence)


class on_queue:
    """A blocking connection and the keys of a queue, for one command."""

    def __init__(self, queue: str, redis_url: str | None) -> None:
        self._keys = Keys(queue)
        self._connection = BlockingConnection(
            Endpoint.parse(redis_url), key=self._keys.stream, client_name="chasqui-cli"
        )

    def __enter__(self) -> tuple[BlockingConnection, Keys]:
        return self._connection, self._keys

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def server_facts(redis_url: str | None) -> str:
    """The server's address, its queues, and how long they keep events."""
    from chasqui.spark.connections import queues_of
    from chasqui.spark.options import Options
    from chasqui.spark.reading.batch import describe

    options = Options.parse({"table": "queues", **server_options(redis_url)}, "r")
    names = queues_of(options)
    spans = []
    for name in names:
        with on_queue(name, redis_url) as (connection, keys):
            row = describe(connection, keys, options.group)
            kept = connection.run(retention.look(Log.events(keys)))
        if row["events_span_ms"]:
            seconds = row["events_span_ms"] / 1000
            spans.append(f"{name} keeps {row['events']:,} events of {seconds:,.0f} s")
        spans += [f"{name} is read by {reader}" for reader in kept.readers]
    kept_text = "; ".join(spans) or "no events yet"
    return f"{options.endpoint()}, {count(len(names), 'queue')}: {kept_text}"
