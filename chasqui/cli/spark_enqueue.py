"""`chasqui spark enqueue`: adds a data set as jobs, and says in a sentence what it did."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer

from chasqui.cli.known import tell
from chasqui.cli.logs import error_as_json
from chasqui.cli.options import AsJson, RedisUrl
from chasqui.cli.spark_files import HELP, data_set, load
from chasqui.cli.spark_run import Conf, Master, Progress, SparkRun, on_queue, say, server_options
from chasqui.errors import ChasquiError, QueueFullError, UnreachableError
from chasqui.model.words import count
from chasqui.transport.request import Effect

if TYPE_CHECKING:
    from chasqui.spark.options import Options
    from chasqui.spark.writing.transaction import Step
    from chasqui.spark.writing.writers import Enqueued

#: The exit code of --fail-if-written.
WRITTEN: Final = 3

MaxBacklog: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="The most jobs that may wait in the queue; 900000."),
]
OnBacklog: TypeAlias = Annotated[
    str, typer.Option(metavar="wait|fail", help="At --max-backlog: wait for workers, or fail.")
]


# Long because each option of the command is a parameter.
def enqueue(
    source: Annotated[str, typer.Option("--from", metavar="FORMAT:PATH", help=HELP)],
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", metavar="QUEUE", help="The queue, unless a column says."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The name of all jobs, unless a column says.")
    ] = "",
    txn: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Names this write: run again, it is not written again."),
    ] = None,
    txn_version: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="With --txn: its version, rising. Default: 0."),
    ] = None,
    fail_if_written: Annotated[
        bool, typer.Option("--fail-if-written", help="Exit code 3 if it was written before.")
    ] = False,
    delivery: Annotated[
        str, typer.Option(metavar="HOW", help="exactly_once, at_least_once or dedup.")
    ] = "exactly_once",
    max_backlog: MaxBacklog = None,
    on_backlog: OnBacklog = "wait",
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add every row of a data set as a job.

    A write that --txn names is written once. Run again, the command finishes what
    an interrupted run left, or says when it was written and adds nothing: exit
    code 0, for the rows are there; 3 with --fail-if-written.

    Example: chasqui spark enqueue --from parquet:orders/ --queue orders --txn orders-2026-01-31
    """
    kind, path = data_set("--from", source, "parquet:orders/")
    if txn_version is not None and txn is None:
        raise ValueError("--txn-version needs --txn")
    from chasqui.spark.options import Options
    from chasqui.spark.writing.writers import finish_earlier

    given = {
        "queue": queue,
        "jobName": name or None,
        "delivery": delivery,
        "txnAppId": str(uuid.uuid4()) if txn is None else txn,
        "txnVersion": txn_version,
        "maxBacklog": max_backlog,
        "onBacklog": on_backlog,
    }
    texts = {option: str(value) for option, value in given.items() if value is not None}
    options = Options.parse({**server_options(redis_url), **texts}, "w")
    started_s = time.perf_counter()
    with on_queue(queue or "spark", redis_url) as (connection, _):
        connection.connect()  # fail before Spark starts, if the server cannot be reached
    progress = WriteProgress(options, redis_url)
    with _explaining_interrupts(options, txn, redis_url, as_json):
        with progress, Progress("adding rows", progress):
            done = finish_earlier(options, progress.on_step) if txn is not None else None
        if done is None:
            place = None if kind == "iceberg" else path
            with SparkRun(master, conf, redis_url, source=place) as spark:
                from chasqui.spark import enqueue as add

                df = load(spark.session, kind, path)
                started_s = time.perf_counter()
                progress = WriteProgress(options, redis_url, spark)
                with progress, Progress("adding rows", progress):
                    done = add(df, on_progress=progress.on_step, **spark.server, **texts)
    seconds = time.perf_counter() - started_s
    say(_facts(done, seconds), as_json, sentence(done, seconds))
    if done.already and fail_if_written:
        raise typer.Exit(WRITTEN)


# ── Progress ────────────────────────────────────────────────────────────────────────────────────


