"""`chasqui spark`: queues as data. Each command calls a function of chasqui.spark."""

import json
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from chasqui.cli.known import tell_if_new
from chasqui.cli.options import AsJson, RedisUrl, Yes, duration_ms, group, moment
from chasqui.cli.output import show_all
from chasqui.cli.spark_archive import Archived, Queries, watch
from chasqui.cli.spark_demo import demo
from chasqui.cli.spark_enqueue import enqueue, interrupted
from chasqui.cli.spark_files import HELP, data_set, save
from chasqui.cli.spark_run import (
    Conf,
    Master,
    Progress,
    SparkRun,
    archive_at,
    archived,
    check_table,
    events_of,
    say,
    server_facts,
    show_table,
    split,
)
from chasqui.cli.spark_txn import txn_app
from chasqui.errors import ChasquiError
from chasqui.model.words import count

app = group("Queues as DataFrames, on Spark. Needs the extra: pip install 'chasqui[spark]'.")
app.command()(demo)
app.add_typer(txn_app, name="txn")

Queues: TypeAlias = Annotated[
    str, typer.Option("--queue", "-q", metavar="QUEUE", help="The queue, or several with commas.")
]
Archive: TypeAlias = Annotated[
    str | None,
    typer.Option("--archive", metavar="DIR", help="Read archived events instead; as archive --to."),
]
Since: TypeAlias = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="WHEN", help="Events since then: 24h (ago), or ISO 8601."),
]
Where: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SQL", help="A condition, such as \"name = 'resize'\".")
]


