"""`chasqui dlq`: looking through the dead-letter queue, running jobs again, deleting them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import typer

from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl, Yes, moment
from chasqui.cli.output import at_ms, show, show_all
from chasqui.cli.run import on_queue
from chasqui.model.config import MAX_COUNT
from chasqui.dlq import DeadJob
from chasqui.errors import PayloadError
from chasqui.queue import Queue
from chasqui.model.words import count

app = typer.Typer(
    help="Jobs that failed for good: the dead-letter queue.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

#: How many different names or errors `show` lists.
_MOST_COMMON = 10

Ids: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="DLQ_ID", help="Only this entry, by its DLQ id; may be repeated."),
]
Name: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only jobs of this name.")
]
Reason: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only this reason: retries_exhausted, unrecoverable, …"),
]
Error: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only those whose error or detail holds this text."),
]
Since: TypeAlias = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="WHEN", help="Dead since then: 2h (ago), or ISO 8601."),
]
Until: TypeAlias = Annotated[
    datetime | None, typer.Option(parser=moment, metavar="WHEN", help="Dead until then.")
]
Limit: TypeAlias = Annotated[
    int, typer.Option(min=1, metavar="N", help="The most entries, oldest first.")
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
    selectors = _selectors(ids, name, reason, error, since, until)
    must_exist(queue, redis_url, as_json=as_json)

    async def deed(it: Queue) -> tuple[list[DeadJob], int]:
        found = await _first(it, limit, selectors)
        is_all = len(found) < limit or as_json
        return found, len(found) if is_all else await _matching(it, it.delete_dlq, selectors)

    found, matching = on_queue(queue, redis_url, deed)
    columns = ("dlq id", "dead since", "reason", "name", "job id", "source id", "detail")
    rows = [
        (
            job.dlq_id,
            at_ms(job.added_ms),
            job.reason,
            job.name,
            job.job_id,
            job.source_id,
            _why(job),
        )
        for job in found
    ]
    # The id begins with the time, and `show` has all of it.
    spare = ("dead since", "source id")
    show_all(columns, rows, as_json=as_json, nothing="no dead jobs", spare=spare)
    if found and not as_json:
        print()
        _histogram("reason", (job.reason for job in found))
        if matching > len(found):
            print(f"\n{_of_matching(len(found), matching, limit, selectors)} shown")


@app.command("show")
def show_(
    queue: QueueName,
    dlq_id: Annotated[
        str | None, typer.Argument(metavar="[DLQ_ID]", help="One entry; without it: all, counted.")
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead job whole, or how many there are by reason, name and error.

    Example: chasqui dlq show emails 1767225600000-0
    """
    must_exist(queue, redis_url, as_json=as_json)
    if dlq_id is None:
        _show_counted(queue, redis_url, as_json)
        return
    found = on_queue(queue, redis_url, lambda it: _first(it, 1, {"ids": [dlq_id]}))
    if not found:
        if as_json:
            show({"dlq_id": dlq_id, "found": False}, as_json=True)
        else:
            print("not found")
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
    """Run dead jobs again, with all their attempts.

    Without --yes nothing is moved: you see how many would be. An entry whose envelope cannot be
    read stays where it is.

    Example: chasqui dlq replay emails --name digest --since 1d --yes
    """
    chosen = _selectors(ids, name, reason, error, since, until)
    must_exist(queue, redis_url, as_json=as_json)
    done = on_queue(queue, redis_url, lambda it: _counted(it, it.replay_dlq, limit, chosen, yes))
    _report("replay", "replayed", done, limit, chosen, yes, as_json)


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
    """Delete dead jobs for good.

    Without --yes nothing is deleted: you see how many would be.

    Example: chasqui dlq delete emails --reason decode_failed --yes
    """
    chosen = _selectors(ids, name, reason, error, since, until)
    must_exist(queue, redis_url, as_json=as_json)
    done = on_queue(queue, redis_url, lambda it: _counted(it, it.delete_dlq, limit, chosen, yes))
    _report("delete", "deleted", done, limit, chosen, yes, as_json)


def _selectors(
    ids: list[str] | None,
    name: str | None,
    reason: str | None,
    error: str | None,
    since: datetime | None,
    until: datetime | None,
) -> dict[str, Any]:
    """What is given to the methods of Queue that take a selection."""
    where: Callable[[DeadJob], bool] | None = None
    if error is not None:
        where = lambda job: error in _why(job)  # noqa: E731
    chosen = {"ids": ids or None, "name": name, "reason": reason, "since": since, "until": until}
    return {**chosen, "where": where}


async def _first(queue: Queue, limit: int, selectors: dict[str, Any]) -> list[DeadJob]:
    found = []
    async for job in queue.iter_dlq(**selectors):
        found.append(job)
        if len(found) == limit:
            break
    return found


def _show_counted(queue: str, redis_url: str | None, as_json: bool) -> None:
    counters: dict[str, Counter[str]] = {"reason": Counter(), "name": Counter(), "error": Counter()}

    async def deed(it: Queue) -> None:
        async for job in it.iter_dlq():
            counters["reason"][job.reason] += 1
            counters["name"][job.name] += 1
            counters["error"][_why(job)] += 1

    on_queue(queue, redis_url, deed)
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


async def _counted(
    queue: Queue,
    deed: Callable[..., Awaitable[int]],
    limit: int,
    selectors: dict[str, Any],
    yes: bool,
) -> tuple[int, int, int]:
    """How many dead jobs it was done to, or would be; how many match, and how many there were."""
    total = (await queue.counts()).dlq
    matching = await _matching(queue, deed, selectors) if total > limit else None
    done = await deed(limit, **selectors, dry_run=not yes)
    return done, done if matching is None else matching, total


async def _matching(
    queue: Queue, deed: Callable[..., Awaitable[int]], selectors: dict[str, Any]
) -> int:
    """How many dead jobs are meant, without a limit."""
    if not _is_selective(selectors):
        return (await queue.counts()).dlq
    return await deed(MAX_COUNT, **selectors, dry_run=True)


def _is_selective(selectors: dict[str, Any]) -> bool:
    return any(value is not None for value in selectors.values())


def _of_matching(done: int, matching: int, limit: int, selectors: dict[str, Any]) -> str:
    """So many of those that are meant, where the limit left some out."""
    entries = count(matching, "entry")
    meant = f"the {entries} that match" if _is_selective(selectors) else entries
    return f"{done:,} of {meant} (--limit {limit})"


def _report(
    verb: str,
    done: str,
    outcome: tuple[int, int, int],
    limit: int,
    selectors: dict[str, Any],
    yes: bool,
    as_json: bool,
) -> None:
    moved, matching, total = outcome
    if as_json:
        facts = {"selected": moved, "matching": matching, "in_dlq": total}
        show({done: moved if yes else 0, **facts}, as_json=True)
        return
    told = f"{moved:,} of {count(total, 'entry')}"
    if matching > limit:
        told = _of_matching(moved, matching, limit, selectors)
    print(f"{done} {told}" if yes else f"would {verb} {told}; add --yes to do it")
