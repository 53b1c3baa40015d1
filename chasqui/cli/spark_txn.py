"""`chasqui spark txn`: lists, resumes and discards exactly-once writes."""

import uuid
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from chasqui.cli.known import must_exist, tell
from chasqui.cli.options import AsJson, RedisUrl, Yes, group
from chasqui.cli.output import at_ms, show, show_all
from chasqui.cli.queues import find_queues
from chasqui.cli.spark_enqueue import MaxBacklog, OnBacklog, WriteProgress, interrupted
from chasqui.cli.spark_run import Progress, on_queue, say
from chasqui.errors import ChasquiError, NotSupportedError, QueueFullError
from chasqui.model.keys import Keys, check_queue_name
from chasqui.model.words import count, meant, near
from chasqui.transport.blocking import BlockingConnection

if TYPE_CHECKING:
    from chasqui.spark.writing.records import Record, Stage

txn_app = group("Exactly-once writes that were recorded.")

OneQueue: TypeAlias = Annotated[
    str, typer.Option("--queue", "-q", metavar="QUEUE", help="The queue.")
]
AppId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="The write, as listed.")]

_COLUMNS: Final = (
    "queue", "txn", "version", "state", "recorded", "jobs", "left", "bytes", "quiet s"
)  # fmt: skip
#: A write that staged rows within this time counts as running.
_RUNNING_S: Final = 60


