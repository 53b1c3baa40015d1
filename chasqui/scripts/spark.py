"""Doors to the scripts of Spark. Only chasqui.spark imports this, so `import chasqui` does not load
them.

A write is a record (a hash) and stages (a hash of numbered chunks for each task). All keys of one
request have the hash tag of one queue.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from chasqui.model.keys import Keys
from chasqui.scripts.loading import call, load
from chasqui.scripts.settling import Consumer
from chasqui.transport.request import Effect, Request

BATCH: Final = load("spark_batch", "envelope")
BEGIN: Final = load("spark_begin")
DONE: Final = load("spark_done")
DROP: Final = load("spark_drop")
PUBLISH: Final = load("spark_publish")
RENEW: Final = load("spark_renew")


def batch(
    consumer: Consumer,
    driver_key: bytes,
    driver: str,
    most: int,
    *,
    event: bytes,
    writes_events: bool,
    took_us: int | None = None,
) -> Request:
    """Take jobs for a batch (`event` is `active`), or acknowledge jobs of it (`completed`).

    Replies how many jobs; -1 if `driver` is no longer the last driver that wrote `driver_key`.
    `writes_events`: that event for each job. Sent twice, it takes more jobs, all for the batch.
    """
    keys, group, name = consumer
    names = [keys.stream, keys.events, keys.paused, driver_key]
    arguments: list[Any] = [group, name, most, event, int(writes_events)]
    arguments += ("" if took_us is None else took_us, driver)
    return call(BATCH, names, arguments, Effect.IDEMPOTENT)


def renew(consumer: Consumer, after: bytes, most: int) -> Request:
    """Reset the idle time of the jobs that a consumer holds behind `after`; replies the id to go on
    behind, empty at the end."""
    keys, group, name = consumer
    return call(RENEW, [keys.stream], [group, name, after, most], Effect.IDEMPOTENT)


def begin(
    record: bytes, epoch: int, jobs: int, chunks: dict[bytes, int], *, is_whole: bool
) -> Request:
    """Record that a write publishes these stages (key to chunks), unless it has a record already.

    `is_whole` is false if a task left rows out because it saw a record. Replies
    `[b"mine"]`: recorded, publish them;
    `[b"done", epoch, jobs, unix_s]`: this epoch or a later one is published;
    `[b"resume", epoch, jobs, left, key, …]`: publish these recorded stages first;
    `[b"lost", key]`: a stage is not what its task left;
    `[b"gone"]`: the record that a task saw is not there any more.
    """
    arguments = [epoch, jobs, int(is_whole), *chunks.values()]
    return call(BEGIN, [record, *chunks], arguments, Effect.IDEMPOTENT)


def publish(
    keys: Keys, record: bytes, stage: bytes, epoch: int, number: int, max_backlog: int, run: str
) -> Request:
    """Move one staged chunk into the stream and the delayed set.

    Replies `[jobs moved, 1 if some found no room, jobs in the stream, jobs left of the write]`;
    `[-1]` if the record does not publish this epoch any more; `[-2]` if the chunk is gone.
    """
    names = [record, stage, keys.stream, keys.delayed, keys.wake]
    return call(PUBLISH, names, [epoch, number, max_backlog, run], Effect.IDEMPOTENT)


def done(
    record: bytes, stages: bytes, published: Iterable[bytes], epoch: int, remember_s: int, run: str
) -> Request:
    """Mark a write as published, and drop its stages and older ones.

    Replies `[b"done", jobs that this run published, or -1 if a later epoch has replaced the
    record]`; `[b"left"]` if some jobs are not published; `[b"gone"]` if there is no such record.
    """
    names = [record, stages, *published]
    return call(DONE, names, [epoch, remember_s, run], Effect.IDEMPOTENT)


def drop(record: bytes, stages: bytes, dropped: Sequence[bytes]) -> Request:
    """Drop stages that no record needs; replies how many."""
    return call(DROP, [record, stages, *dropped], [""], Effect.IDEMPOTENT)


def forget(record: bytes, stages: bytes) -> Request:
    """Delete the record of a write and all its stages; replies how many stages."""
    return call(DROP, [record, stages], ["forget"], Effect.IDEMPOTENT)
