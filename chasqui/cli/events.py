"""`chasqui events` and `tail`: print what happens to jobs, one line for each event.

A line has chasquimq's form: `<time> <event id> <event> id=<job> <name>=<value>…`, fields sorted.
"""

import os
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from chasqui.cli.known import must_exist, tell, tell_if_new
from chasqui.cli.options import AsJson, QueueName, RedisUrl
from chasqui.cli.output import at_ms, cell, escaped, print_json_line
from chasqui.cli.run import connection_to, until_signal
from chasqui.events import kinds
from chasqui.events.log import GAP, EventLog, QueueEvent, parse_event
from chasqui.events.stream import QueueEvents
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect

_PAGE = 1000
_YEAR_9999_MS = 253_370_764_800_000
#: Longer values are cut, as in chasquimq.
_VALUE_CHARS = 80
_COLOURS = {"completed": 32, "failed": 33, "retry-scheduled": 33, "dlq": 31, GAP: 31, "active": 36}
_DONE, _WAITING = kinds.COMPLETED.decode(), kinds.WAITING.decode()
#: After one of these the job has ended.
_ENDS = (_DONE, kinds.DLQ.decode())


def events(
    queue: QueueName,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="ID",
            help="Start after this event. 0: at the oldest; $: from now on.",
        ),
    ] = "$",
    follow: Annotated[
        bool, typer.Option(help="Wait for more. Without it: end with the last event.")
    ] = True,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Only for jobs of this name; may be repeated."),
    ] = None,
    wanted: Annotated[
        list[str] | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            help="Only this event: completed, failed, dlq, …; may be repeated.",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print a queue's events as they happen, until interrupted.

    A line `gap` stands for events that were trimmed before they could be read.

    Example: chasqui events emails --from 0 --event failed --event dlq
    """
    if not follow and start == "$":
        start = "0"  # nothing is there already that comes from now on
    EventLog(Keys(queue), start, block_ms=0, count=_PAGE)  # checks that `start` is an id
    wants = _Wants(names=names, events=wanted)
    if follow:
        tell_if_new(queue, redis_url)
    else:
        must_exist(queue, redis_url, as_json=as_json)

    async def work() -> None:
        if not follow:
            async for event in _past(queue, redis_url, start):
                if wants.takes(event):
                    _print(event, as_json)
            return
        async with QueueEvents(
            queue, redis_url=redis_url, last_event_id=start, count=_PAGE, **wants.filters
        ) as reader:
            async for event in reader:
                _print(event, as_json)

    until_signal(work)


def tail(
    queue: QueueName,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print the events of one job, past and coming, until it is completed or dead.

    If the job has no events it says so on stderr, and waits for the first.

    Example: chasqui tail emails 01JH8ZT4Q5Y0V0Y9M5S1M3E7WX
    """
    tell_if_new(queue, redis_url)
    wants = _Wants(job_ids=[job_id])

    async def work() -> None:
        last_id, last = "0", ""
        async for event in _past(queue, redis_url, last_id):
            last_id = event.id
            if wants.takes(event):
                _print(event, as_json)
                # Another process writes `waiting`, maybe only after the job was completed.
                if not (last == _DONE and event.name == _WAITING):
                    last = event.name
        if last in _ENDS:
            return
        if not last:
            tell(
                f"job {job_id} has no events: waiting for the first "
                f"(chasqui job {queue} {job_id} says whether there is such a job)"
            )
        async with QueueEvents(
            queue, redis_url=redis_url, last_event_id=last_id, count=_PAGE, **wants.filters
        ) as reader:
            async for event in reader:
                _print(event, as_json)
                if event.name in _ENDS:
                    return

    until_signal(work)


class _Wants:
    """Which events to print; a filter that is None lets all through."""

    def __init__(self, **filters: list[str] | None) -> None:
        self.filters: dict[str, Any] = {name: some for name, some in filters.items() if some}

    def takes(self, event: QueueEvent) -> bool:
        facts = {"events": event.name, "names": event.job_name, "job_ids": event.job_id}
        return all(facts[name] in some for name, some in self.filters.items())


async def _past(queue: str, redis_url: str | None, start: str) -> AsyncIterator[QueueEvent]:
    """The events after `start` that the stream has now, read page by page."""
    key = Keys(queue).events
    async with connection_to(redis_url, queue=queue) as connection:
        while True:
            command = ("XRANGE", key, f"({start}", "+", "COUNT", _PAGE)
            page = await connection.execute(*command, effect=Effect.READ)
            for entry_id, fields in page:
                yield parse_event(entry_id, fields)
            if len(page) < _PAGE:
                return
            start = page[-1][0].decode()


def _print(event: QueueEvent, as_json: bool) -> None:
    """Print an event and flush it, as a reader may be waiting for it."""
    if as_json:
        known = {
            "id": event.id,
            "event": event.name,
            "job_id": event.job_id,
            "name": event.job_name,
        }
        print_json_line({**known, **event.fields})
        return
    fields = dict(event.fields)
    if event.job_name:
        fields["n"] = event.job_name
    ts = fields.pop("ts", None)
    when = cell(at_ms(ts)) if isinstance(ts, int) and 0 <= ts < _YEAR_9999_MS else "-"
    texts = [f"id={_short(event.job_id or '-')}"]
    texts += [f"{name}={_short(str(value))}" for name, value in sorted(fields.items())]
    name = _coloured(escaped(event.name or "(unknown)"), event.name)
    print(when, event.id or "-", name, *map(escaped, texts), flush=True)


def _coloured(text: str, kind: str) -> str:
    colour = _COLOURS.get(kind)
    if colour is None or "NO_COLOR" in os.environ or not sys.stdout.isatty():
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def _short(value: str) -> str:
    return value if len(value) <= _VALUE_CHARS else value[:_VALUE_CHARS] + "..."
