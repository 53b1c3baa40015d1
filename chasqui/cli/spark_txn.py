"""`chasqui spark txn`: exactly-once writes that were recorded, and what became of them."""

from typing import Annotated, TypeAlias

import typer

from chasqui.cli.options import AsJson, RedisUrl, Yes
from chasqui.cli.output import at_ms, show_all
from chasqui.cli.spark_run import on_queue, say
from chasqui.words import count

txn_app = typer.Typer(
    help="Exactly-once writes that were recorded.", no_args_is_help=True, rich_markup_mode=None
)

OneQueue: TypeAlias = Annotated[str, typer.Option("--queue", "-q", help="The queue.")]
AppId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="The write, as listed.")]


@txn_app.command("list")
def txn_list(queue: OneQueue, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """List exactly-once writes into a queue, the unfinished ones with what they still hold.

    Example: chasqui spark txn list --queue orders
    """
    from chasqui.spark import txn

    with on_queue(queue, redis_url) as (connection, keys):
        records = connection.run(txn.list_records(keys))
    rows = [
        (one.app_id, one.epoch, one.state, at_ms(one.at_s * 1000), one.jobs, one.left)
        for one in records
    ]
    columns = ("id", "epoch", "state", "recorded", "jobs", "left")
    show_all(columns, rows, as_json=as_json, nothing="no writes")


@txn_app.command("resume")
def txn_resume(
    queue: OneQueue, app_id: AppId, redis_url: RedisUrl = None, as_json: AsJson = False
) -> None:
    """Publish what an interrupted write had recorded.

    Example: chasqui spark txn resume --queue orders orders-2026-01-31
    """
    from chasqui.spark.txn import Transaction

    with on_queue(queue, redis_url) as (connection, keys):
        moved = Transaction(connection, keys, app_id, max_backlog=2**53).resume()
    say({"published": moved}, as_json, f"published {count(moved, 'job')}")


@txn_app.command("discard")
def txn_discard(
    queue: OneQueue,
    app_id: AppId,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Forget a write and drop what it has staged; what it has published stays.

    Example: chasqui spark txn discard --queue orders orders-2026-01-31 --yes
    """
    from chasqui.spark import txn

    with on_queue(queue, redis_url) as (connection, keys):
        record = connection.run(txn.read_record(keys, app_id))
        if record is None:
            say({"dropped": 0, "selected": 0}, as_json, "not found")
            raise typer.Exit(1)
        if yes:
            txn.Transaction(connection, keys, app_id, max_backlog=1).discard()
    left = count(record.left, "job")
    facts = {"dropped": record.left if yes else 0, "selected": record.left}
    say(facts, as_json, f"dropped {left}" if yes else f"would drop {left}; add --yes to do it")
