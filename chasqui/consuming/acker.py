"""The acker: takes entries whose runs returned out of the stream, stores their results and writes
their `completed` events.

While the lease is certain, acknowledgements are a plain XACKDEL with the events behind it in the
same request: after a lost link all of it is sent again. Once the lease may have lapsed, a script
checks that each entry is still ours, and writes its event only then: a late acknowledgement must
not take a job from its new owner, nor say that it is done. The script also stores results, and
repeats what could not be sent. Where the history is kept, the script is the only way: it writes the
entry of the history in the same step. Steps of flows have a script of their own, which also moves
their flows on.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import slices_by_size, xadd_run_event
from chasqui._core.entry import Entry
from chasqui._core.reply import INCOMPLETE, ReplyError, ReplyReader
from chasqui.consuming.held import Held
from chasqui.consuming.history import History
from chasqui.consuming.settler import Settlement, Settler
from chasqui.events.kinds import COMPLETED
from chasqui.events.writer import EventWriter
from chasqui.metrics import JobOutcome, MetricsSink, OutcomeKind
from chasqui.model.keys import (
    EVENT_ATTEMPT,
    EVENT_CREATED,
    EVENT_DURATION_US,
    EVENT_JOB_ID,
    EVENT_TS,
    NAME,
)
from chasqui.model.steps import StepId
from chasqui.scripts import flowing, settling
from chasqui.scripts.flowing import NIL, Bounds, StepEnd
from chasqui.scripts.settling import NOT_OURS, NOT_PENDING, NOT_STORED, Completion, Consumer, Facts
from chasqui.transport.connection import Connection
from chasqui.transport.request import Request
from chasqui.transport.server import ServerProfile, exception_for

#: An acknowledgement waits at most this long for others to share its command.
ACK_IDLE_S: Final = 0.005
#: The most acknowledgements in one command.
MAX_ACKS: Final = 1000
#: Results need a script: fewer at a time and not too many bytes, so as not to hold the server up.
MAX_RESULTS: Final = 100
RESULT_BYTES: Final = 1 << 20
#: Owns nothing: no consumer has this name.
NOBODY: Final = " "


class Acks(Settlement):
    """Acknowledgements that leave together."""

    __slots__ = ("completions", "events", "is_fenced", "owner", "steps")

    def __init__(
        self,
        acker: "Acker",
        ids: list[bytes],
        *,
        completions: list[Completion] | None = None,
        steps: list[StepEnd] | None = None,
        events: bytes = b"",
    ) -> None:
        super().__init__(acker, ids)
        #: The consumer that must own them, where the script asks.
        self.owner = acker._consumer
        #: What only the script can do; None if the plain way will do.
        self.completions = completions
        #: Steps of flows, if it is those.
        self.steps = steps
        #: For the plain way: an encoded XADD for each of the ids, or nothing.
        self.events = events
        #: Whether the script was sent.
        self.is_fenced = False


class Acker(Settler[Acks]):
    """Gathers entries that are done and acknowledges them."""

    REFUSED = "queue %s: %d acks are refused and sent again: %s"
    COUNTED_AS = "acks"

    def __init__(
        self,
        connection: Connection,
        consumer: Consumer,
        held: Held,
        *,
        events: EventWriter | None,
        history: History | None,
        metrics: MetricsSink | None,
        bounds: Bounds,
    ) -> None:
        super().__init__(connection, consumer, held, events=events, history=history)
        self._metrics = metrics
        self._bounds = bounds
        #: Done, with nothing to store.
        self._ids: list[bytes] = []
        #: The XADD of an event for each of them, if there are events.
        self._completed = CommandBuffer()
        #: Done, and only the script can settle them: with a result, or for the history.
        self._completions: list[Completion] = []
        self._completion_bytes = 0
        #: Steps of flows that are done.
        self._steps: list[StepEnd] = []
        #: By entry id, runs that may not count: the metrics hear of them once the server has said
        #: whose the entries were.
        self._outcomes: dict[bytes, JobOutcome] = {}
        #: The link whose server has seen the source of the script.
        self._taught: ServerProfile | None = None

    # ── Runs that are over ──────────────────────────────────────────────────────────────────────

    def done(self, entry_id: bytes) -> None:
        """The run returned, and nothing but the acknowledgement is left to do."""
        ids = self._ids
        ids.append(entry_id)
        if len(ids) >= MAX_ACKS:
            self.run_once()
        elif self._timer is None:
            self._arm()

    def done_with_report(self, entry: Entry, duration_us: int) -> None:
        """The same, where there are events, metrics or a history."""
        if self._history is not None:
            self._complete(entry, duration_us, entry.job_id, None, b"")
            return
        if self._events is not None:
            key, ts_ms = self._keys.events, time.time_ns() // 1_000_000
            attempt = entry.attempt + 1
            xadd_run_event(self._completed, key, COMPLETED, entry, ts_ms, attempt, duration_us)
        if self._metrics is not None:
            self._count(entry, duration_us)
        self.done(entry.id)

    def done_with_result(self, entry: Entry, duration_us: int, job_id: str, result: bytes) -> None:
        """The same, with a return value to store."""
        self._complete(entry, duration_us, job_id, self._keys.result(job_id), result)

    def done_step(
        self, entry: Entry, place: StepId, duration_us: int, result: bytes | None, *, stores: bool
    ) -> None:
        """The same for a step of a flow. `stores`: whether the result is stored even if it is only
        an argument of the next step."""
        result = NIL if result is None else result
        facts: Facts = time.time_ns() // 1_000_000, entry.name, entry.attempt + 1, duration_us
        facts += (entry.created_at_ms,)
        self._completion_bytes += len(result)
        if self._history is not None:
            facts += (entry.envelope,)
            self._completion_bytes += len(entry.envelope or b"")
        self._steps.append(StepEnd(entry.id, entry.job_id, place, result, stores, facts))
        if self._metrics is not None:
            self._count(entry, duration_us)
        if len(self._steps) >= MAX_RESULTS or self._completion_bytes >= RESULT_BYTES:
            self.run_once()
        elif self._timer is None:
            self._arm()

    def _complete(
        self, entry: Entry, duration_us: int, job_id: str, key: bytes | None, result: bytes
    ) -> None:
        facts: Facts = ()
        self._completion_bytes += len(result)
        if self._events is not None or self._history is not None:
            ts_ms = time.time_ns() // 1_000_000
            created_ms = entry.untold_created_ms
            created: bytes | int = b"" if created_ms is None else created_ms
            facts = job_id, ts_ms, entry.name, entry.attempt + 1, duration_us, created
            if self._history is not None:
                facts += (entry.envelope,)
                self._completion_bytes += len(entry.envelope or b"")
        self._completions.append((entry.id, key, result, facts))
        if self._metrics is not None:
            self._count(entry, duration_us)
        if len(self._completions) >= MAX_RESULTS or self._completion_bytes >= RESULT_BYTES:
            self.run_once()
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._empty.clear()
        self._timer = asyncio.get_running_loop().call_later(ACK_IDLE_S, self.run_once)

    def _count(self, entry: Entry, duration_us: int) -> None:
        assert self._metrics is not None
        outcome = JobOutcome(OutcomeKind.OK, entry.attempt + 1, duration_us, entry.name)
        if self._are_ours((entry.id,), self._held.sure_for_s):
            self._metrics.job_outcome(outcome)
        else:
            self._outcomes[entry.id] = outcome

    def _count_doubtful(self, ids: Iterable[bytes]) -> None:
        """Count runs that were in doubt, now that the server has said that they were ours."""
        if self._metrics is not None and self._outcomes:
            for entry_id in ids:
                if (outcome := self._outcomes.pop(entry_id, None)) is not None:
                    self._metrics.job_outcome(outcome)

    # ── Requests ────────────────────────────────────────────────────────────────────────────────

    def _gathered_ids(self) -> Iterable[bytes]:
        completed = (completion[0] for completion in tuple(self._completions))
        return (*self._ids, *completed, *(step.entry_id for step in tuple(self._steps)))

    def _take_gathered(self) -> list[Acks]:
        gathered: list[Acks] = []
        # The script takes a result for each of its jobs, or for none.
        for has_result in (True, False) if self._completions else ():
            done = [one for one in self._completions if (one[1] is not None) is has_result]
            # The history's envelopes are the larger part.
            sizes = [one[2] if self._history is None else one[3][-1] for one in done]
            for part in slices_by_size(sizes, MAX_RESULTS, RESULT_BYTES):
                ids = [entry_id for entry_id, _, _, _ in done[part]]
                gathered.append(Acks(self, ids, completions=done[part]))
        if self._steps:
            sizes = [one.result if self._history is None else one.facts[-1] for one in self._steps]
            for part in slices_by_size(sizes, MAX_RESULTS, RESULT_BYTES):
                steps = self._steps[part]
                gathered.append(Acks(self, [one.entry_id for one in steps], steps=steps))
        if self._ids:
            gathered.append(Acks(self, self._ids, events=bytes(self._completed)))
        self._inflight.update(gathered)
        self._ids, self._completions, self._steps, self._completion_bytes = [], [], [], 0
        self._completed.clear()
        return gathered

    def _request(self, settlement: Acks) -> Request:
        sure_for_s = self._held.sure_for_s
        settlement.is_fenced = (
            settlement.completions is not None
            or settlement.steps is not None
            or settlement.was_repeated
            or not self._are_ours(settlement.ids, sure_for_s)
        )
        if settlement.is_fenced:
            return self._fenced(settlement)
        return self._plain(settlement, sure_for_s)

    def _are_ours(self, ids: Sequence[bytes], sure_for_s: float) -> bool:
        """Whether these entries are ours for certain, and for long enough to tell the server: too
        short a time would only make the connection give up on a slow one."""
        held = self._held
        # The heartbeat may have renewed since the end of a run: the leases are certain again, but
        # what had been taken over before that is not ours.
        return sure_for_s >= held.lease_s / 6 and (not held.missing or held.missing.isdisjoint(ids))

    def _fenced(self, acks: Acks) -> Request:
        history = self._history is not None
        if acks.steps is not None:
            events = self._events is not None
            return flowing.step(
                acks.owner, acks.steps, self._bounds, events=events, history=history
            )
        completions: Iterable[Completion] | None = acks.completions
        events = self._events is not None and (completions is not None or bool(acks.events))
        if completions is None:
            of_all = _facts_of(acks.events) if acks.events else itertools.repeat((), len(acks.ids))
            pairs = zip(acks.ids, of_all, strict=True)
            completions = ((entry_id, None, b"", facts) for entry_id, facts in pairs)
        return settling.complete(
            acks.owner,
            completions,
            result_ttl_ms=self._bounds.result_ttl_ms,
            events=events,
            history=history,
        )

    def _plain(self, acks: Acks, sure_for_s: float) -> Request:
        profile = self._connection.profile
        request = settling.ack(
            self._consumer,
            acks.ids,
            acks.events,
            has_xackdel=profile is not None and profile.xackdel,
            timeout_s=sure_for_s,  # not sent again after that: then the fence must decide
        )
        is_taught = profile is not None and profile is self._taught
        if request.script is not None and acks.events and not is_taught:
            # A script that a server does not know is sent again only if it is alone.
            request.send_source()
            self._taught = profile
        return request

    # ── Replies ─────────────────────────────────────────────────────────────────────────────────

    def _answered(self, settlement: Acks, reply: Any) -> None:
        if not settlement.is_fenced:
            if settlement.events:
                reply, *of_events = reply
                if type(reply) is ReplyError:
                    self._failed(settlement, exception_for(reply))
                    return
                assert self._events is not None
                self._events.take_replies(of_events)
            if isinstance(reply, list) and NOT_PENDING in reply:
                self._settle_orphans(settlement, reply)
                return
        super()._answered(settlement, reply)

    def _settle_orphans(self, acks: Acks, flags: list[int]) -> None:
        """See to entries that were not pending. Most of them are gone; those that are pending again
        were delivered anew. An entry whose consumer was deleted is left, and ours to finish. All
        events are written."""
        pairs = list(zip(acks.ids, flags, strict=True))
        self._count_doubtful(entry_id for entry_id, flag in pairs if flag != NOT_PENDING)
        acks.ids = [entry_id for entry_id, flag in pairs if flag == NOT_PENDING]
        acks.was_repeated, acks.events = True, b""
        acks.owner = acks.owner._replace(name=NOBODY)
        self._post(acks)

    def _settled(self, settlement: Acks, reply: Any) -> list[bytes]:
        lost: list[bytes] = []
        if settlement.is_fenced:
            pairs = zip(settlement.ids, reply, strict=True)
            lost = [entry_id for entry_id, flag in pairs if flag == NOT_OURS]
            if self._history is not None:
                self._history.wrote(len(reply) - len(lost))
            if NOT_STORED in reply:
                text = "queue %s: the server would not store the results of %d jobs"
                count = reply.count(NOT_STORED)
                self.log.warning(text, self._keys.queue, count, results=count)
            if settlement.steps is not None:
                self._tell_of_flows([one.job_id for one in settlement.steps], reply)
        elif isinstance(reply, int) and reply < len(settlement.ids):
            self._held.must_recover = True
        self._count_doubtful(one for one in settlement.ids if one not in lost)
        return lost

    def _finished(self, settlement: Acks) -> None:
        if self._outcomes:
            for entry_id in settlement.ids:
                self._outcomes.pop(entry_id, None)
        super()._finished(settlement)


def _facts_of(events: bytes) -> Iterator[Facts]:
    """What the script wants to know of each event, from their encoded XADDs."""
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
