"""Exactly-once writes: rows are staged by tasks, recorded by the driver, then published.

A write is known by an application id and an epoch. The first record of an epoch wins, whoever made
it; everybody else who comes with that epoch publishes what was recorded, or finds it done. Moving a
chunk of jobs out of its stage and into the queue is one atomic step, so whoever dies on the way,
the next one goes on where it stopped.

A stage is a hash of numbered chunks, each one string: the server stores a chunk in the time that a
list takes for one job of it, and one that is sent twice is there once. What is published leaves an
empty string in its place until all is done, so a chunk that comes late finds its place taken.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chasqui import scripts
from chasqui.adding import full_waits_s
from chasqui.blocking import BlockingConnection
from chasqui.errors import ChasquiError, QueueFullError
from chasqui.keys import Keys
from chasqui.request import Effect, Plan, Request, commands

BEGIN: Final = scripts.load("spark_begin")
PUBLISH: Final = scripts.load("spark_publish")
DONE: Final = scripts.load("spark_done")
DROP: Final = scripts.load("spark_drop")

#: How long the last epoch of a write is remembered once it is published.
REMEMBERED_S: Final = 30 * 86_400
#: Chunks on their way at once: the next one is there when the server is done with this one, and
#: others still get their turn between the two.
_AHEAD: Final = 2


class StageLostError(ChasquiError):
    """Staged rows are not what the task left: they expired, or the server lost them."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged: the key, its chunks, their jobs."""

    key: bytes
    chunks: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a write."""

    app_id: str
    epoch: int
    state: str
    jobs: int
    #: When it was recorded, unix seconds.
    at_s: int
    keys: tuple[bytes, ...]
    #: Jobs that are staged and not published.
    left: int = 0


def record_key(keys: Keys, app_id: str) -> bytes:
    return keys.spark(f"txn:{app_id}")


def stage_key(keys: Keys, app_id: str, part: str) -> bytes:
    return keys.spark(f"stage:{app_id}:{part}")


class Transaction:
    """One write into one queue."""

    def __init__(
        self,
        connection: BlockingConnection,
        keys: Keys,
        app_id: str,
        *,
        max_backlog: int,
        waits: bool = True,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._app_id = app_id
        self._record = record_key(keys, app_id)
        self._max_backlog = max_backlog
        self._waits = waits

    def commit(self, epoch: int, staged: Sequence[Staged]) -> int:
        """Publish an epoch, unless it was; how many jobs this call moved.

        Safe to repeat after any failure, from any process.
        """
        staged = [one for one in staged if one.jobs]
        if not staged:
            return 0
        moved = 0
        while True:
            answer, *rest = self._connection.call(
                scripts.call(
                    BEGIN,
                    [self._record, *(one.key for one in staged)],
                    [epoch, sum(one.jobs for one in staged), *(one.chunks for one in staged)],
                    Effect.IDEMPOTENT,
                )
            )
            if answer == b"resume":
                last, *keys = rest
                moved += self._resume(last, keys)
                continue  # if it was this epoch, the next answer is `done`
            if answer == b"lost":
                raise self._lost(rest[0])
            if answer == b"done":
                self.drop([one.key for one in staged])
                return moved
            return moved + self._publish(epoch, {one.key: one.chunks for one in staged})

    def resume(self) -> int:
        """Publish what was recorded and never finished; how many jobs."""
        record = self._connection.run(read_record(self._keys, self._app_id))
        if record is None or record.state != "publishing":
            return 0
        return self._resume(record.epoch, record.keys)

    def discard(self) -> int:
        """Forget a write and drop what it has staged; how many jobs that were."""
        record = self._connection.run(read_record(self._keys, self._app_id))
        if record is None:
            return 0
        self._connection.call(
            commands(("UNLINK", self._record, *record.keys), effect=Effect.IDEMPOTENT)
        )
        return record.left

    def drop(self, staged: Sequence[bytes]) -> int:
        """Drop stages that no record needs; how many."""
        if not staged:
            return 0
        request = scripts.call(DROP, [self._record, *staged], [], Effect.IDEMPOTENT)
        dropped: int = self._connection.call(request)
        return dropped

    def _resume(self, epoch: int, keys: Sequence[bytes]) -> int:
        chunks = self._connection.run(_chunks(keys))
        return self._publish(epoch, dict(zip(keys, chunks, strict=True)))

    def _publish(self, epoch: int, chunks: Mapping[bytes, int]) -> int:
        """Publish what is staged under these keys, in so many chunks each; how many jobs."""
        left = [(key, number) for key, count in chunks.items() for number in range(count)]
        total, waits = 0, full_waits_s()
        while left:
            replies = self._connection.call_each(self._moves(epoch, left), _AHEAD)
            moved, depth, undone = 0, 0, []
            for place, reply in zip(left, replies, strict=False):
                if isinstance(reply, BaseException):
                    raise reply
                if reply == [-2]:
                    raise self._lost(place[0])
                if _is_left(reply):
                    undone.append(place)
                    depth = reply[2]
                if reply != [-1]:  # else somebody has published all of it
                    moved += reply[0]
            total += moved
            left = undone + left[len(replies) :]
            if moved:
                waits = full_waits_s()
            elif undone and self._waits:
                time.sleep(next(waits))
            elif undone:
                raise QueueFullError(self._keys.queue, depth, self._max_backlog)
        self._connection.call(
            scripts.call(DONE, [self._record, *chunks], [epoch, REMEMBERED_S], Effect.IDEMPOTENT)
        )
        return total

    def _moves(self, epoch: int, chunks: Iterable[tuple[bytes, int]]) -> Iterator[Request]:
        """What publishes these chunks one by one, up to the first that finds no room."""
        sent: deque[Request] = deque(maxlen=_AHEAD)
        for key, number in chunks:
            if any(_is_left(one.outcome) for one in sent):
                return
            names = [self._record, key, self._keys.stream, self._keys.delayed, self._keys.wake]
            sent.append(
                scripts.call(PUBLISH, names, [epoch, number, self._max_backlog], Effect.IDEMPOTENT)
            )
            yield sent[-1]

    def _lost(self, key: bytes) -> StageLostError:
        return StageLostError(
            f"rows staged for queue {self._keys.queue!r} are gone ({key.decode()}): run the batch "
            "again, with a longer stageTtl if it took that long"
        )


def _is_left(reply: Any) -> bool:
    """Whether some jobs of a chunk found no room."""
    return isinstance(reply, list) and reply[1:2] == [1]


def _chunks(keys: Sequence[bytes]) -> Plan[list[int]]:
    """How many chunks are staged under each key."""
    if not keys:
        return []
    lengths = yield commands(*(("HLEN", key) for key in keys), effect=Effect.READ)
    return lengths if len(keys) > 1 else [lengths]


def read_record(keys: Keys, app_id: str) -> Plan[Record | None]:
    """What is known of a write; None if nothing."""
    fields = ("epoch", "state", "jobs", "left", "at", "keys")
    epoch, state, jobs, left, at_s, names = yield commands(
        ("HMGET", record_key(keys, app_id), *fields), effect=Effect.READ
    )
    if epoch is None:
        return None
    staged = tuple(names.split(b"\n")) if names else ()
    return Record(app_id, int(epoch), state.decode(), int(jobs), int(at_s), staged, int(left))


def list_records(keys: Keys) -> Plan[list[Record]]:
    """All writes into a queue that are known."""
    prefix = record_key(keys, "")
    cursor, found = b"0", set[str]()
    while True:
        scan = ("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", 1000)
        cursor, names = yield commands(scan, effect=Effect.READ)
        found.update(name.removeprefix(prefix).decode(errors="replace") for name in names)
        if cursor == b"0":
            break
    records = []
    for app_id in sorted(found):
        record = yield from read_record(keys, app_id)
        if record is not None:
            records.append(record)
    return records
