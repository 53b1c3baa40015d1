"""`chasqui retention`: how many events a queue keeps, and which readers make it keep more."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from chasqui.cli.known import must_exist, tell, tell_if_new
from chasqui.cli.options import AsJson, QueueName, RedisUrl
from chasqui.cli.output import show, show_all
from chasqui.cli.run import on_queue
from chasqui.managing.retention import Retention
from chasqui.queue import Queue

_COLUMNS = ("reader", "behind", "behind ms", "lost", "position", "hold", "alive ms")


def _number_or_default(text: str) -> int:
    """The number of events; 0 for `default`."""
    if text == "default":
        return 0
    if not text.isascii() or not text.isdigit() or not int(text):
        raise typer.BadParameter(f"{text!r} is not a number of events: write 1000000, or default")
    return int(text)


def retention(
    queue: QueueName,
    keep: Annotated[
        int | None,
        typer.Option(
            parser=_number_or_default,
            metavar="N",
            help="Keep about N events from now on, or `default`, which is 100,000.",
        ),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(metavar="READER", help="Forget a reader; may be repeated."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="The history of finished jobs instead of events.")
    ] = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show how many events a queue keeps, and for which readers; or change that.

    While a reader, such as an archive, is alive, the queue keeps the events that it has
    not read, up to a number of its own. A reader that has ended is listed for 7 days.

    Example: chasqui retention emails --keep 1000000
    """

    async def change_and_look(it: Queue) -> tuple[list[str], Retention]:
        set_max_len, forget_reader, look = (
            (it.set_history_max_len, it.forget_history_reader, it.get_history_retention)
            if history
            else (it.set_events_max_len, it.forget_events_reader, it.get_events_retention)
        )
        if keep is not None:
            await set_max_len(keep or None)
        unknown = [one for one in forget or () if not await forget_reader(one)]
        return unknown, await look()

    if keep is None:
        must_exist(queue, redis_url, as_json=as_json)
    else:
        tell_if_new(queue, redis_url)
    unknown, found = on_queue(queue, redis_url, change_and_look)
    _print(queue, found, "finished jobs" if history else "events", as_json)
    for one in unknown:
        tell(f"queue {queue} has no reader {one}")
    if unknown:
        raise typer.Exit(1)


def _print(queue: str, found: Retention, what: str, as_json: bool) -> None:
    if as_json:
        show({"queue": queue, **asdict(found)}, as_json=True)
        return
    show({what: found.length, f"{what} kept": found.max_len}, as_json=False)
    rows: list[tuple[Any, ...]] = [
        (one.name, one.lag, one.lag_ms, one.lost, one.position, one.hold, one.alive_ms)
        for one in found.readers
    ]
    show_all(_COLUMNS, rows, as_json=False, nothing="no readers", spare=("position", "hold"))
