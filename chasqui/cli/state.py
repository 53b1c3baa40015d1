"""`chasqui pause`, `resume`, `obliterate`: a queue as a whole."""

from dataclasses import asdict
from typing import Annotated

import typer

from chasqui.cli.known import must_exist, tell_if_new
from chasqui.cli.options import AsJson, QueueName, RedisUrl, Yes
from chasqui.cli.output import show
from chasqui.cli.run import on_queue
from chasqui.errors import NotSupportedError
from chasqui.queue import Counts, Queue
from chasqui.model.words import count


def pause(queue: QueueName, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Let workers take no new jobs of a queue, until it is resumed.

    What runs is finished, and jobs may still be added. It outlives restarts of workers and server.

    Example: chasqui pause emails
    """
    tell_if_new(queue, redis_url)
    on_queue(queue, redis_url, lambda it: it.pause())
    if as_json:
        show({"queue": queue, "paused": True}, as_json=True)
    else:
        print(f"queue {queue} paused; run `chasqui resume {queue}` to resume")


def resume(queue: QueueName, redis_url: RedisUrl = None, as_json: AsJson = False) -> None:
    """Let workers take jobs of a paused queue again.

    Example: chasqui resume emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    on_queue(queue, redis_url, lambda it: it.resume())
    if as_json:
        show({"queue": queue, "paused": False}, as_json=True)
    else:
        print(f"queue {queue} resumed")


def obliterate(
    queue: QueueName,
    force: Annotated[
        bool, typer.Option("--force", help="Also while jobs wait, run or are delayed.")
    ] = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete a queue with everything it holds.

    Without --yes nothing is deleted: you see what would be.

    Example: chasqui obliterate emails --force --yes
    """

    async def deed(it: Queue) -> tuple[Counts, int]:
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
    counts, deleted = on_queue(queue, redis_url, deed)
    if as_json:
        show({"queue": queue, "deleted_keys": deleted, **asdict(counts)}, as_json=True)
    elif yes:
        print(f"deleted {count(deleted, 'key')} of queue {queue}")
    else:
        print(
            f"would delete queue {queue}: {counts.waiting} waiting, {counts.pending} pending, "
            f"{counts.delayed} delayed, {counts.dlq} dead, {counts.repeatables} repeatable; "
            "add --yes to do it"
        )
