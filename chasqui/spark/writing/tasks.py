"""What a task does with its rows: it stages them, adds them at once, or leaves them out."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Final

import msgpack  # type: ignore[import-untyped]
from pyspark.sql.datasource import WriterCommitMessage

from chasqui._core.command import pack_jobs
from chasqui.adding import AddOptions, Batch, ulids
from chasqui.blocking import BlockingConnection
from chasqui.errors import QueueFullError
from chasqui.model.keys import Keys
from chasqui.plans import Plans
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.connections import open_connection
from chasqui.spark.options import Options
from chasqui.spark.writing.records import read_record, stage_key, stages_key
from chasqui.spark.writing.transaction import Staged

#: Jobs that are staged, and later published, at once: about a millisecond of the server's time.
CHUNK_JOBS: Final = 500


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc]
    """What a task did: the write it belongs to, what it staged per queue, how many rows."""

    app_id: str
    staged: list[tuple[str, Staged]]
    rows: int
    #: Rows that were not staged, by queue: a record of the write was there already.
    recorded: dict[str, int] = field(default_factory=dict)
    #: Where rows were added at once: the queues, and of dedup how many ids were taken.
    queues: list[str] = field(default_factory=list)
    taken: int = 0


class Task:
    """The rows of one task on their way, a connection for each queue."""

    def __init__(self, options: Options, app_id: str, run: str, epoch: int | None) -> None:
        self._options = options
        self._app_id = app_id
        self._epoch = epoch
        self._part = f"{run}-{uuid.uuid4().hex}"
        self._queues: dict[str, _Stage | _Direct | _Recorded] = {}

    def take(self, queue: str, jobs: Batch, dues: list[int]) -> None:
        if not jobs.payloads:
            return
        target = self._queues.get(queue)
        if target is None:
            target = self._queues[queue] = self._open(queue)
        target.take(jobs, dues)

    def _open(self, queue: str) -> "_Stage | _Direct | _Recorded":
        options, keys, connection = (
            self._options,
            Keys(queue),
            open_connection(self._options, queue),
        )
        if options.delivery != "exactly_once":
            return _Direct(connection, keys, options)
        if self._epoch is not None:
            record = connection.run(read_record(keys, self._app_id))
            if record is not None and record.epoch >= self._epoch:
                return _Recorded(connection)
        return _Stage(
            connection,
            stage_key(keys, self._app_id, self._part),
            stages_key(keys, self._app_id),
            self._epoch,
            int(options.stage_ttl) or 1,
        )

    def written(self, rows: int) -> Written:
        written = Written(self._app_id, [], rows)
        for queue, target in self._queues.items():
            if isinstance(target, _Stage):
                written.staged.append((queue, Staged(target.key, target.chunks, target.jobs)))
            elif isinstance(target, _Recorded):
                written.recorded[queue] = target.jobs
            else:
                written.queues.append(queue)
                written.taken += target.taken
        return written

    def close(self) -> None:
        for target in self._queues.values():
            target.connection.close()


class _Recorded:
    """Leaves jobs out: a record of their write is there, and is what will be published."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.jobs = 0

    def take(self, jobs: Batch, dues: list[int]) -> None:
        self.jobs += len(jobs.payloads)


class _Stage:
    """Puts jobs into a stage of the task's own, chunk by chunk."""

    def __init__(
        self,
        connection: BlockingConnection,
        key: bytes,
        stages: bytes,
        epoch: int | None,
        ttl_s: int,
    ) -> None:
        self.connection = connection
        self.key = key
        self.chunks = 0
        self.jobs = 0
        self._stages = stages
        self._epoch = "-" if epoch is None else str(epoch)
        self._ttl_s = ttl_s

    def take(self, jobs: Batch, dues: list[int]) -> None:
        self.connection.run(self._send(jobs, dues))

    def _send(self, jobs: Batch, dues: list[int]) -> Plan[None]:
        replies = yield (self._chunk(jobs, dues, part) for part in jobs.slices(CHUNK_JOBS))
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply

    def _chunk(self, jobs: Batch, dues: list[int], part: slice) -> Request:
        # One name, or due time, for all of them is most often enough.
        names: str | list[str] = jobs.names if isinstance(jobs.names, str) else jobs.names[part]
        chunk = msgpack.packb(names) + msgpack.packb(dues[part] if jobs.kinds is not None else 0)
        chunk += pack_jobs(
            ulids,
            time.time_ns() // 1_000_000,
            jobs.payloads[part],
            None if jobs.ids is None else jobs.ids[part],
            None if jobs.retries is None else jobs.retries[part],
        )
        number = self.chunks
        self.chunks += 1
        self.jobs += part.stop - part.start
        # Listed before it is there, and with a time to live from the first chunk on: what a task
        # that dies has staged is found, and ends by itself.
        return commands(
            ("HSET", self._stages, self.key, f"{self._epoch} {self.jobs} {self._ttl_s}"),
            ("EXPIRE", self._stages, self._ttl_s),
            ("HSETNX", self.key, number, chunk),
            ("EXPIRE", self.key, self._ttl_s),
            effect=Effect.IDEMPOTENT,
        )


class _Direct:
    """Adds jobs to the queue at once, as a producer does."""

    def __init__(self, connection: BlockingConnection, keys: Keys, options: Options) -> None:
        self.connection = connection
        #: Jobs that were not added, for their ids were taken.
        self.taken = 0
        self._plans = Plans(keys)
        self._backlog = Backlog.of(options, keys.queue)
        ttl_s = int(options.dedup_ttl) if options.delivery == "dedup" else None
        self._add = AddOptions(max_backlog=options.max_backlog, unique_for_s=ttl_s)

    def take(self, jobs: Batch, dues: list[int]) -> None:
        while True:
            try:
                added = self.connection.run(self._plans.add(jobs, self._add))
            except QueueFullError as error:
                self._backlog.wait(error.depth)
            else:
                self._backlog.moved()
                self.taken += added.taken
                return
