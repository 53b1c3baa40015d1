"""The acker: finished entries leave the stream in batches, with what their handlers returned.

While the lease is certain an acknowledgement is a plain XACKDEL. Once it may have lapsed, a script
checks for each entry that it is still ours: a late answer must not take a job from its new owner.
What cannot be sent is kept and tried again, through that script.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xackdel
from chasqui.connection import Connection
from chasqui.consumer.complaints import Complaints
from chasqui.consumer.holdings import Holdings
from chasqui.errors import AuthenticationError, ServerError
from chasqui.keys import Keys
from chasqui.request import Effect, Request

logger = logging.getLogger(__name__)

#: An acknowledgement waits at most this long for others to share its command.
ACK_IDLE_S: Final = 0.005
ACK_BATCH: Final = 1000
#: Results are moved by a script: fewer at a time, not to hold the server up.
RESULT_BATCH: Final = 100
AGAIN_S: Final = 0.2
#: What the scripts answer for an entry.
NOT_OURS: Final = ord("0")
NOT_STORED: Final = ord("2")
#: What XACKDEL answers for one.
NOT_PENDING: Final = -1
#: Owns nothing: no consumer has this name.
NOBODY: Final = " "


class Lost(Protocol):
    def __call__(self, entry_ids: list[bytes], /) -> None: ...


class Acker:
    """Collects finished entries and acknowledges them."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        group: str,
        consumer_id: str,
        result_ttl_ms: int,
        holdings: Holdings,
        on_lost: Lost,
        on_missing: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._group = group
        self._group_bytes = group.encode()
        self._consumer_id = consumer_id
        self._result_ttl_ms = result_ttl_ms
        self._holdings = holdings
        self._on_lost = on_lost
        #: Called when entries were not ours and may have been delivered to us again since.
        self._on_missing = on_missing
        self._ids: list[bytes] = []
        self._results: list[tuple[bytes, bytes, bytes]] = []  # entry id, key, value
        self._inflight: set[AckBatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._buffer = CommandBuffer()
        self.complaints = Complaints(logger, keys.queue)
        holdings.others.append(self.ids)

    @property
    def waiting(self) -> int:
        """Acknowledgements that the server has not confirmed."""
        return len(self._ids) + len(self._results) + sum(len(batch.ids) for batch in self._inflight)

    def ids(self) -> Iterator[bytes]:
        # In the order in which they move on, so that the heartbeat's thread misses none.
        ids, results = tuple(self._ids), tuple(self._results)
        batches = [batch.ids for batch in tuple(self._inflight)]
        return itertools.chain(ids, (entry_id for entry_id, _, _ in results), *batches)

    def done(self, entry_id: bytes) -> None:
        """The entry's run is over and nothing is to be kept of it."""
        ids = self._ids
        ids.append(entry_id)
        if len(ids) >= ACK_BATCH:
            self.run_once()
        elif self._timer is None:
            self._arm(ACK_IDLE_S)

    def done_with_result(self, entry_id: bytes, job_id: str, result: bytes) -> None:
        """The same, with a return value to store."""
        self._results.append((entry_id, self._keys.result(job_id), result))
        if len(self._results) >= RESULT_BATCH:
            self.run_once()
        elif self._timer is None:
            self._arm(ACK_IDLE_S)

    def run_once(self) -> int:
        """Send what has gathered; how many entries that was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        count = 0
        while self._results:
            part, self._results = self._results[:RESULT_BATCH], self._results[RESULT_BATCH:]
            count += len(part)
            self._post(AckBatch(self, [entry_id for entry_id, _, _ in part], part))
        if self._ids:
            ids, self._ids = self._ids, []
            count += len(ids)
            for start in range(0, len(ids), ACK_BATCH):
                self._post(AckBatch(self, ids[start : start + ACK_BATCH]))
        return count

    async def drain(self) -> None:
        """Send everything and wait until the server has confirmed it."""
        self.run_once()
        await self._empty.wait()

    def _arm(self, delay_s: float) -> None:
        self._empty.clear()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.run_once()

    def _post(self, batch: "AckBatch") -> None:
        self._empty.clear()
        self._inflight.add(batch)
        try:
            batch.request = self._request(batch)
            self._connection.post(batch.request, batch)
        except Exception as error:
            batch.set_exception(error)

    def _request(self, batch: "AckBatch") -> Request:
        stream = self._keys.stream
        owner = [self._group, self._consumer_id]
        if batch.results is not None:
            keys = [stream, *(key for _, key, _ in batch.results)]
            pairs = [part for entry_id, _, value in batch.results for part in (entry_id, value)]
            arguments: list[Any] = [*owner, self._result_ttl_ms, *pairs]
            batch.is_fenced = True
            return scripts.call(scripts.COMPLETE, keys, arguments, Effect.IDEMPOTENT)
        holdings = self._holdings
        sure_for_s = holdings.sure_for_s
        # Too short a time would only make the connection give up on a server that is slow. And a
        # beat may have come between the end of a run and this: the leases are certain again, but
        # what had been taken over before that is not ours.
        if (
            batch.must_fence
            or sure_for_s < holdings.lease_s / 6
            or (holdings.missing and not holdings.missing.isdisjoint(batch.ids))
        ):
            batch.is_fenced = True
            arguments = [self._group, batch.owner, *batch.ids]
            return scripts.call(scripts.ACK, [stream], arguments, Effect.IDEMPOTENT)
        profile = self._connection.profile
        if profile is not None and profile.xackdel:
            buffer = self._buffer
            xackdel(buffer, stream, self._group_bytes, batch.ids)
            # Not sent again for longer than the lease is certain: then the fence must decide.
            request = Request(bytes(buffer), Effect.IDEMPOTENT, timeout_s=sure_for_s)
            buffer.clear()
            return request
        arguments = [self._group, "", *batch.ids]
        return scripts.call(
            scripts.ACK, [stream], arguments, Effect.IDEMPOTENT, timeout_s=sure_for_s
        )

    def _finished(self, batch: "AckBatch", lost: list[bytes]) -> None:
        self._inflight.discard(batch)
        batch.request = None  # which holds the batch: it would wait for the garbage collector
        if lost:
            self._on_lost(lost)
        if not self._inflight and not self._ids and not self._results:
            self._empty.set()

    def _failed(self, batch: "AckBatch", error: Exception) -> None:
        """It may or may not have been applied: ask again, for those that are still ours."""
        if self._connection.is_closed or "NOGROUP" in str(error):
            # With the group went what we held: it is delivered anew if it is still in the stream.
            self._finished(batch, [])
            self._on_missing()
            return
        if isinstance(error, ServerError | AuthenticationError):
            count = len(batch.ids)
            self.complaints.warn(
                "queue %s: %d acks are refused and sent again: %s",
                self._keys.queue,
                count,
                error,
                acks=count,
            )
        else:
            fields = {"queue": self._keys.queue, "acks": len(batch.ids)}
            logger.debug("%d acks are sent again: %s", len(batch.ids), error, extra=fields)
        batch.must_fence = True
        loop = asyncio.get_running_loop()
        loop.call_later(AGAIN_S, self._again, batch)

    def _not_stored(self, count: int) -> None:
        self.complaints.warn(
            "queue %s: the server would not store the results of %d jobs",
            self._keys.queue,
            count,
            results=count,
        )

    def _again(self, batch: "AckBatch") -> None:
        if batch in self._inflight:
            self._post(batch)


class AckBatch:
    """Acknowledgements on their way; takes their reply."""

    __slots__ = (
        "_acker",
        "ids",
        "is_fenced",
        "must_fence",
        "owner",
        "request",
        "results",
        "sent_s",
    )

    def __init__(
        self,
        acker: Acker,
        ids: list[bytes],
        results: list[tuple[bytes, bytes, bytes]] | None = None,
    ) -> None:
        self._acker = acker
        #: Who must own them, where that is asked.
        self.owner = acker._consumer_id
        self.ids = ids
        self.results = results
        self.request: Request | None = None
        self.is_fenced = False
        self.must_fence = False
        self.sent_s = time.monotonic()

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        lost: list[bytes] = []
        if not self.is_fenced and isinstance(reply, list) and NOT_PENDING in reply:
            # Most are gone. Those whose consumer was deleted under them are left, and nobody's.
            # What is pending by now was delivered anew.
            self.must_fence, self.owner = True, NOBODY
            self._acker._post(self)
            return
        if self.is_fenced:
            lost = [
                entry_id for entry_id, flag in zip(self.ids, reply, strict=True) if flag == NOT_OURS
            ]
        # After a repeat a missing entry may well be one that the first try acknowledged.
        was_repeated = self.must_fence or (self.request is not None and self.request.is_in_doubt)
        if self.results is not None and NOT_STORED in reply:
            self._acker._not_stored(reply.count(NOT_STORED))
        self._acker._finished(self, [] if was_repeated else lost)
        if lost or (isinstance(reply, int) and reply < len(self.ids)):
            self._acker._on_missing()

    def set_exception(self, error: Exception, /) -> None:
        self._acker._failed(self, error)
