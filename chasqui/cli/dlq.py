"""`chasqui dlq`: lists dead jobs, replays them, deletes them."""

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeAlias

import typer

from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Limit, QueueName, RedisUrl, Yes, group, moment
from chasqui.cli.output import at_ms, say, show, show_all
from chasqui.cli.run import on_queue, on_server
from chasqui.errors import PayloadError
from chasqui.managing import dlq, state
from chasqui.managing.dead_jobs import EVERYTHING, DeadJob, Selection
from chasqui.model.config import MAX_COUNT
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.model.words import count
from chasqui.producing.operations import QueueOperations
from chasqui.queue import Queue
from chasqui.transport.request import Plan

app = group("Jobs that failed for good: the DLQ, or dead-letter queue.")

#: How many different names or errors `show` lists.
_MOST_COMMON = 10


def _error_holds(text: str) -> Callable[[DeadJob], bool]:
    return lambda job: text in _why(job)


Ids: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="DLQ_ID", help="Only the entry of this DLQ id; may be repeated."),
]
Name: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only jobs of this name.")
]
Reason: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only this reason: retries_exhausted, unrecoverable, …"),
]
Error: TypeAlias = Annotated[
    Any,  # a condition; typer knows no type for that
    typer.Option(
        parser=_error_holds, metavar="TEXT", help="Only if the error or detail contains this text."
    ),
]
Since: TypeAlias = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="WHEN", help="Dead since then: 2h (ago), or ISO 8601."),
]
Until: TypeAlias = Annotated[
    datetime | None, typer.Option(parser=moment, metavar="WHEN", help="Dead by then.")
]


@app.command()
def peek(
    queue: QueueName,
    limit: Limit = 20,
    ids: Ids = None,
    name: Name = None,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """List dead jobs, oldest first, and count them by reason.

    Example: chasqui dlq peek emails --limit 5 --since 2h
    """
    selection = Selection(ids or None, name, reason, since, until, error)
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)

    def look() -> Plan[tuple[list[DeadJob], int]]:
        found = yield from dlq.peek(keys, limit, selection)
        if len(found) < limit or as_json:
            return found, len(found)
        return found, (yield from _matching(keys, partial(dlq.delete, keys), selection))

    found, matching = on_server(redis_url, lambda it: it.run(look()), queue=queue)
    columns = ("dlq id", "dead since", "reason", "name", "job id", "source id", "detail")
    rows = [
        (it.dlq_id, at_ms(it.added_ms), it.reason, it.name, it.job_id, it.source_id, _why(it))
        for it in found
    ]
    # The DLQ id begins with the time, and `show` prints every field.
    spare = ("dead since", "source id")
    show_all(columns, rows, as_json=as_json, nothing="no dead jobs", spare=spare)
    if found and not as_json:
        print()
        _histogram("reason", (job.reason for job in found))
        if matching > len(found):
            print(f"\n{_of_matching(len(found), matching, limit, selection)} shown")


