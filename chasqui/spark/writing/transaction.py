"""Exactly-once writes: rows are staged by tasks, recorded by the driver, then published.

A write is known by an application id and an epoch. The first run that records an epoch wins. Any
other run of that epoch publishes what was recorded, or finds it done. One atomic step moves a chunk
of jobs out of its stage and into the queue, so after a crash the next run goes on from there.

A stage is a hash of numbered chunks, each one string. The server stores a chunk in the time that a
list takes for one job of it, and a chunk that is sent twice is stored once. A published chunk
leaves an empty string in its place until all is done, so a late copy finds its number taken.

Beside the record, a hash lists the stages of all runs of the write, with the epoch of each. The
stages of a killed run expire. They are dropped earlier if their epoch is done, since nothing can
publish them then.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.scripts import spark as scripts
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.writing.records import read_record, record_key, staged_chunks, stages_key
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Request

#: How long the last epoch of a write is remembered once it is published.
REMEMBERED_S: Final = 30 * 86_400
#: Chunks in flight at once: the server finds the next one when it is done with this one, and still
#: serves other clients between the two.
_AHEAD: Final = 2


class StageLostError(ChasquiError):
    """Staged rows are gone: they expired, or the server lost them."""


class DiscardedError(ChasquiError):
    """A write was discarded while it was running."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged: the key, its chunks, their jobs."""

    key: bytes
    chunks: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Step:
    """How many jobs of a write are published."""

    published: int
    jobs: int
    #: How many jobs wait in the queue, if the write waits for room; else None.
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What a write did in one queue."""

    #: Jobs that this run has published, of this epoch and of an earlier one.
    added: int
    earlier: int = 0
    #: Jobs of this epoch that other runs have published.
    found: int = 0
    #: Whether this run published what another one had recorded.
    is_resumed: bool = False
    #: If the write was done before this run: when (unix seconds), and in which epoch.
    done_s: int | None = None
    done_epoch: int | None = None


OnStep: TypeAlias = Callable[[Step], None]


class Transaction:
    """One write into one queue, by one run."""

    def __init__(
        self,
        connection: BlockingConnection,
        keys: Keys,
        app_id: str,
        run: str,
        backlog: Backlog,
        on_step: OnStep | None = None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._app_id = app_id
        self._run = run
        self._record = record_key(keys, app_id)
        self._stages = stages_key(keys, app_id)
        self._backlog = backlog
        self._on_step = on_step

    def commit(self, epoch: int, staged: Sequence[Staged], *, is_whole: bool = True) -> Published:
        """Publish an epoch, unless it is published.

        Safe to repeat after any failure, from any process. `is_whole` is false if a task saw a
        record of the epoch and so staged nothing: then that record is what gets published.
        """
        staged = [one for one in staged if one.jobs]
        if not staged and is_whole:
            return Published(0)
        chunks, jobs = {one.key: one.chunks for one in staged}, sum(one.jobs for one in staged)
        earlier = 0
        while True:
            state, *rest = self._connection.call(
                scripts.begin(self._record, epoch, jobs, chunks, is_whole=is_whole)
            )
            if state == b"lost":
                raise self._lost(rest[0])
            if state == b"gone":
                raise self._discarded()
            if state == b"mine":
                added = self._publish(epoch, jobs, chunks)
                return Published(added, earlier, jobs - added)
            if state == b"done":
                self.drop(list(chunks))
                last, known, done_s = rest
                found = known if last == epoch else 0
                return Published(0, earlier, found, done_s=done_s, done_epoch=last)
            last, known, _, *recorded = rest
            added = self._resume(last, known, recorded)
            if last == epoch:
                self.drop(list(chunks))
                return Published(added, earlier, known - added, is_resumed=True)
            earlier += added

    def resume(self) -> Published | None:
        """Publish a record that was never finished; None if there is none."""
        record = self._connection.run(read_record(self._keys, self._app_id))
        if record is None or record.state != "publishing":
            return None
        added = self._resume(record.epoch, record.jobs, record.keys)
        return Published(added, found=record.jobs - added, is_resumed=True)

    def drop(self, staged: Sequence[bytes]) -> int:
        """Drop stages that no record needs; how many."""
        if not staged:
            return 0
        dropped: int = self._connection.call(scripts.drop(self._record, self._stages, staged))
        return dropped

    def abandon(self) -> int:
        """Drop the stages of this run that no record needs; how many."""
        listed = self._connection.execute("HKEYS", self._stages, effect=Effect.READ)
        return self.drop([key for key in listed if b":%b-" % self._run.encode() in key])

    def _resume(self, epoch: int, jobs: int, keys: Sequence[bytes]) -> int:
        chunks = self._connection.run(staged_chunks(keys))
        return self._publish(epoch, jobs, dict(zip(keys, chunks, strict=True)))

    def _publish(self, epoch: int, jobs: int, chunks: Mapping[bytes, int]) -> int:
        """Publish these stages (key to chunks); how many of their jobs this run has published."""
        left = [(key, number) for key, count in chunks.items() for number in range(count)]
        total = 0
        while left:
            replies = self._connection.call_each(self._moves(epoch, jobs, left), _AHEAD)
            moved, depth, unpublished, undone = 0, 0, 0, []
            for chunk, reply in zip(left, replies, strict=False):
                if isinstance(reply, BaseException):
                    raise reply
                if reply == [-2]:
                    raise self._lost(chunk[0])
                if reply == [-1]:  # another run ended it: `done` below says how
                    continue
                moved += reply[0]
                if _is_left(reply):
                    undone.append(chunk)
                    depth, unpublished = reply[2:4]
            total += moved
            left = undone + left[len(replies) :]
            if moved:
                self._backlog.moved()
            elif undone:
                self._say(Step(jobs - unpublished, jobs, depth))
                self._backlog.wait(depth)
        state, *rest = self._connection.call(
            scripts.done(self._record, self._stages, chunks, epoch, REMEMBERED_S, self._run)
        )
        if state == b"left":
            raise self._lost(min(chunks, default=self._record))
        if state == b"gone":
            raise self._discarded()
        # The server counts what this run has moved, even if a reply was lost.
        return int(rest[0]) if rest[0] >= 0 else total

    def _moves(
        self, epoch: int, jobs: int, chunks: Iterable[tuple[bytes, int]]
    ) -> Iterator[Request]:
        """Requests that publish these chunks one by one, up to the first that finds no room."""
        sent: deque[Request] = deque(maxlen=_AHEAD)
        for key, number in chunks:
            if any(_is_left(one.outcome) for one in sent):
                return
            if sent and isinstance(sent[0].outcome, list) and len(sent[0].outcome) == 4:
                self._say(Step(jobs - sent[0].outcome[3], jobs))
            most = self._backlog.most
            request = scripts.publish(self._keys, self._record, key, epoch, number, most, self._run)
            sent.append(request)
            yield request

    def _say(self, step: Step) -> None:
        if self._on_step is not None:
            self._on_step(step)

    def _lost(self, key: bytes) -> StageLostError:
        return StageLostError(
            f"rows staged for queue {self._keys.queue!r} are gone ({key.decode()}): run the batch "
            "again, with a longer stageTtl if it took that long"
        )

    def _discarded(self) -> DiscardedError:
        return DiscardedError(
            f"write {self._app_id!r} into queue {self._keys.queue!r} was discarded meanwhile: what "
            "it had published stays in the queue, the rest is gone"
        )


def forget(keys: Keys, app_id: str) -> Request:
    """Forgets a write and drops the stages of all its runs; replies how many stages."""
    return scripts.forget(record_key(keys, app_id), stages_key(keys, app_id))


def _is_left(reply: Any) -> bool:
    """Whether some jobs of a chunk found no room."""
    return isinstance(reply, list) and reply[1:2] == [1]