@txn_app.command("list")
def txn_list(
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            metavar="QUEUE",
            help="The queue, or several with commas. Default: all.",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List exactly-once writes, the unfinished ones with what they still hold.

    State `publishing`: recorded and not finished; resume it, or run it again.
    State `staged`: a run has staged rows and recorded nothing. It still runs, or it
    was killed: then the rows go when the write is done by another run, when they
    expire, or when you discard them. `quiet s` is how long ago the last ones came.

    Example: chasqui spark txn list --queue orders
    """
    from chasqui.spark.writing import records

    rows: list[tuple[Any, ...]] = []
    for name in _queues(queue, redis_url):
        with on_queue(name, redis_url) as (connection, keys):
            writes = connection.run(records.find_writes(keys))
            if queue is not None and not writes:
                must_exist(name, redis_url, as_json=as_json)
            for app_id in writes:
                record = connection.run(records.read_record(keys, app_id))
                if record is not None:
                    rows.append((name, *_recorded(record)))
                rows += ((name, *one) for one in _staged(_stages(connection, keys, app_id)))
    spare = ("recorded", "bytes") if queue else ("recorded",)
    show_all(_COLUMNS, rows, as_json=as_json, nothing="no writes", spare=spare)


def _queues(queue: str | None, redis_url: str | None) -> list[str]:
    if queue is not None:
        return [check_queue_name(name.strip()) for name in queue.split(",")]
    with on_queue("spark", redis_url) as (connection, _):
        if connection.endpoint.kind == "cluster":
            raise NotSupportedError("a cluster has no one list of its keys: name the queue")
        return sorted(connection.run(find_queues(by_any_key=True)))


def _recorded(record: "Record") -> tuple[Any, ...]:
    at = at_ms(record.at_s * 1000)
    return record.app_id, record.epoch, record.state, at, record.jobs, record.left, None, None


def _stages(connection: BlockingConnection, keys: Keys, app_id: str) -> "list[Stage]":
    from chasqui.spark.writing.records import read_stages

    return connection.run(read_stages(keys, app_id))


def _staged(stages: "list[Stage]") -> list[tuple[Any, ...]]:
    """The unrecorded stages of a write, a row for each of its epochs."""
    by_epoch: dict[int | None, list[Stage]] = {}
    for stage in stages:
        by_epoch.setdefault(stage.epoch, []).append(stage)
    rows = []
    for epoch, of in by_epoch.items():
        jobs, quiet_s = sum(one.jobs for one in of), min(one.quiet_s for one in of)
        sizes = [one.size for one in of if one.size is not None]
        size = sum(sizes) if len(sizes) == len(of) else None
        rows.append((of[0].app_id, epoch, "staged", None, jobs, jobs, size, quiet_s))
    return rows


@txn_app.command("resume")
def txn_resume(
    queue: OneQueue,
    app_id: AppId,
    max_backlog: MaxBacklog = None,
    on_backlog: OnBacklog = "wait",
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Publish what an interrupted write had recorded.

    Example: chasqui spark txn resume --queue orders orders-2026-01-31
    """
    from chasqui.spark.options import Options
    from chasqui.spark.writing.backlog import Backlog
    from chasqui.spark.writing.transaction import Transaction

    given = {"queue": queue, "onBacklog": on_backlog}
    if max_backlog is not None:
        given["maxBacklog"] = str(max_backlog)
    options = Options.parse(given, "w")
    with on_queue(queue, redis_url) as (connection, keys):
        record = _find(connection, keys, app_id, redis_url, as_json)
        progress = WriteProgress(options, redis_url)
        write = Transaction(
            connection, keys, app_id, uuid.uuid4().hex, Backlog.of(options, queue), progress.on_step
        )
        try:
            with Progress("publishing", progress):
                done = write.resume()
        except KeyboardInterrupt:
            interrupted("run the same command again to go on", as_json)
        except QueueFullError as error:
            raise ChasquiError(f"{error}; run the same command again to go on") from error
    if done is not None:
        text = f"published {count(done.added, 'job')}"
        if done.found:
            text += f"; {done.found:,} of {done.added + done.found:,} were published before"
        say({"published": done.added, "found": done.found}, as_json, text)
    elif record is None:
        text = "nothing of it was recorded: run it again, or discard what it has staged"
        say({"published": 0, "found": 0}, as_json, text)
    else:
        text = f"nothing is left to publish: {count(record.jobs, 'job')} were published before"
        say({"published": 0, "found": record.jobs}, as_json, text)


@txn_app.command("discard")
def txn_discard(
    queue: OneQueue,
    app_id: AppId,
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also of a write that seems to be running.")
    ] = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Forget a write and drop what it has staged; what it has published stays.

    A write that staged rows in the last minute still runs, so it is left alone. One
    that is done is forgotten: the same version can be written again.

    Example: chasqui spark txn discard --queue orders orders-2026-01-31 --yes
    """
    from chasqui.spark.writing.transaction import forget

    with on_queue(queue, redis_url) as (connection, keys):
        record = _find(connection, keys, app_id, redis_url, as_json)
        stages = _stages(connection, keys, app_id)
        quiet_s = min((one.quiet_s for one in stages), default=_RUNNING_S)
        if quiet_s < _RUNNING_S and not force:
            raise ChasquiError(
                f"{app_id} staged rows {quiet_s} s ago, so it still runs: wait until it ends, or "
                "add --force, and it will fail"
            )
        if yes:
            connection.call(forget(keys, app_id))
    left = sum(one.jobs for one in stages) + (0 if record is None else record.left)
    facts = {"dropped": left if yes else 0, "selected": left}
    if record is not None and record.state == "done" and not stages:
        text = "forgot" if yes else "would forget"
        text += " that it was written" + ("" if yes else "; add --yes to do it")
    else:
        jobs = count(left, "job")
        text = f"dropped {jobs}" if yes else f"would drop {jobs}; add --yes to do it"
    say(facts, as_json, text)


def _find(
    connection: BlockingConnection, keys: Keys, app_id: str, redis_url: str | None, as_json: bool
) -> "Record | None":
    """The record of a write, None if it is only staged; ends the command if there is neither."""
    from chasqui.spark.writing import records

    record = connection.run(records.read_record(keys, app_id))
    if record is not None or _stages(connection, keys, app_id):
        return record
    writes = connection.run(records.find_writes(keys))
    if not writes:
        must_exist(keys.queue, redis_url, as_json=as_json)
    others = near(app_id, writes)
    if as_json:
        facts = {"queue": keys.queue, "txn": app_id, "found": False, "near": others}
        show(facts, as_json=True)
    tell(f"queue {keys.queue} has no write {app_id}{meant(others)}")
    raise typer.Exit(1)