class WriteProgress:
    """The progress line of a write: first Spark's tasks, then how much is published."""

    def __init__(
        self, options: "Options", redis_url: str | None, spark: SparkRun | None = None
    ) -> None:
        self._spark = spark
        self._step: Step | None = None
        # Without staging it is the tasks that wait for room: only the queue's length shows it.
        is_direct = options.delivery != "exactly_once" and options.queue
        self._queue = on_queue(options.queue[0], redis_url) if is_direct else None
        self._most = options.max_backlog

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._queue is not None:
            self._queue.__exit__(*error)

    def on_step(self, step: "Step") -> None:
        self._step = step

    def __call__(self) -> str:
        from chasqui.spark.writing.backlog import waiting_line

        if (step := self._step) is not None:
            line = f"{step.published:,} of {step.jobs:,} published"
            return line if step.waiting is None else f"{line}; {waiting_line(step.waiting)}"
        line = "" if self._spark is None else self._spark.tasks()
        if self._queue is not None:
            connection, keys = self._queue.__enter__()
            depth = connection.execute("XLEN", keys.stream, effect=Effect.READ)
            if depth >= self._most:
                return f"{line}; {waiting_line(depth)}"
        return line


# ── The outcome ─────────────────────────────────────────────────────────────────────────────────


def sentence(done: "Enqueued", seconds: float) -> str:
    """What a write did, as a sentence."""
    if done.already:
        assert done.written_at is not None
        when = done.written_at.strftime("%Y-%m-%d %H:%M UTC")
        if done.later_version is not None:
            return f"version {done.later_version} was already written on {when}: added 0"
        return f"already written on {when} ({count(done.found, 'row')}): added 0"
    text = f"added {count(done.added, 'row')} in {seconds:.1f} s"
    if done.resumed:
        rows = done.added + done.found
        text = f"resumed: {done.found:,} of {rows:,} were published by another run; {text}"
    elif done.found and done.delivery == "dedup":
        text += f"; {done.found:,} were there already"
    elif done.found:
        text += f"; {done.found:,} were published by another run"
    if done.earlier:
        text += f", and {done.earlier:,} that an earlier version had left"
    return text


def _facts(done: "Enqueued", seconds: float) -> dict[str, Any]:
    return {
        "rows": done.added + done.found,
        "added": done.added,
        "found": done.found,
        "already": done.already,
        "written_at": done.written_at,
        "resumed": done.resumed,
        "earlier": done.earlier,
        "queues": list(done.queues),
        "delivery": done.delivery,
        "txn": done.txn,
        "version": done.version,
        "later_version": done.later_version,
        "seconds": round(seconds, 2),
        "rows_per_s": round(done.added / seconds),
    }


# ── Interrupted writes ──────────────────────────────────────────────────────────────────────────


@contextmanager
def _explaining_interrupts(
    options: "Options", txn: str | None, redis_url: str | None, as_json: bool
) -> Iterator[None]:
    """Add to an error or an interrupt how to go on with the write."""
    try:
        yield
    except KeyboardInterrupt:
        interrupted(how_to_go_on(options, txn, redis_url), as_json)
    except (QueueFullError, UnreachableError) as error:
        raise ChasquiError(f"{error}; {how_to_go_on(options, txn, redis_url)}") from error


def interrupted(how: str, as_json: bool, exit_code: int = 130) -> NoReturn:
    """End an interrupted command, and say how to go on."""
    message = f"interrupted: {how}"
    if as_json:
        typer.echo(error_as_json(message, exit_code=exit_code), err=True)
    else:
        tell(message)
    raise typer.Exit(exit_code)


def how_to_go_on(options: "Options", txn: str | None, redis_url: str | None) -> str:
    """What to do after an interrupted write."""
    again = "run the same command again"
    if options.delivery == "dedup":
        return f"{again}: what is in the queue already is not added again"
    if options.delivery == "at_least_once":
        return "some rows may be in the queue, and a second run would add them once more"
    if not options.queue:
        return again if txn else "chasqui spark txn list shows what is left to be published"
    assert options.txn_app_id is not None
    from chasqui.spark.writing.records import read_record
    from chasqui.spark.writing.transaction import forget

    try:
        with on_queue(options.queue[0], redis_url) as (connection, keys):
            record = connection.run(read_record(keys, options.txn_app_id))
            if record is None and txn is None:  # the name is random, so no other run uses it
                connection.call(forget(keys, options.txn_app_id))
    except ChasquiError:  # the server may be the cause
        return again if txn else "chasqui spark txn list shows what is left to be published"
    if record is None or record.epoch < options.txn_version:
        return f"nothing was added; {again}"
    resume = f"chasqui spark txn resume --queue {options.queue[0]} {options.txn_app_id}"
    if record.state == "done":
        return f"all {count(record.jobs, 'row')} were added before that"
    how = f"{again}, or: {resume}" if txn else f"go on with: {resume}"
    return f"{record.jobs - record.left:,} of {count(record.jobs, 'row')} are in the queue; {how}"
