"""Writers: tasks stage or add rows, the driver publishes what they staged."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from chasqui._core.command import pack_jobs
from chasqui.adding import AddOptions, Batch, full_waits_s, ulids
from chasqui.blocking import BlockingConnection
from chasqui.errors import ChasquiError, QueueFullError
from chasqui.keys import Keys
from chasqui.plans import Plans
from chasqui.request import Effect, Plan, Request, commands
from chasqui.spark.link import connected, open_connection
from chasqui.spark.options import Options
from chasqui.spark.rows import Mapping, jobs_of
from chasqui.spark.txn import Staged, Transaction, stage_key

#: Jobs that are staged, and later published, at once: about a millisecond of the server's time.
CHUNK_JOBS: Final = 500
#: Internal names of Spark: the streaming query that a task works for.
_QUERY_ID = "sql.streaming.queryId"


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc]
    """What a task did: the write it belongs to, what it staged per queue, how many rows."""

    app_id: str
    staged: list[tuple[str, Staged]]
    rows: int


class _Writer:
    """What batch and streaming writers share."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._mapping = Mapping.of(options, schema)
        self._app_id = options.txn_app_id or str(uuid.uuid4())

    def write(self, iterator: Iterator[Any]) -> Written:
        """Stage or add the rows of one task."""
        app_id = self._name()
        target = _Task(self._options, app_id)
        rows = 0
        try:
            for batch in iterator:
                rows += batch.num_rows
                for queue, jobs, dues in jobs_of(batch, self._mapping, self._options):
                    target.take(queue, jobs, dues)
        finally:
            target.close()
        return Written(app_id, target.staged(), rows)

    def _name(self) -> str:
        return self._app_id

    def _publish(self, messages: list[Any], epoch: int) -> None:
        for queue, app_id, staged in _by_queue(messages):
            with connected(self._options, queue) as connection:
                self._transaction(connection, queue, app_id).commit(epoch, staged)

    def _drop(self, messages: list[Any]) -> None:
        for queue, app_id, staged in _by_queue(messages):
            with connected(self._options, queue) as connection:
                self._transaction(connection, queue, app_id).drop([one.key for one in staged])

    def _transaction(self, connection: BlockingConnection, queue: str, app_id: str) -> Transaction:
        options = self._options
        return Transaction(
            connection,
            Keys(queue),
            app_id,
            max_backlog=options.max_backlog,
            waits=options.on_backlog == "wait",
        )


class BatchWriter(_Writer, DataSourceArrowWriter):  # type: ignore[misc]
    """One write of a DataFrame."""

    def commit(self, messages: list[Any]) -> None:
        """All tasks are done: publish."""
        self._publish(messages, self._options.txn_version)

    def abort(self, messages: list[Any]) -> None:
        """A task failed, or `commit` did: drop what nobody will publish."""
        self._drop(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The writes of a streaming query, an epoch for each of its batches."""

    def _name(self) -> str:
        """The query's own id: it survives a restart, as its checkpoint does."""
        if self._options.txn_app_id is not None:
            return self._options.txn_app_id
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        if query_id is None:
            raise ChasquiError(
                "this Spark does not tell which query a task works for: give txnAppId, a stable "
                "name for the query"
            )
        return str(query_id)

    def commit(self, messages: list[Any], batchId: int) -> None:
        """All tasks of a batch are done: publish."""
        self._publish(messages, batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:
        """A task failed, or `commit` did: drop what nobody will publish."""
        self._drop(messages)


def _by_queue(messages: list[Any]) -> Iterator[tuple[str, str, list[Staged]]]:
    found: dict[tuple[str, str], list[Staged]] = {}
    for message in messages:
        if message is not None:  # a task that failed has none
            for queue, staged in message.staged:
                found.setdefault((queue, message.app_id), []).append(staged)
    for (queue, app_id), staged in found.items():
        yield queue, app_id, staged


class _Task:
    """The rows of one task on their way, a connection for each queue."""

    def __init__(self, options: Options, app_id: str) -> None:
        self._options = options
        self._app_id = app_id
        self._part = uuid.uuid4().hex
        self._queues: dict[str, _Stage | _Direct] = {}

    def take(self, queue: str, jobs: Batch, dues: list[int]) -> None:
        if not jobs.payloads:
            return
        target = self._queues.get(queue)
        if target is None:
            connection = open_connection(self._options, queue)
            if self._options.delivery == "exactly_once":
                key = stage_key(Keys(queue), self._app_id, self._part)
                target = _Stage(connection, key, int(self._options.stage_ttl) or 1)
            else:
                target = _Direct(connection, Keys(queue), self._options)
            self._queues[queue] = target
        target.take(jobs, dues)

    def staged(self) -> list[tuple[str, Staged]]:
        return [
            (queue, Staged(target.key, target.chunks, target.jobs))
            for queue, target in self._queues.items()
            if isinstance(target, _Stage)
        ]

    def close(self) -> None:
        for target in self._queues.values():
            target.connection.close()


class _Stage:
    """Puts jobs into a stage of the task's own, chunk by chunk."""

    def __init__(self, connection: BlockingConnection, key: bytes, ttl_s: int) -> None:
        self.connection = connection
        self.key = key
        self.chunks = 0
        self.jobs = 0
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
        # The time to live from the first chunk on: a task that dies later leaves nothing for ever.
        return commands(
            ("HSETNX", self.key, number, chunk),
            ("EXPIRE", self.key, self._ttl_s),
            effect=Effect.IDEMPOTENT,
        )


class _Direct:
    """Adds jobs to the queue at once, as a producer does."""

    def __init__(self, connection: BlockingConnection, keys: Keys, options: Options) -> None:
        self.connection = connection
        self._plans = Plans(keys)
        self._waits = options.on_backlog == "wait"
        ttl_s = int(options.dedup_ttl) if options.delivery == "dedup" else None
        self._add = AddOptions(max_backlog=options.max_backlog, unique_for_s=ttl_s)

    def take(self, jobs: Batch, dues: list[int]) -> None:
        for wait_s in full_waits_s():
            try:
                self.connection.run(self._plans.add(jobs, self._add))
            except QueueFullError:
                if not self._waits:
                    raise
                time.sleep(wait_s)
            else:
                return
