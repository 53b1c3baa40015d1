"""The relocator: entries whose run failed leave the stream, for the delayed set or the DLQ.

Each move is one script that makes the copy first and checks that the entry is still ours. Moves of
one turn of the loop share a command. One that the server refuses stays in hand and is tried again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from chasqui._core.command import cut
from chasqui.transport.connection import Connection
from chasqui.consuming.throttled_log import Complaints
from chasqui.consuming.history import History
from chasqui.consumer.holdings import Holdings
from chasqui.consumer.moves import MOVED, Move, bury, retry
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.events.writer import EventWriter
from chasqui.model.keys import Keys
from chasqui.transport.request import Request

logger = logging.getLogger(__name__)

#: What one script moves at most, in entries and bytes of envelopes: it holds the server up.
MOVE_BATCH: Final = 100
MOVE_BYTES: Final = 1 << 20
AGAIN_MIN_S, AGAIN_MAX_S = 0.2, 5.0
#: How long a batch waits, not yet encoded, while more is written than the server takes.
CONGESTED_S: Final = 0.01


class Relocator:
    """Moves entries out of the stream, in batches."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        group: str,
        consumer_id: str,
        dlq_max_stream_len: int | None,
        holdings: Holdings,
        on_lost: Callable[[list[bytes]], None],
        on_missing: Callable[[], None],
        *,
        events: EventWriter | None,
        history: History | None = None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._group = group
        self._consumer_id = consumer_id
        self._dlq_max_stream_len = dlq_max_stream_len
        self._events = events
        self._history = history
        self._on_lost = on_lost
        #: Called when entries were not ours and may have been delivered to us again since.
        self._on_missing = on_missing
        self._moves: list[Move] = []
        self._inflight: set[MoveBatch] = set()
        self._is_due = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.complaints = Complaints(logger, keys.queue)
        holdings.others.append(self.ids)

    @property
    def waiting(self) -> int:
        """Entries that have not arrived where they are going."""
        return len(self._moves) + sum(len(batch.moves) for batch in self._inflight)

    def ids(self) -> Iterator[bytes]:
        # In the order in which they move on, so that the heartbeat's thread misses none.
        parts = [self._moves[:], *(batch.moves for batch in tuple(self._inflight))]
        return (move.entry.id for moves in parts for move in moves)

    def move(self, move: Move) -> None:
        """Move an entry, together with the others of this turn."""
        self._moves.append(move)
        self._empty.clear()
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.run_once)

    def run_once(self) -> int:
        """Send the moves that have gathered; how many there were."""
        self._is_due = False
        if self._events is not None:
            self._events.run_once()  # what a run told goes before its job moves on
        moves = self._moves
        retries = [move for move in moves if move.delay_ms is not None]
        burials = [move for move in moves if move.delay_ms is None]
        batches: list[MoveBatch] = []
        for kind in (retries, burials):
            envelopes = [move.entry.envelope or b"" for move in kind]
            parts = cut(envelopes, MOVE_BATCH, MOVE_BYTES)
            batches += (MoveBatch(self, kind[part]) for part in parts)
        self._inflight.update(batches)
        self._moves = []
        for batch in batches:
            self._post(batch)
        return len(moves)

    async def drain(self) -> None:
        """Wait until every move has been made."""
        await self._empty.wait()

    def _post(self, batch: "MoveBatch") -> None:
        connection = self._connection
        if connection.is_congested and not connection.is_closed:
            asyncio.get_running_loop().call_later(CONGESTED_S, self._again, batch)
            return
        try:
            batch.request = self._request(batch.moves)
            connection.post(batch.request, batch)
        except Exception as error:
            batch.set_exception(error)

    def _request(self, moves: list[Move]) -> Request:
        owned = self._keys, self._group, self._consumer_id, moves
        if moves[0].delay_ms is not None:
            return retry(*owned)
        tells = self._events is not None
        keeps = self._history is not None
        return bury(*owned, max_len=self._dlq_max_stream_len, tells=tells, keeps=keeps)

    def _answered(self, batch: "MoveBatch", flags: bytes) -> None:
        if batch.moves[0].delay_ms is None:
            for log in (self._events, self._history):
                if log is not None:
                    log.wrote(len(batch.moves))
        lost = []
        # After a repeat a missing entry may well be one that the first try moved.
        was_repeated = batch.was_repeated or (
            batch.request is not None and batch.request.is_in_doubt
        )
        for move, flag in zip(batch.moves, flags, strict=True):
            if flag == MOVED:
                move.on_moved()
            else:
                lost.append(move.entry.id)
        if lost and not was_repeated:
            self._on_lost(lost)
        self._finished(batch)
        if lost:
            self._on_missing()

    def _finished(self, batch: "MoveBatch") -> None:
        self._inflight.discard(batch)
        batch.request = None  # which holds the batch: it would wait for the garbage collector
        if not self._inflight and not self._moves:
            self._empty.set()

    def _failed(self, batch: "MoveBatch", error: Exception) -> None:
        if self._connection.is_closed or "NOGROUP" in str(error):
            # With the group went what we held: it is delivered anew if it is still in the stream.
            self._finished(batch)
            self._on_missing()
            return
        if not isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection tells
            self.complaints.warn(
                "queue %s: %d retries or dead jobs could not be moved, and are tried again: %s",
                self._keys.queue,
                len(batch.moves),
                error,
                entries=len(batch.moves),
            )
        batch.was_repeated = True
        batch.request = None  # it is encoded anew: many may wait, and only once in memory
        asyncio.get_running_loop().call_later(batch.again_s, self._again, batch)
        batch.again_s = min(batch.again_s * 2, AGAIN_MAX_S)

    def _again(self, batch: "MoveBatch") -> None:
        if batch in self._inflight:
            self._post(batch)


class MoveBatch:
    """Moves on their way; takes their reply."""

    __slots__ = ("_relocator", "again_s", "moves", "request", "was_repeated")

    def __init__(self, relocator: Relocator, moves: list[Move]) -> None:
        self._relocator = relocator
        self.moves = moves
        self.request: Request | None = None
        self.was_repeated = False
        #: How long to wait before it is tried again.
        self.again_s = AGAIN_MIN_S

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._relocator._answered(self, reply)

    def set_exception(self, error: Exception, /) -> None:
        self._relocator._failed(self, error)
