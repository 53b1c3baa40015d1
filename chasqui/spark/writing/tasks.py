"""What a task does with its rows: it stages them, adds them at once, or skips them."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Final

import msgpack  # type: ignore[import-untyped]
from pyspark.sql.datasource import WriterCommitMessage

from chasqui._core.command import pack_jobs
from chasqui.errors import QueueFullError
from chasqui.model.keys import Keys
from chasqui.producing.new_jobs import NewJobs, ulids
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import AddOptions
from chasqui.spark.connections import open_connection
from chasqui.spark.options import Options
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.writing.records import read_record, stage_key, stages_key
from chasqui.spark.writing.transaction import Staged
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Plan, Request, commands

#: Jobs that are staged, and later published, at once: about a millisecond of the server's time.
CHUNK_JOBS: Final = 500


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc]
    """What a task did: for which write, what it staged in which queue, how many rows it had."""

    app_id: str
    staged: list[tuple[str, Staged]]
    rows: int
    #: Per queue, rows that were skipped because the write had a record already.
    recorded: dict[str, int] = field(default_factory=dict)
    #: If rows were added at once: the queues, and how many ids dedup found taken.
    queues: list[str] = field(default_factory=list)
    taken: int = 0


class Task:
    """Sends the rows of one task, over a connection for each queue."""

    def __init__(self, options: Options, app_id: str, run: str, epoch: int | None) -> None:
        self._options = options
        self._app_id = app_id
        self._epoch = epoch
        self._part = f"{run}-{uuid.uuid4().hex}"
        self._queues: dict[str, _Stager | _Adder | _Skipper] = {}

    def take(self, queue: str, jobs: NewJobs, dues: list[int]) -> None:
        if not jobs.payloads:
            return
        target = self._queues.get(queue)
        if target is None:
            target = self._queues[queue] = self._open(queue)
        target.take(jobs, dues)

    def _open(self, queue: str) -> "_Stager | _Adder | _Skipper":
        options, keys = self._options, Keys(queue)
        connection = open_connection(options, queue)
        if options.delivery != "exactly_once":
            return _Adder(connection, keys, options)
        if self._epoch is not None:
            record = connection.run(read_record(keys, self._app_id))
            if record is not None and record.epoch >= self._epoch:
                return _Skipper(connection)
        return _Stager(
            connection,
            stage_key(keys, self._app_id, self._part),
            stages_key(keys, self._app_id),
            self._epoch,
            int(options.stage_ttl) or 1,
        )

    def written(self, rows: int) -> Written:
        written = Written(self._app_id, [], rows)
        for queue, target in self._queues.items():
            if isinstance(target, _Stager):
                written.staged.append((queue, Staged(target.key, target.chunks, target.jobs)))
            elif isinstance(target, _Skipper):
                written.recorded[queue] = target.jobs
            else:
                written.queues.append(queue)
                written.taken += target.taken
        return written

    def close(self) -> None:
        for target in self._queues.values():
            target.connection.close()


class _Skipper:
    """Counts jobs and drops them: the record of their write is what will be published."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.jobs = 0

    def take(self, jobs: NewJobs, dues: list[int]) -> None:
        self.jobs += len(jobs.payloads)


class _Stager:
    """Puts jobs into a stage that only this task writes, chunk by chunk."""

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

    def take(self, jobs: NewJobs, dues: list[int]) -> None:
        self.connection.run(self._send(jobs, dues))

    def _send(self, jobs: NewJobs, dues: list[int]) -> Plan[None]:
        replies = yield (self._chunk(jobs, dues, part) for part in jobs.slices(CHUNK_JOBS))
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply

    def _chunk(self, jobs: NewJobs, dues: list[int], part: slice) -> Request:
        # Most often all jobs have one name and one due time.
        names: str | list[str] = jobs.names if isinstance(jobs.names, str) else jobs.names[part]
        chunk = msgpack.packb(names) + msgpack.packb(dues[part] if jobs.flags is not None else 0)
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
        # The stage is listed before it exists, and expires from its first chunk on: if the task
        # dies, others find the stage, and it goes away.
        return commands(
            ("HSET", self._stages, self.key, f"{self._epoch} {self.jobs} {self._ttl_s}"),
            ("EXPIRE", self._stages, self._ttl_s),
            ("HSETNX", self.key, number, chunk),
            ("EXPIRE", self.key, self._ttl_s),
            effect=Effect.IDEMPOTENT,
        )


class _Adder:
    """Adds jobs to the queue at once, as a producer does."""

    def __init__(self, connection: BlockingConnection, keys: Keys, options: Options) -> None:
        self.connection = connection
        #: Jobs that were not added because their ids were taken.
        self.taken = 0
        self._operations = QueueOperations(keys)
        self._backlog = Backlog.of(options, keys.queue)
        ttl_s = int(options.dedup_ttl) if options.delivery == "dedup" else None
        self._add = AddOptions(max_backlog=options.max_backlog, unique_for_s=ttl_s)

    def take(self, jobs: NewJobs, dues: list[int]) -> None:
        while True:
            try:
                added = self.connection.run(self._operations.add(jobs, self._add))
            except QueueFullError as error:
                self._backlog.wait(error.depth)
            else:
                self._backlog.moved()
                self.taken += added.taken
                return
