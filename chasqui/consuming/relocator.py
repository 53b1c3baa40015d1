"""The relocator: entries whose run failed leave the stream, for the delayed set or the DLQ.

Each move is one script that makes the copy first and checks that the entry is still ours. Moves of
one turn of the loop share a command. One that the server refuses stays in hand and is tried again.
"""

import asyncio
from typing import ClassVar

from chasqui.consuming.held import Held
from chasqui.consuming.history import History
from chasqui.consuming.moves import Move, bury, bury_steps, parts, retry
from chasqui.consuming.settler import Settlement, Settler
from chasqui.events.writer import EventWriter
from chasqui.scripts.flowing import Bounds
from chasqui.scripts.settling import NOT_OURS, Consumer
from chasqui.transport.connection import Connection
from chasqui.transport.request import Request


class Moves(Settlement):
    """Moves to one place that leave together."""

    __slots__ = ("moves",)

    def __init__(self, relocator: "Relocator", moves: list[Move]) -> None:
        super().__init__(relocator, [move.entry.id for move in moves])
        self.moves = moves


class Relocator(Settler[Moves]):
    """Moves entries out of the stream."""

    AGAIN_MAX_S: ClassVar[float] = 5.0
    REFUSED = "queue %s: %d retries or dead jobs could not be moved, and are tried again: %s"
    COUNTED_AS = "entries"

    def __init__(
        self,
        connection: Connection,
        consumer: Consumer,
        held: Held,
        *,
        events: EventWriter | None,
        history: History | None,
        bounds: Bounds,
    ) -> None:
        super().__init__(connection, consumer, held, events=events, history=history)
        self._bounds = bounds
        self._moves: list[Move] = []

    def move(self, move: Move) -> None:
        """Move an entry, together with the others of this turn."""
        self._moves.append(move)
        if self._timer is None:
            self._empty.clear()
            self._timer = asyncio.get_running_loop().call_soon(self.run_once)

    def _gathered_ids(self) -> list[bytes]:
        return [move.entry.id for move in self._moves[:]]

    def _take_gathered(self) -> list[Moves]:
        gathered = [Moves(self, part) for part in parts(self._moves)]
        self._inflight.update(gathered)
        self._moves = []
        return gathered

    def _request(self, settlement: Moves) -> Request:
        moves = settlement.moves
        if moves[0].delay_ms is not None:
            return retry(self._consumer, moves)
        max_len = self._bounds.dlq_max_len
        events, history = self._events is not None, self._history is not None
        if moves[0].step is not None:
            return bury_steps(self._consumer, moves, self._bounds, events=events, history=history)
        return bury(self._consumer, moves, max_len=max_len, events=events, history=history)

    def _settled(self, settlement: Moves, reply: bytes) -> list[bytes]:
        if settlement.moves[0].delay_ms is None:
            for log in (self._events, self._history):
                if log is not None:
                    log.wrote(len(settlement.moves))
        lost: list[bytes] = []
        for move, flag in zip(settlement.moves, reply, strict=True):
            if flag == NOT_OURS:
                lost.append(move.entry.id)
            else:
                move.on_moved()
        self._tell_of_flows([move.entry.job_id for move in settlement.moves], reply)
        return lost
