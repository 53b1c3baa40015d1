"""Writers: tasks stage or add rows, the driver publishes what they staged."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.spark.connections import connected
from chasqui.spark.options import Options
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.writing.records import read_record
from chasqui.spark.writing.rows import Mapping, jobs_of
from chasqui.spark.writing.tasks import Task, Written
from chasqui.spark.writing.transaction import OnStep, Published, Staged, Transaction
from chasqui.transport.blocking import BlockingConnection

#: Internal names of Spark: the streaming query that a task works for, and its batch.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What a write did."""

    #: Jobs that this call has added.
    added: int
    #: Rows that were there before and were not added again: another run of the same write added
    #: them, or with dedup their ids were taken.
    found: int = 0
    #: Whether all rows were written before this call, and when.
    already: bool = False
    written_at: datetime | None = None
    #: Whether this call published what another run of the same write had recorded.
    resumed: bool = False
    #: Jobs of an earlier, unfinished version of the write that this call has published.
    earlier: int = 0
    queues: tuple[str, ...] = ()
    delivery: str = "exactly_once"
    #: The name of the write and its version, if it has one; the later version that was written, if
    #: that is why nothing was added.
    txn: str | None = None
    version: int | None = None
    later_version: int | None = None


class _Writer:
    """What batch and streaming writers share."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._mapping = Mapping.of(options, schema)
        self._app_id = options.txn_app_id or str(uuid.uuid4())
        self._run = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> Written:
        """Stage or add the rows of one task."""
        app_id = self._name()
        target = Task(self._options, app_id, self._run, self._epoch())
        rows = 0
        try:
            for batch in iterator:
                rows += batch.num_rows
                for queue, jobs, dues in jobs_of(batch, self._mapping, self._options):
                    target.take(queue, jobs, dues)
        finally:
            target.close()
        return target.written(rows)

    def _name(self) -> str:
        return self._app_id

    def _epoch(self) -> int | None:
        """The version or batch that is written, as far as a task knows."""
        return self._options.txn_version

    def _publish(
        self, messages: Sequence[Any], epoch: int, on_step: OnStep | None = None
    ) -> dict[str, Published]:
        found = {}
        for queue, app_id, staged, is_whole in _by_queue(messages):
            with connected(self._options, queue) as connection:
                write = self._transaction(connection, queue, app_id, on_step)
                found[queue] = write.commit(epoch, staged, is_whole=is_whole)
        return found

    def _drop(self, messages: Sequence[Any]) -> None:
        for queue, app_id, staged, _ in _by_queue(messages):
            with connected(self._options, queue) as connection:
                self._transaction(connection, queue, app_id).drop([one.key for one in staged])

    def _transaction(
        self, connection: BlockingConnection, queue: str, app_id: str, on_step: OnStep | None = None
    ) -> Transaction:
        backlog = Backlog.of(self._options, queue)
        return Transaction(connection, Keys(queue), app_id, self._run, backlog, on_step)


class BatchWriter(_Writer, DataSourceArrowWriter):  # type: ignore[misc]
    """One write of a DataFrame."""

    def commit(self, messages: Sequence[Any], on_step: OnStep | None = None) -> Enqueued:
        """All tasks are done: publish."""
        options = self._options
        written = [one for one in messages if one is not None]
        if options.delivery != "exactly_once":
            taken = sum(one.taken for one in written)
            return Enqueued(
                added=sum(one.rows for one in written) - taken,
                found=taken,
                queues=tuple(sorted({queue for one in written for queue in one.queues})),
                delivery=options.delivery,
            )
        return _outcome(options, self._app_id, self._publish(written, options.txn_version, on_step))

    def abort(self, messages: Sequence[Any]) -> None:
        """A task or `commit` failed: drop what will not be published."""
        self._drop(messages)

    def abandon(self) -> None:
        """Drop all that this run has staged, when it is not known what its tasks did.

        With a column of queues the queues are not known either: what is staged there expires.
        """
        if self._options.delivery == "exactly_once":
            for queue in self._options.queue:
                with connected(self._options, queue) as connection:
                    self._transaction(connection, queue, self._app_id).abandon()


def finish_earlier(options: Options, on_step: OnStep | None = None) -> Enqueued | None:
    """The outcome of a write that an earlier run has written or recorded; None if there is none.

    What is left of a recorded write is published now. With a column of queues the tasks find out,
    each for the queues of its rows.
    """
    if options.delivery != "exactly_once" or options.txn_app_id is None or not options.queue:
        return None
    app_id, queue = options.txn_app_id, options.queue[0]
    with connected(options, queue) as connection:
        record = connection.run(read_record(Keys(queue), app_id))
        if record is None or record.epoch < options.txn_version:
            return None
        backlog = Backlog.of(options, queue)
        write = Transaction(connection, Keys(queue), app_id, uuid.uuid4().hex, backlog, on_step)
        found = write.commit(options.txn_version, [], is_whole=False)
    return _outcome(options, app_id, {queue: found})


def _outcome(options: Options, app_id: str, found: dict[str, Published]) -> Enqueued:
    parts = found.values()
    is_already = bool(parts) and all(one.done_s is not None for one in parts)
    done_s = max((one.done_s or 0 for one in parts), default=0)
    last = max((one.done_epoch or 0 for one in parts), default=0)
    return Enqueued(
        added=sum(one.added for one in parts),
        found=sum(one.found for one in parts),
        already=is_already,
        written_at=datetime.fromtimestamp(done_s, UTC) if is_already else None,
        resumed=any(one.is_resumed for one in parts),
        earlier=sum(one.earlier for one in parts),
        queues=tuple(sorted(found)),
        txn=app_id,
        version=options.txn_version,
        later_version=last if last > options.txn_version else None,
    )


class StreamWriter(_Writer, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The writes of a streaming query, an epoch for each of its batches."""

    def _name(self) -> str:
        """The query's id, which survives a restart as its checkpoint does."""
        if self._options.txn_app_id is not None:
            return self._options.txn_app_id
        query_id = _local_property(_QUERY_ID)
        if query_id is None:
            raise ChasquiError(
                "this Spark does not tell which query a task works for: give txnAppId, a stable "
                "name for the query"
            )
        return query_id

    def _epoch(self) -> int | None:
        batch_id = _local_property(_BATCH_ID)
        return int(batch_id) if batch_id is not None and batch_id.isdigit() else None

    def commit(self, messages: list[Any], batchId: int) -> None:
        """All tasks of a batch are done: publish."""
        self._publish(messages, batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:
        """A task or `commit` failed: drop what will not be published."""
        self._drop(messages)


def _local_property(name: str) -> str | None:
    context = TaskContext.get()
    value = None if context is None else context.getLocalProperty(name)
    return None if value is None else str(value)


def _by_queue(messages: Sequence[Any]) -> Iterator[tuple[str, str, list[Staged], bool]]:
    """Per queue: the write, what was staged, and whether all rows were."""
    staged: dict[tuple[str, str], list[Staged]] = {}
    partial = set[tuple[str, str]]()
    for message in messages:
        if message is not None:  # a task that failed has none
            for queue, one in message.staged:
                staged.setdefault((queue, message.app_id), []).append(one)
            for queue in message.recorded:
                staged.setdefault((queue, message.app_id), [])
                partial.add((queue, message.app_id))
    for (queue, app_id), found in staged.items():
        yield queue, app_id, found, (queue, app_id) not in partial
