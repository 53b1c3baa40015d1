"""`chasqui repeatable`: jobs that fire again and again, by a cron expression or an interval."""

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
    Limit,
    QueueName,
    RedisUrl,
    duration,
    group,
    json_value,
    number,
)
from chasqui.cli.output import at_ms, say, show, show_all
from chasqui.cli.run import on_queue, on_server
from chasqui.model.job import MissedFiresPolicy, RepeatableMeta, RepeatPattern
from chasqui.model.keys import FIRED, SPEC, Keys
from chasqui.model.words import meant, near
from chasqui.queue import Queue
from chasqui.timed.repeatables import scored
from chasqui.timed.spec import RepeatSpec, RepeatSpecError
from chasqui.transport.request import Effect, Plan, commands

app = group("Jobs that fire again and again.")

#: A mistyped key is compared with at most this many.
_COMPARED = 1000
_COLUMNS = ("key", "job name", "pattern", "next fire", "limit", "missed fires")


@app.command("list")
def list_(
    queue: QueueName, limit: Limit = 100, redis_url: RedisUrl = None, as_json: AsJson = False
) -> None:
    """List repeatable jobs, by their next fire time.

    Example: chasqui repeatable list emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    listed = on_queue(queue, redis_url, lambda it: it.get_repeatable_jobs(limit))
    rows = [_row(meta, as_json) for meta in listed]
    show_all(_COLUMNS, rows, as_json=as_json, nothing="no repeatable jobs")


@app.command()
def add(
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The handler to run.")],
    data: Annotated[str, typer.Argument(metavar="JSON", help="The data of every fire.")] = "null",
    cron: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="When: 5 fields, or 6 that begin with seconds."),
    ] = None,
    tz: Annotated[
        str | None,
        typer.Option(
            metavar="ZONE", help="The time zone of --cron: Europe/Madrid, +02:00. Default: UTC."
        ),
    ] = None,
    every: Annotated[int | None, duration("Or an interval: 500ms, 10s, 5m.")] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Its key. Adding the same key again replaces it."),
    ] = None,
    limit: Annotated[int | None, number("N", "Fire at most N times.")] = None,
    missed: Annotated[
        str,
        typer.Option(
            metavar="skip|fire-once|fire-all:N",
            help="What to do about fire times that passed while no scheduler ran.",
        ),
    ] = "skip",
    attempts: Attempts = None,
    backoff: Backoff = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Add a repeatable job, or replace the one with the same key.

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

    Exit code 1 if there is none with that key.

    Example: chasqui repeatable remove emails 'digest::cron:0 8 * * *:UTC'
    """
    must_exist(queue, redis_url, as_json=as_json)

    async def remove_or_compare(it: Queue) -> list[str] | None:
        """None if it was removed, else the keys that are spelt like it."""
        if await it.remove_repeatable_by_key(key):
            return None
        return near(key, [meta.key for meta in await it.get_repeatable_jobs(_COMPARED)])

    others = on_queue(queue, redis_url, remove_or_compare)
    if others is None:
        say("removed", {"key": key, "removed": True}, as_json=as_json)
    else:
        if as_json:
            show({"key": key, "removed": False, "near": others}, as_json=True)
        tell(f"queue {queue} has no repeatable job {key!r}{meant([repr(one) for one in others])}")
        raise typer.Exit(1)


@app.command("next")
def next_(
    queue: QueueName,
    fires: Annotated[int, typer.Argument(metavar="N", min=1, help="How many fires.")] = 10,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only of this one.")] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the next fires of all repeatable jobs, soonest first.

    These are the planned times, whether or not a scheduler is running to fire them.

    Example: chasqui repeatable next emails 5
    """
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)
    planned = on_server(redis_url, lambda it: it.run(_planned(keys)), queue=queue)
    upcoming = heapq.merge(*(_fires(*one) for one in planned if key in (None, one[0].key)))
    soonest = itertools.islice(upcoming, fires)
    rows = [(at_ms(fire_ms), job_name, spec_key) for fire_ms, spec_key, job_name in soonest]
    show_all(("fire", "job name", "key"), rows, as_json=as_json, nothing="no fires to come")


def _planned(keys: Keys) -> Plan[list[tuple[RepeatSpec, int, int]]]:
    """Each spec with its next fire time, and how often it has fired. A spec that cannot be read
    never fires."""
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
    """The coming fires of one spec: when, its key, the name of the job."""
    while next_ms is not None and (not spec.limit or fired < spec.limit):
        yield next_ms, spec.key, spec.job_name
        fired += 1
        try:
            next_ms = spec.next_fire_ms(next_ms)
        except ValueError:  # another program wrote an expression that we cannot read
            return


def _pattern(cron: str | None, tz: str | None, every: int | None) -> RepeatPattern:
    if (cron is None) == (every is None):
        raise ValueError("say when it fires: give either --cron or --every")
    if every is not None:
        if tz is not None:
            raise ValueError("--tz is for --cron: an interval has no time zone")
        return RepeatPattern.every(every)
    assert cron is not None
    return RepeatPattern.cron(cron, tz=tz)


def _policy(text: str) -> MissedFiresPolicy:
    kind, _, most = text.partition(":")
    if kind == "fire-all" and not (most.isascii() and most.isdigit()):
        raise ValueError("--missed fire-all needs the most fires to catch up on: fire-all:10")
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