@app.command("show")
def show_(
    queue: QueueName,
    dlq_id: Annotated[
        str | None,
        typer.Argument(metavar="[DLQ_ID]", help="One entry. Without it: all of them, counted."),
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead job in full, or how many there are by reason, name and error.

    Example: chasqui dlq show emails 1767225600000-0
    """
    must_exist(queue, redis_url, as_json=as_json)
    if dlq_id is None:
        _show_counted(queue, redis_url, as_json)
        return
    plan = dlq.peek(Keys(queue), 1, Selection(ids=[dlq_id]))
    found = on_server(redis_url, lambda it: it.run(plan), queue=queue)
    if not found:
        say("not found", {"dlq_id": dlq_id, "found": False}, as_json=as_json)
        raise typer.Exit(1)
    show(_whole(found[0]), as_json=as_json)


@app.command()
def replay(
    queue: QueueName,
    limit: Limit = 100,
    ids: Ids = None,
    name: Name = None,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Run dead jobs again, oldest first, with all their attempts.

    Without --yes this moves nothing and shows how many jobs it would move. An entry whose envelope
    cannot be read stays in the DLQ.

    Example: chasqui dlq replay emails --name digest --since 1d --yes
    """
    selection = Selection(ids or None, name, reason, since, until, error)
    change = partial(dlq.replay, QueueOperations(Keys(queue)))
    _change(queue, redis_url, ("replay", "replayed"), change, limit, selection, yes, as_json)


@app.command()
def delete(
    queue: QueueName,
    limit: Limit = 100,
    ids: Ids = None,
    name: Name = None,
    reason: Reason = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete dead jobs for good, oldest first.

    Without --yes this deletes nothing and shows how many jobs it would delete.

    Example: chasqui dlq delete emails --reason decode_failed --yes
    """
    selection = Selection(ids or None, name, reason, since, until, error)
    change = partial(dlq.delete, Keys(queue))
    _change(queue, redis_url, ("delete", "deleted"), change, limit, selection, yes, as_json)


def _change(
    queue: str,
    redis_url: str | None,
    words: tuple[str, str],
    change: Callable[..., Plan[int]],
    limit: int,
    selection: Selection,
    yes: bool,
    as_json: bool,
) -> None:
    """Change the selected dead jobs, or only count them without `yes`, and print how many."""
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)

    def run() -> Plan[tuple[int, int, int]]:
        total = yield from _total(keys)
        matching = (yield from _matching(keys, change, selection)) if total > limit else None
        changed = yield from change(limit, selection, dry_run=not yes)
        return changed, changed if matching is None else matching, total

    changed, matching, total = on_server(redis_url, lambda it: it.run(run()), queue=queue)
    jobs = f"{changed:,} of {count(total, 'entry')}"
    if matching > limit:
        jobs = _of_matching(changed, matching, limit, selection)
    verb, done = words
    facts = {"selected": changed, "matching": matching, "in_dlq": total}
    sentence = f"{done} {jobs}" if yes else f"would {verb} {jobs}; add --yes to do it"
    say(sentence, {done: changed if yes else 0, **facts}, as_json=as_json)


def _total(keys: Keys) -> Plan[int]:
    return (yield from state.counts(keys, DEFAULT_GROUP)).dlq


def _matching(keys: Keys, change: Callable[..., Plan[int]], selection: Selection) -> Plan[int]:
    """How many dead jobs are selected, without a limit."""
    if selection == EVERYTHING:
        return (yield from _total(keys))
    return (yield from change(MAX_COUNT, selection, dry_run=True))


def _of_matching(done: int, matching: int, limit: int, selection: Selection) -> str:
    """How many of the selected jobs, if the limit left some out."""
    entries = count(matching, "entry")
    selected = entries if selection == EVERYTHING else f"the {entries} that match"
    return f"{done:,} of {selected} (--limit {limit})"


def _show_counted(queue: str, redis_url: str | None, as_json: bool) -> None:
    counters: dict[str, Counter[str]] = {"reason": Counter(), "name": Counter(), "error": Counter()}

    async def count_all(it: Queue) -> None:
        async for job in it.iter_dlq():
            counters["reason"][job.reason] += 1
            counters["name"][job.name] += 1
            counters["error"][_why(job)] += 1

    on_queue(queue, redis_url, count_all)
    if as_json:
        show(counters, as_json=True)
    elif not counters["reason"]:
        print("no dead jobs")
    else:
        for i, (what, counter) in enumerate(counters.items()):
            if i:
                print()
            _histogram(what, counter.elements())


def _histogram(what: str, values: Iterable[str]) -> None:
    common = Counter(values).most_common(_MOST_COMMON)
    show_all((what, "jobs"), [(value or "-", n) for value, n in common], as_json=False, nothing="")


def _why(job: DeadJob) -> str:
    return job.error or job.detail or ""


def _whole(job: DeadJob) -> dict[str, Any]:
    try:
        data: Any = job.data
    except PayloadError as error:
        data = f"(cannot be read: {error})"
    return {
        "dlq_id": job.dlq_id,
        "dead_since": at_ms(job.added_ms),
        "source_id": job.source_id,
        "job_id": job.job_id,
        "name": job.name,
        "reason": job.reason,
        "detail": job.detail,
        "attempts": job.attempts if job.attempts is not None else job.attempt + 1,
        "consumer": job.consumer,
        "error": job.error,
        "data": data,
        "traceback": job.traceback,
    }
