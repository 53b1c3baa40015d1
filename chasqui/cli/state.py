"""`chasqui pause`, `resume`, `obliterate`: a queue as a whole."""

from dataclasses import asdict
from typing import Annotated

import typer

from chasqui.cli.known import must_exist, tell_if_new
from chasqui.cli.options import AsJson, QueueName, RedisUrl, Yes
from chasqui.cli.output import say
from chasqui.cli.run import on_queue
from chasqui.errors import NotSupportedError
from chasqui.model.words import count
from chasqui.queue import Counts, Queue


def pause(queue: QueueName, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Stop workers from taking jobs of a queue, until you resume it.

    Running jobs go on to their end, and jobs may still be added. The pause outlives restarts of
    workers and server.

    Example: chasqui pause emails
    """
    tell_if_new(queue, redis_url)
    on_queue(queue, redis_url, lambda it: it.pause())
    sentence = f"queue {queue} paused; run `chasqui resume {queue}` to resume"
    say(sentence, {"queue": queue, "paused": True}, as_json=as_json)


def resume(queue: QueueName, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Let workers take jobs of a paused queue again.

    Example: chasqui resume emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    on_queue(queue, redis_url, lambda it: it.resume())
    say(f"queue {queue} resumed", {"queue": queue, "paused": False}, as_json=as_json)


def obliterate(
    queue: QueueName,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it has waiting, running, delayed or dead jobs.")
    ] = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete a queue with everything in it.

    Without --yes this deletes nothing and shows what it would delete.

    Example: chasqui obliterate emails --force --yes
    """

    async def delete(it: Queue) -> tuple[Counts, int]:
        counts = await it.counts()
        if yes:
            return counts, await it.obliterate(force=force)
        if not force:
            try:
                counts.refuse_if_any(queue)
            except NotSupportedError as error:
                raise ValueError(str(error).replace("obliterate(force=True)", "--force")) from None
        return counts, 0

    must_exist(queue, redis_url, as_json=as_json)
    counts, deleted = on_queue(queue, redis_url, delete)
    sentence = f"deleted {count(deleted, 'key')} of queue {queue}"
    if not yes:
        sentence = (
            f"would delete queue {queue}: {counts.waiting} waiting, {counts.pending} pending, "
            f"{counts.delayed} delayed, {counts.dlq} dead, {counts.repeatables} repeatable; "
            "add --yes to do it"
        )
    say(sentence, {"queue": queue, "deleted_keys": deleted, **asdict(counts)}, as_json=as_json)
