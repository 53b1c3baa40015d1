"""What the acker and the relocator share: entries whose runs are over gather, leave together in one
request, and stay in hand until the server has answered.

A settlement that fails may have been applied all the same. It is kept and sent again for as long as
the worker lives; by then only a script sends it, which checks whose each entry is.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from chasqui.consuming.held import Held
from chasqui.consuming.history import History
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import OutcomeUnknownError, UnreachableError
from chasqui.events.writer import EventWriter
from chasqui.scripts.flowing import FLOW_FAILED, NO_FLOW
from chasqui.scripts.settling import Consumer
from chasqui.transport.connection import Connection
from chasqui.transport.request import Request
from chasqui.transport.server import is_group_gone

logger = logging.getLogger(__name__)

#: How long a settlement that failed waits at first before it is sent again.
AGAIN_MIN_S: Final = 0.2
#: How long one waits, not yet encoded, while more is written than the server takes.
CONGESTED_S: Final = 0.01
#: What the log says of flows whose steps were settled, where that is no good.
_OF_FLOWS: Final = {
    NO_FLOW: "queue %s: the flow of job %s is gone: the job is settled, and nothing follows it",
    FLOW_FAILED: "queue %s: the flow of job %s cannot go on: its last job is in the dead-letter "
    "queue, until what failed is replayed and succeeds",
}


class Settlement:
    """Entries that one request settles; takes its reply."""

    __slots__ = ("_settler", "again_s", "ids", "request", "was_repeated")

    def __init__(self, settler: "Settler[Any]", ids: list[bytes]) -> None:
        self._settler = settler
        self.ids = ids
        self.request: Request | None = None
        #: It was sent before, and may have been applied: an entry that is missing now may be one
        #: that the first try settled.
        self.was_repeated = False
        #: How long to wait before it is sent again.
        self.again_s = AGAIN_MIN_S

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._settler._answered(self, reply)

    def set_exception(self, error: Exception, /) -> None:
        self._settler._failed(self, error)


S = TypeVar("S", bound=Settlement)


class Settler(ABC, Generic[S]):
    """Gathers entries, settles them, and keeps them until that is certain."""

    #: The longest wait before a settlement is sent again: each failure doubles it up to here.
    AGAIN_MAX_S: ClassVar[float] = AGAIN_MIN_S
    #: What the log says when the server refuses one, and its field with the number of entries.
    REFUSED: ClassVar[str]
    COUNTED_AS: ClassVar[str]

    def __init__(
        self,
        connection: Connection,
        consumer: Consumer,
        held: Held,
        *,
        events: EventWriter | None,
        history: History | None,
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._keys = consumer.keys
        self._held = held
        self._events = events
        self._history = history
        self._inflight: set[S] = set()
        #: Sends what has gathered; None if nothing has.
        self._timer: asyncio.Handle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.log = ThrottledLog(logger, self._keys.queue)
        held.settlers.append(self)

    @property
    def waiting(self) -> int:
        """Entries that the server has not confirmed as settled."""
        return len(self.ids())

    def ids(self) -> list[bytes]:
        """The same entries by their ids. The heartbeat's thread asks too: the order is that in
        which they move on, so that it misses none."""
        ids = [*self._gathered_ids()]
        return ids + [one for sent in tuple(self._inflight) for one in sent.ids]

    def run_once(self) -> int:
        """Send what has gathered; how many entries that was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events is not None:
            self._events.run_once()  # `active` and `failed` go before the end of the job
        settlements = self._take_gathered()
        for settlement in settlements:
            self._post(settlement)
        return sum(len(settlement.ids) for settlement in settlements)

    async def drain(self) -> None:
        """Send everything and wait until the server has confirmed it."""
        self.run_once()
        await self._empty.wait()

    # ── What differs ────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _gathered_ids(self) -> Iterable[bytes]:
        """The ids of what has gathered, from a snapshot."""

    @abstractmethod
    def _take_gathered(self) -> list[S]:
        """What has gathered, as settlements. They count as in flight before they are taken."""

    @abstractmethod
    def _request(self, settlement: S) -> Request: ...

    @abstractmethod
    def _settled(self, settlement: S, reply: Any) -> list[bytes]:
        """See to what the reply says; the entries that were not ours."""

    # ── On the way ──────────────────────────────────────────────────────────────────────────────

    def _post(self, settlement: S) -> None:
        self._empty.clear()
        connection = self._connection
        if connection.is_congested and not connection.is_closed:
            asyncio.get_running_loop().call_later(CONGESTED_S, self._again, settlement)
            return
        try:
            settlement.request = self._request(settlement)
            connection.post(settlement.request, settlement)
        except Exception as error:
            settlement.set_exception(error)

    def _again(self, settlement: S) -> None:
        if settlement in self._inflight:
            self._post(settlement)

    def _answered(self, settlement: S, reply: Any) -> None:
        if lost := self._settled(settlement, reply):
            self._held.must_recover = True
            request = settlement.request
            if not settlement.was_repeated and (request is None or not request.is_in_doubt):
                self._held.report_lost(lost)
        self._finished(settlement)

    def _failed(self, settlement: S, error: Exception) -> None:
        """It may or may not have been applied: send it again, unless there is nothing to settle."""
        if self._connection.is_closed or is_group_gone(error):
            # The group took what we held with it: what is in the stream is delivered anew.
            self._finished(settlement)
            self._held.must_recover = True
            return
        queue, count = self._keys.queue, len(settlement.ids)
        if isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection logs it
            fields = {"queue": queue, self.COUNTED_AS: count}
            logger.debug("%d entries are settled again: %s", count, error, extra=fields)
        else:
            self.log.warning(self.REFUSED, queue, count, error, **{self.COUNTED_AS: count})
        settlement.was_repeated = True
        settlement.request = None  # it is encoded anew: many may wait, and only once in memory
        asyncio.get_running_loop().call_later(settlement.again_s, self._again, settlement)
        settlement.again_s = min(settlement.again_s * 2, self.AGAIN_MAX_S)

    def _tell_of_flows(self, job_ids: Sequence[str], flags: bytes) -> None:
        """Log what became of the flows of steps that were settled, if that is no good."""
        for job_id, flag in zip(job_ids, flags, strict=True):
            if (text := _OF_FLOWS.get(flag)) is not None:
                self.log.warning(text, self._keys.queue, job_id, job_id=job_id)

    def _finished(self, settlement: S) -> None:
        self._inflight.discard(settlement)
        settlement.request = None  # which holds it in turn: it would wait for the garbage collector
        if not self._inflight and self._timer is None:
            self._empty.set()