@app.command()
def doctor(redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Say whether Spark can run here, and whether its workers would find what they need.

    Exit code 1 if it cannot. Starts no Spark.

    Example: chasqui spark doctor
    """
    from chasqui.spark.sessions import check_packages, find_java

    rows: list[tuple[str, str, str]] = []

    def check(what: str, look: Callable[[], str]) -> None:
        try:
            rows.append(("ok", what, look()))
        except (ChasquiError, OSError, ValueError) as error:
            rows.append(("MISSING", what, str(error)))

    def java() -> str:
        found = find_java()
        return f"{found.version} at {found.home} (by {found.origin})"

    def packages() -> str:
        return ", ".join(f"{name} {version}" for name, version in check_packages().items())

    check("java", java)
    check("packages", packages)
    worker = os.environ.get("PYSPARK_PYTHON", sys.executable)
    rows.append(("ok", "workers' Python", worker))
    check("server", lambda: server_facts(redis_url))
    show_all(("verdict", "what", "found"), rows, as_json=as_json, nothing="")
    if any(verdict != "ok" for verdict, _, _ in rows):
        raise typer.Exit(1)


app.command()(enqueue)


# Long because each option of the command is a parameter.
@app.command()
def archive(
    queue: Queues,
    to: Annotated[
        str,
        typer.Option(metavar="DIR", help="A folder; or delta:DIR, or iceberg:CATALOG.NAMESPACE."),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until interrupted.")] = False,
    every: Annotated[
        int | None,
        typer.Option(parser=duration_ms, metavar="TIME", help="With --follow: how often; 10s."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on if events were lost, and count them.")
    ] = False,
    reader: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name it reads by, shown by doctor; its folder."),
    ] = None,
    hold: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="The most events that the stream may have for it."),
    ] = 1_000_000,
    lease: Annotated[
        int | None,
        typer.Option(
            parser=duration_ms, metavar="TIME", help="How long events are held after its end; 60s."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="How far it is; for Iceberg, else inside.")
    ] = None,
    payloads: Annotated[
        bool,
        typer.Option(
            "--payloads", help="Also what finished jobs carried, of workers with history=True."
        ),
    ] = False,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Keep events for good: as Parquet by queue and day, in Delta Lake, or in Iceberg.

    Exit code 1 if events were trimmed before they were archived; --keep-going writes
    down which, in the archive's folder `losses`. While it runs, and for the time of --lease after
    that, events that it has not read are not trimmed. It says how far it is on
    stderr; with --follow --json, as JSON lines. Ctrl+C and SIGTERM end it with the totals.

    Example: chasqui spark archive --queue orders --to lake --follow
    """
    if follow:
        for one in split(queue):
            tell_if_new(one, redis_url)
    reads = None if follow else queue
    with SparkRun(master, conf, redis_url, reads=reads, as_json=as_json) as spark:
        from chasqui.spark import archive as start

        spark.heed_sigterm()
        jobs = Archived("job") if payloads else None
        archived = Archived(beside=jobs)
        options = {**spark.server, "failOnDataLoss": not keep_going}
        options |= {"readerHold": hold, "readerLease": f"{lease or 60_000}ms"}
        if reader is not None:
            options["reader"] = reader
        options |= {"follow_on": follow, "interval_s": (every or 10_000) / 1000}
        options |= {"checkpoint": checkpoint}
        place = spark.session, queue, to
        queries = []
        if jobs is not None:  # first: it fails if no worker writes history
            queries.append(start(*place, table="history", on_batch=jobs.add, **options))
        queries.insert(0, start(*place, on_batch=archived.add, **options))
        is_interrupted = watch(Queries(*queries), archived, as_lines=follow and as_json)
    say(archived.facts(), as_json, str(archived))
    if is_interrupted:
        how = "run the same command again, and it goes on where it stopped"
        interrupted(how, as_json, spark.interrupted_code)
    if archived.lacks_some:
        raise typer.Exit(1)


@app.command()
def compact(
    to: Annotated[str, typer.Argument(metavar="DIR", help="The folder of the archive.")],
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite the finished days of an archive as one file each. No server is asked for that.

    Example: chasqui spark compact lake
    """
    with SparkRun(master, conf, redis_url, archive=to) as spark:
        from chasqui.spark import compact as rewrite

        with Progress("compacting", spark.tasks), archive_at(to):
            days = rewrite(spark.session, to)
    say({"days": days}, as_json, f"days compacted: {days}")


@app.command()
def rollup(
    queue: Queues,
    window: Annotated[
        int | None, typer.Option(parser=duration_ms, metavar="TIME", help="How long each is; 1m.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write Parquet with its sketches instead.")
    ] = None,
    since: Since = None,
    from_archive: Archive = None,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Per queue, name and window: what happened, jobs a second, run and wait percentiles.

    Events that were trimmed before they were read are counted on stderr.

    Example: chasqui spark rollup --queue orders --window 5m --since 2h
    """
    reads = queue if from_archive is None else None
    run = SparkRun(master, conf, redis_url, reads=reads, archive=from_archive, as_json=as_json)
    with run as spark, events_of(spark, queue, since, from_archive) as events:
        from chasqui.spark import rollup as roll
        from chasqui.spark import with_percentiles

        rolled = roll(events, f"{window or 60_000} milliseconds")
        if to is not None:
            with Progress("rolling up", spark.tasks):
                rolled.write.mode("overwrite").parquet(to)
            return
        table = with_percentiles(rolled).orderBy("start", "queue", "name")
        show_table(spark, table.drop("end"), as_json, "no events")


@app.command()
def report(
    queue: Queues,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page here.")] = None,
    since: Since = None,
    from_archive: Archive = None,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Draw what happened as one HTML page that needs nothing else; --json prints its data.

    Example: chasqui spark report --queue orders --since 24h --html report.html
    """
    if html is None and not as_json:
        raise ValueError("say where the page goes with --html FILE, or --json for the data")
    reads = queue if from_archive is None else None
    with SparkRun(
        master, conf, redis_url, reads=reads, archive=from_archive, as_json=as_json
    ) as spark:
        from chasqui.spark import page, report_archive, report_queue

        with Progress("reading events", spark.tasks) as progress:
            given = {"since": since, "on_step": progress.say, **spark.server}
            if from_archive is None:
                data = report_queue(spark.session, queue, **given)
            else:
                archived(spark, queue, from_archive)  # raises if it is not there
                data = report_archive(spark.session, from_archive, queue, **given)
    if html is not None:
        html.write_text(page(data), encoding="utf-8")
    if as_json:
        print(json.dumps(data))
    else:
        print(f"the report over {count(data['events'], 'event')} is in {html}")


@app.command()
def triage(
    queue: Queues,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The most signatures.")] = 20,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Group dead jobs by what their errors have in common.

    Example: chasqui spark triage --queue orders
    """
    with SparkRun(master, conf, redis_url, reads=queue, as_json=as_json) as spark:
        from chasqui.spark import read
        from chasqui.spark import triage as group

        dead = read(spark.session, "dlq", queue, **spark.server)
        show_table(spark, group(dead).limit(limit), as_json, "no dead jobs")


def _signature(text: str) -> str:
    if re.fullmatch("[0-9a-f]{12}", text) is None:
        raise typer.BadParameter(f"{text!r} is no signature: those are twelve hex digits")
    return text


@app.command()
def replay(
    queue: Queues,
    where: Where = None,
    signature: Annotated[
        str | None,
        typer.Option(
            parser=_signature, metavar="HEX", help="Only those that triage or a report shows so."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The most jobs.")] = None,
    rate: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most jobs a second.")
    ] = None,
    yes: Yes = False,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Run dead jobs again, chosen by a condition on the dlq table.

    Without --yes nothing is moved: you see how many would be.

    Example: chasqui spark replay -q orders --where "name='resize' AND reason LIKE 'Timeout%'"
    """
    if not where and signature is None:
        raise ValueError("say which dead jobs with --where or --signature; --where true is all")
    with SparkRun(master, conf, redis_url, reads=queue, as_json=as_json) as spark:
        from chasqui.spark import read, with_signature
        from chasqui.spark import replay as move

        dead = with_signature(read(spark.session, "dlq", queue, **spark.server))
        if where is not None:
            dead = dead.where(where)
        if signature is not None:
            dead = dead.where(f"signature = '{signature}'")
        with Progress("replaying" if yes else "counting", spark.tasks):
            moved = move(dead, dry_run=not yes, limit=limit, per_second=rate, **spark.server)
    facts = {"replayed": moved if yes else 0, "selected": moved}
    jobs = count(moved, "job")
    say(facts, as_json, f"replayed {jobs}" if yes else f"would replay {jobs}; add --yes to do it")


@app.command()
def export(
    queue: Queues,
    to: Annotated[str, typer.Option(metavar="FORMAT:PATH", help=HELP)],
    table: Annotated[
        str,
        typer.Option(
            metavar="TABLE", help="jobs, events, dlq, history, delayed, results or queues."
        ),
    ] = "jobs",
    where: Where = None,
    master: Master = None,
    conf: Conf = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Write a table to files; payloads become JSON text.

    Example: chasqui spark export --queue orders --table dlq --to parquet:dead/
    """
    kind, path = data_set("--to", to, "parquet:dead/")
    check_table(table)
    with SparkRun(master, conf, redis_url, reads=queue, as_json=as_json) as spark:
        from chasqui.spark import read

        shaped = {"payloadFormat": "json"} if table not in ("events", "queues") else {}
        scan = {"scan": True} if table == "results" else {}
        df = read(spark.session, table, queue, **spark.server, **shaped, **scan)
        if where is not None:
            df = df.where(where)
        with Progress("exporting", spark.tasks):
            rows = save(df, kind, path)
    say({"rows": rows}, as_json, f"wrote {count(rows, 'row')} to {path}")
