"""Exactly-once writes: rows are staged by tasks, recorded by the driver, then published.

A write is known by an application id and an epoch. The first record of an epoch wins, whoever made
it; everybody else who comes with that epoch publishes what was recorded, or finds it done. Moving a
job out of its stage list and into the queue is one atomic step, so whoever dies on the way, the
next one goes on where it stopped.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chasqui import scripts
from chasqui.adding import full_waits_s
from chasqui.blocking import BlockingConnection
from chasqui.errors import ChasquiError, QueueFullError
from chasqui.keys import Keys
from chasqui.request import Effect, Plan, commands

STAGE: Final = scripts.load("spark_stage")
BEGIN: Final = scripts.load("spark_begin")
PUBLISH: Final = scripts.load("spark_publish")
DONE: Final = scripts.load("spark_done")
DROP: Final = scripts.load("spark_drop")

#: Jobs that one script call publishes: about 2 ms of the server's time.
SLICE: Final = 500
#: How long the last epoch of a write is remembered once it is published.
REMEMBERED_S: Final = 30 * 86_400


class StageLostError(ChasquiError):
    """Staged rows are not what the task left: they expired, or the server lost them."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One stage list: its key and its number of jobs."""

    key: bytes
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
                    [epoch, *(one.jobs for one in staged)],
                    Effect.IDEMPOTENT,
                )
            )
            if answer == b"resume":
                last, *keys = rest
                moved += self._publish(last, keys)
                continue  # if it was this epoch, the next answer is `done`
            if answer == b"lost":
                raise StageLostError(
                    f"rows staged for queue {self._keys.queue!r} are gone ({rest[0].decode()}): "
                    "run the batch again, with a longer stageTtl if it took that long"
                )
            if answer == b"done":
                self.drop([one.key for one in staged])
                return moved
            return moved + self._publish(epoch, [one.key for one in staged])

    def resume(self) -> int:
        """Publish what was recorded and never finished; how many jobs."""
        record = self._connection.run(read_record(self._keys, self._app_id))
        if record is None or record.state != "publishing":
            return 0
        return self._publish(record.epoch, record.keys)

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
        """Drop stage lists that no record needs; how many."""
        if not staged:
            return 0
        request = scripts.call(DROP, [self._record, *staged], [], Effect.IDEMPOTENT)
        dropped: int = self._connection.call(request)
        return dropped

    def _publish(self, epoch: int, keys: Sequence[bytes]) -> int:
        moved = sum(self._publish_list(epoch, key) for key in keys)
        self._connection.call(
            scripts.call(DONE, [self._record, *keys], [epoch, REMEMBERED_S], Effect.IDEMPOTENT)
        )
        return moved

    def _publish_list(self, epoch: int, key: bytes) -> int:
        names = [self._record, key, self._keys.stream, self._keys.delayed, self._keys.wake]
        waits = full_waits_s()
        total = 0
        while True:
            moved, left, depth = self._connection.call(
                scripts.call(PUBLISH, names, [epoch, SLICE, self._max_backlog], Effect.IDEMPOTENT)
            )
            if moved < 0 or not left:
                return total + max(0, int(moved))
            total += moved
            if moved:
                waits = full_waits_s()
            elif self._waits:
                time.sleep(next(waits))
            else:
                raise QueueFullError(self._keys.queue, depth, self._max_backlog)


def read_record(keys: Keys, app_id: str) -> Plan[Record | None]:
    """What is known of a write; None if nothing."""
    fields = ("epoch", "state", "jobs", "at", "keys")
    epoch, state, jobs, at_s, names = yield commands(
        ("HMGET", record_key(keys, app_id), *fields), effect=Effect.READ
    )
    if epoch is None:
        return None
    staged = tuple(names.split(b"\n")) if names else ()
    left = 0
    if staged:
        lengths = yield commands(*(("LLEN", one) for one in staged), effect=Effect.READ)
        left = (sum(lengths) if len(staged) > 1 else lengths) // 3
    return Record(app_id, int(epoch), state.decode(), int(jobs), int(at_s), staged, left)


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
