"""`chasqui repeatable`: jobs that fire again and again."""

import contextlib
import heapq
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from chasqui.cli.known import must_exist, tell
from chasqui.cli.options import (
    AsJson,
    Attempts,
    Backoff,
    QueueName,
    RedisUrl,
    duration_ms,
    json_value,
)
from chasqui.cli.output import at_ms, show, show_all
from chasqui.cli.run import on_queue, on_server
from chasqui.model.job import MissedFiresPolicy, RepeatableMeta, RepeatPattern
from chasqui.model.keys import FIRED, SPEC, Keys
from chasqui.queue import Queue
from chasqui.timed.spec import RepeatSpec, RepeatSpecError
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect, Plan, commands
from chasqui.model.words import meant, near

app = typer.Typer(
    help="Jobs that fire again and again.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

#: The most keys among which one that is near is looked for.
_LOOKED_THROUGH = 1000
_COLUMNS = ("key", "job name", "pattern", "next fire", "limit", "missed fires")


@app.command("list")
def list_(
    queue: QueueName,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The most to show.")] = 100,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List repeatable jobs, soonest fire first.

    Example: chasqui repeatable list emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    listed = on_queue(queue, redis_url, lambda it: it.get_repeatable_jobs(limit))
    rows = [_row(meta, as_json) for meta in listed]
    show_all(_COLUMNS, rows, as_json=as_json, nothing="no repeatable jobs")


@app.command()
def add(
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which handler runs it.")],
    data: Annotated[str, typer.Argument(metavar="JSON", help="The jobs' data.")] = "null",
    cron: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="When: 5 fields, or 6 with leading seconds."),
    ] = None,
    tz: Annotated[
        str | None,
        typer.Option(
            metavar="ZONE", help="The time zone of --cron: Europe/Madrid, +02:00. Default UTC."
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(parser=duration_ms, metavar="TIME", help="Or an interval: 500ms, 10s, 5m."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Its key; adding the same key again replaces it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The most fires.")] = None,
    missed: Annotated[
        str,
        typer.Option(
            metavar="skip|fire-once|fire-all:N",
            help="What becomes of fires while nothing was running.",
        ),
    ] = "skip",
    attempts: Attempts = None,
    backoff: Backoff = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add a repeatable job, or replace the one of the same key.

    Example: chasqui repeatable add emails digest '{"to": "ada"}' --cron '0 8 * * *'
    """
    pattern = _pattern(cron, tz, every)
    job = on_queue(
        queue,
        redis_url,
        lambda it: it.upsert_repeatable_job(
            name,
            json_value(data),
            repeat=pattern,
            limit=limit,
            attempts=attempts,
            backoff=backoff,
            key=key,
            missed_fires=_policy(missed),
        ),
    )
    show({"key": job.id}, as_json=as_json)


@app.command()
def remove(
    queue: QueueName,
    key: Annotated[str, typer.Argument(metavar="KEY", help="As `list` shows it.")],
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove a repeatable job.

    Exit code 1 if there is none of that key.

    Example: chasqui repeatable remove emails 'digest::cron:0 8 * * *:UTC'
    """
    must_exist(queue, redis_url, as_json=as_json)

    async def deed(it: Queue) -> list[str] | None:
        """None if it was there, else the keys that are near."""
        if await it.remove_repeatable_by_key(key):
            return None
        return near(key, [meta.key for meta in await it.get_repeatable_jobs(_LOOKED_THROUGH)])

    others = on_queue(queue, redis_url, deed)
    if as_json:
        told = {"removed": True} if others is None else {"removed": False, "near": others}
        show({"key": key, **told}, as_json=True)
    elif others is None:
        print("removed")
    if others is not None:
        tell(f"queue {queue} has no repeatable job {key!r}{meant([repr(one) for one in others])}")
        raise typer.Exit(1)


@app.command("next")
def next_(
    queue: QueueName,
    fires: Annotated[int, typer.Argument(metavar="N", min=1, help="How many.")] = 10,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only of this one.")] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the next fires of all repeatable jobs, soonest first.

    As they are planned now: what is paused or not running is not taken into account.

    Example: chasqui repeatable next emails 5
    """
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)
    planned = on_server(redis_url, lambda it: it.run(_planned(keys)), queue=queue)
    upcoming = heapq.merge(
        *(
            _fires(spec, next_ms, fired)
            for spec, next_ms, fired in planned
            if key in (None, spec.key)
        )
    )
    rows = [
        (at_ms(fire_ms), job_name, spec_key)
        for fire_ms, spec_key, job_name in itertools.islice(upcoming, fires)
    ]
    show_all(("fire", "job name", "key"), rows, as_json=as_json, nothing="no fires to come")


def _planned(keys: Keys) -> Plan[list[tuple[RepeatSpec, int, int]]]:
    """Each spec with its next fire, and how often it has fired. What cannot be read never fires."""
    reply = yield commands(("ZRANGE", keys.repeat, 0, -1, "WITHSCORES"), effect=Effect.READ)
    found = []
    for member, next_ms in scored(reply):
        name = keys.repeat_spec(member.decode(errors="replace"))
        encoded, fired = yield commands(
            ("HGET", name, SPEC), ("HGET", name, FIRED), effect=Effect.READ
        )
        if encoded is not None:
            with contextlib.suppress(RepeatSpecError):
                found.append((RepeatSpec.decode(encoded), next_ms, int(fired or 0)))
    return found


def _fires(spec: RepeatSpec, next_ms: int | None, fired: int) -> Iterator[tuple[int, str, str]]:
    """The fires to come of one spec: when, its key, the name of the job."""
    while next_ms is not None and (not spec.limit or fired < spec.limit):
        yield next_ms, spec.key, spec.job_name
        fired += 1
        try:
            next_ms = spec.next_fire_ms(next_ms)
        except ValueError:  # an expression that only its writer understands
            return


def _pattern(cron: str | None, tz: str | None, every: int | None) -> RepeatPattern:
    if (cron is None) == (every is None):
        raise ValueError("say when it fires: either --cron or --every")
    if every is not None:
        if tz is not None:
            raise ValueError("--tz is for --cron: an interval has no time zone")
        return RepeatPattern.every(every)
    assert cron is not None
    return RepeatPattern.cron(cron, tz=tz)


def _policy(text: str) -> MissedFiresPolicy:
    kind, _, most = text.partition(":")
    if kind == "fire-all" and not (most.isascii() and most.isdigit()):
        raise ValueError("--missed fire-all needs the most fires to make up for: fire-all:10")
    return MissedFiresPolicy(kind, int(most) if most else None)


def _row(meta: RepeatableMeta, as_json: bool) -> tuple[Any, ...]:
    pattern, missed = meta.pattern, meta.missed_fires
    if as_json:
        when: Any = pattern.to_dict()
        policy: Any = None if missed is None else missed.to_dict()
    else:
        when = (
            f"every {pattern.interval_ms} ms"
            if pattern.kind == "every"
            else f"cron {pattern.expression} ({pattern.tz or 'UTC'})"
        )
        policy = "skip" if missed is None else missed.kind
    return meta.key, meta.job_name, when, at_ms(meta.next_fire_ms), meta.limit, policy
