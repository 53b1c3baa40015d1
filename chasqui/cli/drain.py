"""`chasqui drain`: a queue without the jobs that nobody has begun."""

from typing import Annotated, Any

import typer

from chasqui import scripts
from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import EnvelopeError, decode_delayed_member, decode_envelope
from chasqui.cli.facts import look
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, QueueName, RedisUrl, Yes
from chasqui.cli.output import show
from chasqui.cli.run import on_server
from chasqui.transport.connection import Connection
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.model.words import count

#: Jobs deleted together.
_PAGE = 500
# Whatever its size: nobody is going to run it.
_ANY_SIZE = 1 << 40


def drain(
    queue: QueueName,
    delayed: Annotated[
        bool, typer.Option("--delayed", help="Delayed jobs as well, retries included.")
    ] = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete the jobs of a queue that wait, and with --delayed those that are due later.

    Jobs that a worker has are left to it; dead and repeatable ones stay. The ids of deleted jobs
    may be used again. Jobs that are added meanwhile stay, too. Without --yes nothing is deleted:
    you see how many would be.

    Example: chasqui drain emails --delayed --yes
    """
    keys = Keys(queue)

    async def deed(connection: Connection) -> tuple[int, int]:
        if not yes:
            counts = (await look(connection, keys, DEFAULT_GROUP)).counts
            return counts.waiting, counts.delayed if delayed else 0
        waiting = await connection.run(drain_waiting(keys))
        return waiting, await connection.run(drain_delayed(keys)) if delayed else 0

    must_exist(queue, redis_url, as_json=as_json)
    from_stream, from_delayed = on_server(redis_url, deed, queue=queue)
    if as_json:
        facts = {"waiting": from_stream, "delayed": from_delayed, "deleted": yes}
        show(facts, as_json=True)
        return
    told = f"{from_stream:,} waiting" + (f" and {from_delayed:,} delayed" if delayed else "")
    total = count(from_stream + from_delayed, "job").partition(" ")[2]
    print(f"deleted {told} {total}" if yes else f"would delete {told} {total}; add --yes to do it")


def drain_waiting(keys: Keys) -> Plan[int]:
    """Delete what waits in the stream now; how many jobs that was.

    Should a reply be lost on the way, the jobs that it was about are gone but not counted.
    """
    newest = yield _entries(("XREVRANGE", keys.stream, "+", "-", "COUNT", 1))
    if not newest:
        return 0
    last, start, deleted = newest[0].id, b"-", 0
    while True:
        page: list[Entry] = yield _entries(("XRANGE", keys.stream, start, last, "COUNT", _PAGE))
        if page:
            names = [
                key for one in page for key in (keys.unique(one.job_id), keys.dlid(one.job_id))
            ]
            flags = yield scripts.call(
                scripts.DRAIN,
                [keys.stream, *names],
                [one.id for one in page],
                Effect.IDEMPOTENT,
            )
            deleted += flags.count(b"1")
        if len(page) < _PAGE:
            return deleted
        start = b"(" + page[-1].id


def drain_delayed(keys: Keys) -> Plan[int]:
    """Delete the jobs that are delayed now; how many that was."""
    left = yield commands(("ZCARD", keys.delayed), effect=Effect.READ)
    deleted, kept = 0, 0
    while left > 0:
        members: list[bytes] = yield commands(
            ("ZRANGE", keys.delayed, kept, kept + min(left, _PAGE) - 1), effect=Effect.READ
        )
        if not members:
            break
        removed = yield commands(
            *(("ZREM", keys.delayed, member) for member in members), effect=Effect.IDEMPOTENT
        )
        gone = [
            key
            for member, was_there in zip(
                members, removed if len(members) > 1 else [removed], strict=True
            )
            if was_there
            for job_id in (_id_of(member),)
            for key in (keys.didx(job_id), keys.dlid(job_id), keys.unique(job_id))
        ]
        if gone:
            yield commands(("UNLINK", *gone), effect=Effect.IDEMPOTENT)
        deleted += len(gone) // 3
        left -= len(members)
    return deleted


def _entries(command: tuple[Any, ...]) -> Request:
    return commands(command, effect=Effect.READ, builder=EntryBuilder("range", _ANY_SIZE))


def _id_of(member: bytes) -> str:
    """The job's id; empty where it cannot be read."""
    try:
        return decode_envelope(decode_delayed_member(member)[1]).id
    except EnvelopeError:
        return ""
