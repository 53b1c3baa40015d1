"""The acker: takes finished entries out of the stream in batches, stores their results and writes
their `completed` events.

While the lease is certain, an acknowledgement is a plain XACKDEL with the events behind it in the
same request: after a lost link all of it is sent again. Once the lease may have lapsed, a script
checks that each entry is still ours, and writes its event only then: a late answer must not take a
job from its new owner, nor say that it is done. That script also stores results, and repeats what
could not be sent. Where the history is kept it is the only way: the entry there is a part of it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import cut, evalsha, xackdel, xadd_run_event
from chasqui._core.entry import Entry
from chasqui._core.reply import INCOMPLETE, ReplyError, ReplyReader
from chasqui.transport.connection import Connection
from chasqui.consuming.throttled_log import Complaints
from chasqui.consuming.history import History
from chasqui.consumer.holdings import Holdings
from chasqui.errors import AuthenticationError, ServerError
from chasqui.events.writer import COMPLETED, EventWriter
from chasqui.model.keys import (
    EVENT_ATTEMPT,
    EVENT_CREATED,
    EVENT_DURATION_US,
    EVENT_JOB_ID,
    EVENT_TS,
    NAME,
    Keys,
)
from chasqui.metrics import JobOutcome, MetricsSink, OutcomeKind
from chasqui.transport.request import Effect, Request
from chasqui.transport.server import ServerProfile, exception_for

logger = logging.getLogger(__name__)

#: An acknowledgement waits at most this long for others to share its command.
ACK_IDLE_S: Final = 0.005
ACK_BATCH: Final = 1000
#: Results are moved by a script: fewer at a time and not too many bytes, not to hold the server up.
RESULT_BATCH: Final = 100
RESULT_BYTES: Final = 1 << 20
AGAIN_S: Final = 0.2
#: How long a batch waits, not yet encoded, while more is written than the server takes.
CONGESTED_S: Final = 0.01
#: What the scripts answer for an entry.
NOT_OURS: Final = ord("0")
NOT_STORED: Final = ord("2")
#: What XACKDEL answers for one.
NOT_PENDING: Final = -1
#: Owns nothing: no consumer has this name.
NOBODY: Final = " "

#: What COMPLETE tells of a job: its id, ts, name, attempt, duration_us, created, and its envelope
#: where the history is kept; or nothing.
Told: TypeAlias = tuple[Any, ...]


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
        *,
        events: EventWriter | None,
        metrics: MetricsSink | None,
        history: History | None = None,
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
        self._events = events
        self._metrics = metrics
        self._history = history
        self._ids: list[bytes] = []
        #: The XADD of an event for each of them, if there are events.
        self._told = CommandBuffer()
        #: Entry id, key of the result if there is one, its value, event: what only COMPLETE can do.
        self._results: list[tuple[bytes, bytes | None, bytes, Told]] = []
        self._result_bytes = 0
        #: By entry id, runs that may not count: they are reported once the server has answered.
        self._outcomes: dict[bytes, JobOutcome] = {}
        self._inflight: set[AckBatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._buffer = CommandBuffer()
        #: The link whose server has seen the source of ACK.
        self._taught: ServerProfile | None = None
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
        return itertools.chain(ids, (one[0] for one in results), *batches)

    def done(self, entry_id: bytes) -> None:
        """The entry's run is over and nothing is to be kept of it."""
        ids = self._ids
        ids.append(entry_id)
        if len(ids) >= ACK_BATCH:
            self.run_once()
        elif self._timer is None:
            self._arm(ACK_IDLE_S)

    def done_and_told(self, entry: Entry, duration_us: int) -> None:
        """The same, where there are events, metrics or a history."""
        if self._history is not None:
            self._finish(entry, duration_us, entry.job_id, None, b"")
            return
        if self._events is not None:
            key, ts_ms = self._keys.events, time.time_ns() // 1_000_000
            xadd_run_event(self._told, key, COMPLETED, entry, ts_ms, entry.attempt + 1, duration_us)
        if self._metrics is not None:
            self._count(entry, duration_us)
        self.done(entry.id)

    def done_with_result(self, entry: Entry, duration_us: int, job_id: str, result: bytes) -> None:
        """The same, with a return value to store."""
        self._finish(entry, duration_us, job_id, self._keys.result(job_id), result)

    def _finish(
        self, entry: Entry, duration_us: int, job_id: str, key: bytes | None, result: bytes
    ) -> None:
        told: Told = ()
        self._result_bytes += len(result)
        if self._events is not None or self._history is not None:
            ts_ms = time.time_ns() // 1_000_000
            created_ms = entry.untold_created_ms
            own = b"" if created_ms is None else created_ms
            told = job_id, ts_ms, entry.name, entry.attempt + 1, duration_us, own
            if self._history is not None:
                told += (entry.envelope,)
                self._result_bytes += len(entry.envelope or b"")
        self._results.append((entry.id, key, result, told))
        if self._metrics is not None:
            self._count(entry, duration_us)
        if len(self._results) >= RESULT_BATCH or self._result_bytes >= RESULT_BYTES:
            self.run_once()
        elif self._timer is None:
            self._arm(ACK_IDLE_S)

    def _count(self, entry: Entry, duration_us: int) -> None:
        assert self._metrics is not None
        outcome = JobOutcome(OutcomeKind.OK, entry.attempt + 1, duration_us, entry.name)
        if self._are_ours((entry.id,), self._holdings.sure_for_s):
            self._metrics.job_outcome(outcome)
        else:
            self._outcomes[entry.id] = outcome

    def _count_doubtful(self, ids: list[bytes], lost: list[bytes]) -> None:
        """Report the runs that count after all, now that the server has said whose they were."""
        if self._metrics is not None and self._outcomes:
            for entry_id in ids:
                outcome = self._outcomes.pop(entry_id, None)
                if outcome is not None and entry_id not in lost:
                    self._metrics.job_outcome(outcome)

    def run_once(self) -> int:
        """Send what has gathered; how many entries that was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events is not None:
            self._events.run_once()  # `active` goes before `completed`
        batches = list(self._gathered())
        self._inflight.update(batches)
        if self._ids:
            self._ids = []
            self._told.clear()
        if self._results:
            self._results, self._result_bytes = [], 0
        for batch in batches:
            self._post(batch)
        return sum(len(batch.ids) for batch in batches)

    def _gathered(self) -> Iterator["AckBatch"]:
        # A call stores the results of all its jobs, or of none.
        for has_result in (True, False):
            runs = [one for one in self._results if (one[1] is not None) is has_result]
            # The history's envelopes are the larger part.
            sizes = [one[2] if self._history is None else one[3][-1] for one in runs]
            for part in cut(sizes, RESULT_BATCH, RESULT_BYTES):
                ids = [entry_id for entry_id, _, _, _ in runs[part]]
                yield AckBatch(self, ids, results=runs[part])
        if self._ids:
            yield AckBatch(self, self._ids, told=bytes(self._told))

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
        connection = self._connection
        if connection.is_congested and not connection.is_closed:
            asyncio.get_running_loop().call_later(CONGESTED_S, self._again, batch)
            return
        try:
            batch.request = self._request(batch)
            connection.post(batch.request, batch)
        except Exception as error:
            batch.set_exception(error)

    def _request(self, batch: "AckBatch") -> Request:
        sure_for_s = self._holdings.sure_for_s
        batch.is_fenced = (
            batch.results is not None
            or batch.must_fence
            or not self._are_ours(batch.ids, sure_for_s)
        )
        return self._fenced(batch) if batch.is_fenced else self._plain(batch, sure_for_s)

    def _are_ours(self, ids: Sequence[bytes], sure_for_s: float) -> bool:
        """Whether these entries are ours for certain, and for long enough to tell the server: too
        short a time would only make the connection give up on one that is slow."""
        holdings = self._holdings
        # A beat may have come since the end of a run: the leases are certain again, but what had
        # been taken over before that is not ours.
        return sure_for_s >= holdings.lease_s / 6 and (
            not holdings.missing or holdings.missing.isdisjoint(ids)
        )

    def _fenced(self, batch: "AckBatch") -> Request:
        keys = [self._keys.stream]
        is_told = self._events is not None and (batch.results is not None or bool(batch.told))
        events = self._keys.events if is_told else b""
        history = self._keys.history if self._history is not None else b""
        arguments: list[Any] = [self._group, batch.owner, self._result_ttl_ms, events, history]
        if batch.results is not None:
            for entry_id, key, value, told in batch.results:
                if key is not None:
                    keys.append(key)
                arguments += (entry_id, value, *told)
        else:
            all_told = _parsed(batch.told) if batch.told else itertools.repeat((), len(batch.ids))
            for entry_id, told in zip(batch.ids, all_told, strict=True):
                arguments += (entry_id, b"", *told)
        return scripts.call(scripts.COMPLETE, keys, arguments, Effect.IDEMPOTENT)

    def _plain(self, batch: "AckBatch", sure_for_s: float) -> Request:
        buffer, script = self._buffer, None
        profile = self._connection.profile
        if profile is not None and profile.xackdel:
            xackdel(buffer, self._keys.stream, self._group_bytes, batch.ids)
        else:
            script = scripts.ACK
            evalsha(buffer, script.sha, [self._keys.stream], [self._group, *batch.ids])
        request = Request(
            bytes(buffer) + batch.told,
            Effect.IDEMPOTENT,
            count=1 + (len(batch.ids) if batch.told else 0),
            script=script,
            raises=not batch.told,
            timeout_s=sure_for_s,  # not sent again after that: then the fence must decide
        )
        buffer.clear()
        if script is not None and batch.told and (profile is None or profile is not self._taught):
            # A script that a server does not know is sent again only if it is alone.
            request.send_source()
            self._taught = profile
        return request

    def _answered(self, batch: "AckBatch", flags: Any) -> None:
        lost: list[bytes] = []
        if batch.is_fenced:
            pairs = zip(batch.ids, flags, strict=True)
            lost = [entry_id for entry_id, flag in pairs if flag == NOT_OURS]
            if self._history is not None:
                self._history.wrote(len(flags) - len(lost))
            if NOT_STORED in flags:
                self._not_stored(flags.count(NOT_STORED))
        self._count_doubtful(batch.ids, lost)
        # After a repeat a missing entry may well be one that the first try acknowledged.
        was_repeated = batch.must_fence or (batch.request is not None and batch.request.is_in_doubt)
        self._finished(batch, [] if was_repeated else lost)
        if lost or (isinstance(flags, int) and flags < len(batch.ids)):
            self._on_missing()

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
            self._count_doubtful(batch.ids, batch.ids)
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
        batch.request = None  # it is encoded anew: many may wait, and only once in memory
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
        "told",
    )

    def __init__(
        self,
        acker: Acker,
        ids: list[bytes],
        *,
        results: list[tuple[bytes, bytes | None, bytes, Told]] | None = None,
        told: bytes = b"",
    ) -> None:
        self._acker = acker
        #: Who must own them, where that is asked.
        self.owner = acker._consumer_id
        self.ids = ids
        self.results = results
        #: Without results: an XADD for each of the ids, or nothing.
        self.told = told
        self.request: Request | None = None
        self.is_fenced = False
        self.must_fence = False

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        acker = self._acker
        if self.told and not self.is_fenced:
            reply, *of_events = reply
            if type(reply) is ReplyError:
                self.set_exception(exception_for(reply))
                return
            assert acker._events is not None
            acker._events.take_replies(of_events)
        if not self.is_fenced and isinstance(reply, list) and NOT_PENDING in reply:
            # All events are written. Most entries that were not pending are gone, and those that
            # are pending again were delivered anew. An entry whose consumer was deleted is left.
            flags = list(zip(self.ids, reply, strict=True))
            acker._count_doubtful([one for one, flag in flags if flag != NOT_PENDING], [])
            self.ids = [one for one, flag in flags if flag == NOT_PENDING]
            self.must_fence, self.owner, self.told = True, NOBODY, b""
            acker._post(self)
            return
        acker._answered(self, reply)

    def set_exception(self, error: Exception, /) -> None:
        self._acker._failed(self, error)


def _parsed(events: bytes) -> Iterator[Told]:
    """What COMPLETE takes of each event, from their encoded XADDs."""
    reader = ReplyReader()
    reader.feed(events)
    while (words := reader.read(None)) is not INCOMPLETE:
        found = dict(zip(words[3::2], words[4::2], strict=True))
        yield (
            found[EVENT_JOB_ID],
            found[EVENT_TS],
            found.get(NAME, b""),
            found[EVENT_ATTEMPT],
            found[EVENT_DURATION_US],
            found.get(EVENT_CREATED, b""),
        )
