"""Exactly-once writes: rows are staged by tasks, recorded by the driver, then published.

A write is known by an application id and an epoch. The first record of an epoch wins, whoever made
it; everybody else who comes with that epoch publishes what was recorded, or finds it done. Moving a
chunk of jobs out of its stage and into the queue is one atomic step, so whoever dies on the way,
the next one goes on where it stopped.

A stage is a hash of numbered chunks, each one string: the server stores a chunk in the time that a
list takes for one job of it, and one that is sent twice is there once. What is published leaves an
empty string in its place until all is done, so a chunk that comes late finds its place taken.

Beside the record lies a list of the stages of all runs of the write, with the epoch of each. What a
killed run has staged expires. It goes earlier once its epoch is done: nobody can publish it then.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from chasqui import scripts
from chasqui.blocking import BlockingConnection
from chasqui.errors import ChasquiError
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Request
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.writing.records import read_record, record_key, staged_chunks, stages_key

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


class DiscardedError(ChasquiError):
    """Somebody has discarded a write while it was at work."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged: the key, its chunks, their jobs."""

    key: bytes
    chunks: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Step:
    """How far the publishing of a write is."""

    published: int
    jobs: int
    #: How many jobs wait in the queue, while that is why it waits.
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a write into one queue."""

    #: Jobs of this epoch that this run has published, and those of an earlier one.
    added: int
    earlier: int = 0
    #: Jobs of this epoch that other runs have published.
    found: int = 0
    #: Whether what another run had recorded was published.
    is_resumed: bool = False
    #: When it was done, if it was before this run came (unix seconds), and the epoch that was.
    done_s: int | None = None
    done_epoch: int | None = None


Tell: TypeAlias = Callable[[Step], None]


class Transaction:
    """One write into one queue, by one run."""

    def __init__(
        self,
        connection: BlockingConnection,
        keys: Keys,
        app_id: str,
        run: str,
        backlog: Backlog,
        tell: Tell | None = None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._app_id = app_id
        self._run = run
        self._record = record_key(keys, app_id)
        self._stages = stages_key(keys, app_id)
        self._backlog = backlog
        self._tell = tell

    def commit(self, epoch: int, staged: Sequence[Staged], *, is_whole: bool = True) -> Published:
        """Publish an epoch, unless it was.

        Safe to repeat after any failure, from any process. `is_whole` is false if a task staged
        nothing since it saw a record of the epoch: then that record is what is published.
        """
        staged = [one for one in staged if one.jobs]
        if not staged and is_whole:
            return Published(0)
        keys, jobs = [one.key for one in staged], sum(one.jobs for one in staged)
        chunks = [one.chunks for one in staged]
        begin = [epoch, jobs, int(is_whole), *chunks]
        earlier = 0
        while True:
            answer, *rest = self._connection.call(
                scripts.call(BEGIN, [self._record, *keys], begin, Effect.IDEMPOTENT)
            )
            if answer == b"lost":
                raise self._lost(rest[0])
            if answer == b"gone":
                raise self._discarded()
            if answer == b"mine":
                added = self._publish(epoch, jobs, dict(zip(keys, chunks, strict=True)))
                return Published(added, earlier, jobs - added)
            if answer == b"done":
                self.drop(keys)
                last, known, done_s = rest
                found = known if last == epoch else 0
                return Published(0, earlier, found, done_s=done_s, done_epoch=last)
            last, known, _, *recorded = rest
            added = self._resume(last, known, recorded)
            if last == epoch:
                self.drop(keys)
                return Published(added, earlier, known - added, is_resumed=True)
            earlier += added

    def resume(self) -> Published | None:
        """Publish what was recorded and never finished; None if there is no such record."""
        record = self._connection.run(read_record(self._keys, self._app_id))
        if record is None or record.state != "publishing":
            return None
        added = self._resume(record.epoch, record.jobs, record.keys)
        return Published(added, found=record.jobs - added, is_resumed=True)

    def drop(self, staged: Sequence[bytes]) -> int:
        """Drop stages that no record needs; how many."""
        if not staged:
            return 0
        names = [self._record, self._stages, *staged]
        dropped: int = self._connection.call(scripts.call(DROP, names, [""], Effect.IDEMPOTENT))
        return dropped

    def abandon(self) -> int:
        """Drop what tasks of this run have staged and no record needs; how many stages."""
        listed = self._connection.execute("HKEYS", self._stages, effect=Effect.READ)
        return self.drop([key for key in listed if b":%b-" % self._run.encode() in key])

    def _resume(self, epoch: int, jobs: int, keys: Sequence[bytes]) -> int:
        chunks = self._connection.run(staged_chunks(keys))
        return self._publish(epoch, jobs, dict(zip(keys, chunks, strict=True)))

    def _publish(self, epoch: int, jobs: int, chunks: Mapping[bytes, int]) -> int:
        """Publish what is staged under these keys, in so many chunks each; how many of these jobs
        this run has published."""
        left = [(key, number) for key, count in chunks.items() for number in range(count)]
        total = 0
        while left:
            replies = self._connection.call_each(self._moves(epoch, jobs, left), _AHEAD)
            moved, depth, unpublished, undone = 0, 0, 0, []
            for place, reply in zip(left, replies, strict=False):
                if isinstance(reply, BaseException):
                    raise reply
                if reply == [-2]:
                    raise self._lost(place[0])
                if reply == [-1]:  # it is not ours to publish any more: see below
                    continue
                moved += reply[0]
                if _is_left(reply):
                    undone.append(place)
                    depth, unpublished = reply[2:4]
            total += moved
            left = undone + left[len(replies) :]
            if moved:
                self._backlog.moved()
            elif undone:
                self._say(Step(jobs - unpublished, jobs, depth))
                self._backlog.wait(depth)
        state, *rest = self._connection.call(
            scripts.call(
                DONE,
                [self._record, self._stages, *chunks],
                [epoch, REMEMBERED_S, self._run],
                Effect.IDEMPOTENT,
            )
        )
        if state == b"left":
            raise self._lost(min(chunks, default=self._record))
        if state == b"gone":
            raise self._discarded()
        # The server counts what this run has moved, also where a reply was lost.
        return int(rest[0]) if rest[0] >= 0 else total

    def _moves(
        self, epoch: int, jobs: int, chunks: Iterable[tuple[bytes, int]]
    ) -> Iterator[Request]:
        """What publishes these chunks one by one, up to the first that finds no room."""
        sent: deque[Request] = deque(maxlen=_AHEAD)
        for key, number in chunks:
            if any(_is_left(one.outcome) for one in sent):
                return
            if sent and isinstance(sent[0].outcome, list) and len(sent[0].outcome) == 4:
                self._say(Step(jobs - sent[0].outcome[3], jobs))
            names = [self._record, key, self._keys.stream, self._keys.delayed, self._keys.wake]
            arguments = (epoch, number, self._backlog.most, self._run)
            sent.append(scripts.call(PUBLISH, names, arguments, Effect.IDEMPOTENT))
            yield sent[-1]

    def _say(self, step: Step) -> None:
        if self._tell is not None:
            self._tell(step)

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
    """Forgets a write and drops all that its runs have staged; the reply is how many stages."""
    names = [record_key(keys, app_id), stages_key(keys, app_id)]
    return scripts.call(DROP, names, ["forget"], Effect.IDEMPOTENT)


def _is_left(reply: Any) -> bool:
    """Whether some jobs of a chunk found no room."""
    return isinstance(reply, list) and reply[1:2] == [1]
